"""Progress measures: tables of logits planted by hand from chosen frequencies, projections written out, and real models."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from interp import Transformer
from interp.analyses.progress import (
    ProgressError,
    component,
    gini,
    key_frequencies,
    logit_measures,
    logit_power,
    progress_measures,
)
from interp.hookable import UnsupportedModelError
from interp.tasks import Induction, ModularAddition

TASK = ModularAddition(modulus=17, share=0.4, split=3)
P = TASK.modulus
PLANTED = {2: 1.5, 7: 0.8}


def planted(amplitudes, p=P, sign=1):
    """Σ_k A_k cos(w_k(a ± b − c)), written out -> [a b c]."""
    a, b, c = np.meshgrid(*[np.arange(p)] * 3, indexing="ij")
    waves = [size * np.cos(2 * np.pi * k / p * (a + sign * b - c)) for k, size in amplitudes.items()]
    return torch.from_numpy(np.sum(waves, axis=0))


def random_table(p=P, vocab=P + 1, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(p, p, vocab)))


def nats(table, pairs):
    """Mean cross-entropy of (a + b) mod p, pair by pair."""
    table, p = np.asarray(table), len(table)
    return np.mean([math.log(sum(math.exp(x) for x in table[a, b])) - table[a, b, (a + b) % p] for a, b in pairs])


def projected(table, frequencies):
    """The projection of every output's table over inputs on cos w(a+b) and sin w(a+b), by least squares."""
    table = np.asarray(table)
    p, vocab = len(table), table.shape[2]
    a, b = np.meshgrid(np.arange(p), np.arange(p), indexing="ij")
    waves = [f(2 * np.pi * k / p * (a + b)).ravel() for k in frequencies for f in (np.cos, np.sin)]
    basis = np.stack(waves, 1)
    flat = table.reshape(p * p, vocab)
    return (basis @ np.linalg.lstsq(basis, flat, rcond=None)[0]).reshape(table.shape)


def value(table, measure, split, frequency=None):
    rows = table[(table["measure"] == measure) & (table["split"] == split)]
    rows = rows[rows["frequency"].isna() if frequency is None else rows["frequency"] == frequency]
    assert len(rows) == 1
    return rows["value"].item()


PAIRS = {name: pairs.tolist() for name, pairs in TASK.splits.items()}
PAIRS["all"] = [(a, b) for a in range(P) for b in range(P)]


def test_a_planted_circuit_is_all_that_its_frequencies_hold():
    logits = planted(PLANTED)
    table = logit_measures(logits, TASK, list(PLANTED))
    for split, pairs in PAIRS.items():
        full = nats(logits, pairs)
        assert value(table, "loss", split) == pytest.approx(full, abs=1e-12) and full < 2
        assert value(table, "restricted_loss", split) == pytest.approx(full, abs=1e-12)
        assert value(table, "excluded_loss", split) == pytest.approx(math.log(P), abs=1e-12)
        assert value(table, "excluded_loss", split, 2) == pytest.approx(nats(planted({7: 0.8}), pairs), abs=1e-12)
        assert value(table, "excluded_loss", split, 7) == pytest.approx(nats(planted({2: 1.5}), pairs), abs=1e-12)
        assert value(table, "accuracy", split) == 1
    wrong = logit_measures(logits, TASK, [1, 3])
    assert value(wrong, "restricted_loss", "all") == pytest.approx(math.log(P), abs=1e-12)
    assert value(wrong, "excluded_loss", "all") == pytest.approx(nats(logits, PAIRS["all"]), abs=1e-12)


def test_only_waves_of_the_sum_count():
    difference = planted(PLANTED, sign=-1)
    assert logit_power(difference).max() < 1e-20
    table = logit_measures(difference, TASK, list(PLANTED))
    assert value(table, "restricted_loss", "train") == pytest.approx(math.log(P), abs=1e-12)
    assert value(table, "excluded_loss", "train") == pytest.approx(nats(difference, PAIRS["train"]), abs=1e-12)


def test_any_table_equals_its_projections_written_out():
    logits = random_table() + 3 * torch.eye(P, P + 1)[0]  # a mean that the restricted logits must keep
    frequencies = [3, 8, 5]
    kept = projected(logits, frequencies)
    mean = np.asarray(logits).mean((0, 1))
    table = logit_measures(logits, TASK, frequencies)
    for split, pairs in PAIRS.items():
        assert value(table, "loss", split) == pytest.approx(nats(logits, pairs), abs=1e-12)
        assert value(table, "restricted_loss", split) == pytest.approx(nats(kept + mean, pairs), abs=1e-12)
        assert value(table, "excluded_loss", split) == pytest.approx(nats(np.asarray(logits) - kept, pairs), abs=1e-12)
        one = np.asarray(logits) - projected(logits, [8])
        assert value(table, "excluded_loss", split, 8) == pytest.approx(nats(one, pairs), abs=1e-12)
        right = np.mean([int(logits[a, b].argmax()) == (a + b) % P for a, b in pairs])
        assert value(table, "accuracy", split) == pytest.approx(right)


@pytest.mark.parametrize(("p", "k"), [(8, 4), (8, 3), (9, 4)])
def test_the_highest_frequency_of_an_even_modulus_is_one_too(p, k):
    logits = planted({k: 1.0}, p)
    sums = np.add.outer(np.arange(p), np.arange(p)) % p
    assert torch.allclose(component(logits, [k])[sums], logits, atol=1e-12)
    power = logit_power(logits)
    assert len(power) == p // 2 and power[k - 1] == pytest.approx(float(logits.square().sum(-1).mean()))
    assert power.sum() == pytest.approx(float(power[k - 1]))


def test_without_frequencies_the_restricted_logits_are_their_mean():
    table = logit_measures(planted(PLANTED), TASK, [])
    assert value(table, "restricted_loss", "all") == pytest.approx(math.log(P))
    assert value(table, "excluded_loss", "all") == value(table, "loss", "all")


@pytest.fixture(scope="module")
def model():
    return Transformer(TASK.model_config(d_model=32), seed=1).double()


def test_a_random_model_has_no_key_frequency(model):
    for by in ("logits", "embedding"):
        table = key_frequencies(model, TASK, by)
        assert table["frequency"].tolist() == list(range(1, 9)) and not table["key"].any()
        assert table["embedding_share"].sum() == pytest.approx(1) and table["logit_share"].sum() == pytest.approx(1)


def test_planted_frequencies_of_the_embedding_are_found(model):
    changed = Transformer(TASK.model_config(d_model=32), seed=1).double()
    number = torch.arange(P).double()
    with torch.no_grad():
        changed.W_E[:P] *= 0.01
        for row, (k, size) in enumerate({4: 1.0, 6: 2.0}.items()):
            changed.W_E[:P, row] += size * (2 * math.pi * k * number / P + row).cos() + 5
    table = key_frequencies(changed, TASK, by="embedding").set_index("frequency")
    assert table.index[table["key"]].tolist() == [4, 6]
    assert table.loc[6, "embedding_power"] / table.loc[4, "embedding_power"] == pytest.approx(4, rel=0.1)
    assert table.loc[4, "embedding_power"] == pytest.approx(P / 2, rel=0.1)  # Σ over numbers of cos²
    strict = key_frequencies(changed, TASK, by="embedding", multiple=4)
    assert strict.loc[strict["key"], "frequency"].tolist() == [6]
    measured = progress_measures(changed, TASK, [6])
    assert measured.loc[measured["measure"] == "embedding_key_share", "value"].item() == pytest.approx(0.8, abs=0.02)
    concentrated, spread = (
        table.loc[table["measure"] == "embedding_gini", "value"].item()
        for table in (measured, progress_measures(model, TASK))
    )
    assert concentrated > 0.7 > 0.3 > spread


class Wave(torch.nn.Module):
    """What an analysis needs of a model, with logits written by hand at "="; "=" itself is never the answer."""

    def __init__(self, table, offset=0.0):
        super().__init__()
        self.config = TASK.model_config()
        self.sites = Transformer(TASK.model_config(d_model=8)).sites
        self.table = torch.nn.functional.pad(table, (0, 1), value=-40.0) + offset

    def forward(self, inputs, tap=None):
        a, b, _ = inputs.tokens.T
        return torch.stack([torch.zeros_like(self.table[a, b])] * 2 + [self.table[a, b]], 1)

    def weight(self, kind, layer=None, stack=None):
        return torch.ones(P + 1, 2)


@pytest.mark.parametrize("seed", range(5))
def test_a_random_table_has_no_key_frequency(seed):
    assert not key_frequencies(Wave(random_table(vocab=P, seed=seed)), TASK)["key"].any()


def test_key_frequencies_of_the_logits_are_found_and_used():
    wave = Wave(planted(PLANTED), offset=7 * random_table(vocab=1))  # each input's own, which softmax does not see
    table = key_frequencies(wave, TASK)
    assert table.loc[table["key"], "frequency"].tolist() == sorted(PLANTED)
    shares = table.set_index("frequency")["logit_share"]
    assert shares[2] / shares[7] == pytest.approx((1.5 / 0.8) ** 2, rel=1e-3)
    logits = Wave(planted(PLANTED))
    found = progress_measures(logits, TASK)
    assert set(found["frequency"].dropna()) == set(PLANTED)
    assert value(found, "restricted_loss", "all") == pytest.approx(value(found, "loss", "all"), abs=1e-12)
    assert value(found, "excluded_loss", "train") == pytest.approx(math.log(P), abs=1e-12)


def test_the_losses_are_the_models_own(model):
    table = progress_measures(model, TASK, [1])
    for split, batch in TASK.evaluation.items():
        logits = model(batch.inputs)[:, -1].detach()
        expected = torch.nn.functional.cross_entropy(logits, batch.targets[:, 0])
        assert value(table, "loss", split) == pytest.approx(float(expected), abs=1e-12)
    squares = sum((one.detach().numpy() ** 2).sum() for one in model.parameters())
    assert table.loc[table["measure"] == "squared_weights", "value"].item() == pytest.approx(squares)
    assert table["unit"].notna().all() and not table.duplicated(["measure", "frequency", "split"]).any()


def test_gini():
    assert gini(torch.tensor([0.0, 0.0, 0.0, 1.0])) == pytest.approx(0.75)
    assert gini(torch.full((5,), 2.0)) == pytest.approx(0) and gini(torch.zeros(3)) == 0
    values = [3.0, 1.0, 4.0, 1.5]
    pairs = np.abs(np.subtract.outer(values, values)).mean()
    assert gini(torch.tensor(values)) == pytest.approx(pairs / 2 / np.mean(values))


@pytest.mark.parametrize("bad", [[0], [9], [2, 2], [1.5], [True]])
def test_frequencies_that_are_none_are_refused(bad):
    with pytest.raises(ProgressError, match=r"frequencies=.*allowed: different integers in 1 … 8"):
        logit_measures(planted(PLANTED), TASK, bad)


def test_what_does_not_fit_is_refused(model):
    with pytest.raises(ProgressError, match="by='fft' is not allowed; allowed: 'logits', 'embedding'"):
        key_frequencies(model, TASK, by="fft")
    with pytest.raises(ProgressError, match=r"multiple=0\.5 is not allowed"):
        key_frequencies(model, TASK, multiple=0.5)
    with pytest.raises(ProgressError, match="vocab=18 cannot add mod 19; allowed: at least 20"):
        progress_measures(model, ModularAddition(19))
    with pytest.raises(ProgressError, match=r"task must be interp\.tasks\.ModularAddition, got Induction"):
        progress_measures(model, Induction())
    with pytest.raises(ProgressError, match=r"\(17, 17, 17 or more\), got \(17, 17, 16\)"):
        logit_measures(random_table(vocab=16), TASK, [])
    with pytest.raises(UnsupportedModelError, match="no unembedding"):
        progress_measures(Transformer(TASK.model_config(d_model=8, head=False)), TASK)
