"""The tuned lens against its definition: identity at the start, KL and gradients by hand, honest splits, files that refuse."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from interp import Inputs, ModelConfig, Transformer, logit_lens, run
from interp.analyses.logit_lens import LensError, lens_bias
from interp.analyses.tuned_lens import TunedLens
from interp.hookable import UnsupportedModelError

DRAWN = torch.randint(0, 13, (60, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture(scope="module")
def lens(model):
    return TunedLens.train(model, DRAWN, steps=40, learning_rate=1e-2, batch_tokens=140, seed=5)


def test_without_a_step_it_is_the_logit_lens_exactly(model, tokens):
    plain = TunedLens.train(model, DRAWN, sites=["resid_pre", "1.resid_post"], steps=0)
    streams = run(model, tokens, record=plain.sites).cache
    for site in plain.sites:
        assert torch.equal(plain(streams[site], site), model.unembed(streams[site])), site
    table = plain.compare(model, tokens)
    by = table.set_index(["site", "lens"])
    for name in ("kl_to_final", "cross_entropy", "bias", "agreement"):
        assert (by.xs("logit", level=1)[name] == by.xs("tuned", level=1)[name]).all(), name
    assert (table["kl_minus_plain"] == 0).all() and not table["worse"].any()


def test_the_comparison_holds_the_definitions_in_numpy(model, lens, tokens):
    """KL(final ‖ lens) and not its reverse, cross-entropy to the next token, KL of the means: by hand, per token."""
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, :2] = False
    got = run(model, Inputs(tokens, mask=mask), record="1.resid_pre")
    A, b = lens.A[lens.sites[1]].numpy(), lens.b[lens.sites[1]].numpy()
    p, q, nats = [], [], []
    for i in range(3):
        for t in range(7):
            if not mask[i, t]:
                continue
            h = got.cache["1.resid_pre"][i, t].numpy()
            h = h + A @ h + b
            h = h / np.sqrt((h**2).mean() + model.config.norm_eps) * model.final_norm.weight.detach().numpy()
            logits = h @ model.W_U.detach().numpy()
            q.append(np.exp(logits) / np.exp(logits).sum())
            final = np.exp(got.logits[i, t].numpy())
            p.append(final / final.sum())
            if t < 6:
                nats.append(-np.log(q[-1][int(tokens[i, t + 1])]))
    p, q = np.array(p), np.array(q)
    row = lens.compare(inputs=Inputs(tokens, mask=mask), batch_tokens=7).query("layer == 1 and lens == 'tuned'").iloc[0]
    assert row["n"] == 19 and row["n_next"] == 16 and row["sequences"] == 3 and row["seen"] == 0
    assert row["kl_to_final"] == pytest.approx((p * np.log(p / q)).sum(1).mean(), rel=1e-10)
    assert row["cross_entropy"] == pytest.approx(np.mean(nats), rel=1e-10)
    p, q = p.mean(0), q.mean(0)
    assert row["bias"] == pytest.approx((q * np.log(q / p)).sum(), rel=1e-9)


def test_a_step_goes_down_the_divergence_from_the_final_distribution(model):
    """One step of SGD over all training sequences against central differences of KL(final ‖ lens), each site its own."""
    found = TunedLens.train(model, DRAWN[:6], optimizer="sgd", steps=1, batch_tokens=10_000, held_out=0.1)
    held = found.held_out[0].tokens[0]
    used = DRAWN[:6][(DRAWN[:6] != held).any(1)]
    got = run(model, used, record="resid_pre")
    p = got.logits.softmax(-1)
    for site in found.sites:
        h = got.cache[site]

        def divergence(b, h=h):
            return float((p * (p.log() - model.unembed(h + b).detach().log_softmax(-1))).sum(-1).mean())

        row = found.history[found.history["site"] == str(site)]["loss"].item()
        assert row == pytest.approx(divergence(torch.zeros(16)), rel=1e-12)
        slope = torch.tensor([divergence(1e-5 * e) - divergence(-1e-5 * e) for e in torch.eye(16).double()]) / 2e-5
        assert torch.nn.functional.cosine_similarity(found.b[site], -slope, dim=0) > 1 - 1e-8


def test_training_lowers_the_held_out_divergence_of_a_planted_turn():
    """The first layer's stream is the last one turned (a planted orthogonal map): exactly what an affine lens can undo."""
    config = ModelConfig(vocab=11, n_layers=1, n_heads=1, d_model=8, n_ctx=6, norm="none", ffn="none", positions="none")
    planted = Transformer(config, seed=0)
    data = torch.randint(0, 11, (200, 6), generator=torch.Generator().manual_seed(0))

    class Turned:
        """The planted model, its last stream multiplied by M; `resid_pre` stands before the turn."""

        def __init__(self):
            self.M = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(1))).Q * 3
            self.config, self.sites, self.can_resume = planted.config, planted.sites, False
            self.additive_stream, self.weight, self.unembed = True, planted.weight, planted.unembed

        def __call__(self, inputs, tap=None):
            x = planted.embed(inputs, tap)
            x = tap(planted.sites[1], x)
            return planted.unembed(x @ self.M)

    table = TunedLens.train(Turned(), data, steps=250, learning_rate=2e-2, batch_tokens=240).compare()
    plain, tuned = table["kl_to_final"]
    assert plain > 0.5 and tuned < 0.02 and table["kl_minus_plain"].tolist() == [0.0, pytest.approx(tuned - plain)]
    assert table["agreement"].iloc[1] > 0.9 > table["agreement"].iloc[0] and not table["worse"].any()


def test_a_lens_that_is_worse_held_out_says_so(model):
    """SGD with an absurd rate on three sequences: the table must not hide it."""
    bad = TunedLens.train(model, DRAWN[:4], steps=30, learning_rate=3.0, optimizer="adam", held_out=0.3)
    tuned = bad.compare().query("lens == 'tuned'")
    assert tuned["worse"].all() and (tuned["kl_minus_plain"] > 0).all()


def test_equal_seeds_equal_lenses_and_the_model_stays_as_it_was(model, lens):
    before = {name: (p.requires_grad, p.clone()) for name, p in model.named_parameters()}
    again = TunedLens.train(model, DRAWN, steps=40, learning_rate=1e-2, batch_tokens=140, seed=5)
    other = TunedLens.train(model, DRAWN, steps=40, learning_rate=1e-2, batch_tokens=140, seed=6)
    for site in lens.sites:
        assert torch.equal(lens.A[site], again.A[site]) and torch.equal(lens.b[site], again.b[site])
        assert not torch.equal(lens.A[site], other.A[site]) and not lens.A[site].requires_grad
    for name, p in model.named_parameters():
        trainable, value = before[name]
        assert p.grad is None and p.requires_grad == trainable and torch.equal(p, value)


def test_the_papers_descent_and_iterables_of_other_lengths(model):
    found = TunedLens.train(model, iter([DRAWN[:20], DRAWN[20:, :5]]), optimizer="sgd", steps=30, batch_tokens=70)
    loss = found.history.query("site == '0.resid_pre'")["loss"]
    assert len(loss) == 30 and found.settings["learning_rate"] == pytest.approx(0.1)
    assert loss.iloc[-5:].mean() < loss.iloc[:5].mean()
    assert {one.length for one in found.held_out} <= {5, 7} and sum(one.batch for one in found.held_out) == 6


def test_equal_sequences_never_stand_on_both_sides(model):
    doubled = torch.cat([DRAWN[:6], DRAWN[:6], DRAWN[:6]])
    found = TunedLens.train(model, doubled, held_out=0.5, steps=1)
    held = {tuple(row) for one in found.held_out for row in one.tokens.tolist()}
    assert len(held) == 3 and sum(one.batch for one in found.held_out) == 9 and len(found.trained_on) == 3
    assert (found.compare()["seen"] == 0).all() and (found.compare(inputs=doubled)["seen"] == 9).all()


def test_saved_and_loaded_it_is_the_same(model, lens, tokens, tmp_path):
    again = TunedLens.load(lens.save(tmp_path / "lens"), model)
    assert again.compare(inputs=tokens).equals(lens.compare(inputs=tokens)) and again.settings == lens.settings
    with pytest.raises(FileExistsError, match="never overwritten"):
        lens.save(tmp_path / "lens")
    with pytest.raises(LensError, match="no held-out sequences"):
        again.compare()
    assert [one.name for one in tmp_path.iterdir()] == ["lens"]


def test_other_models_and_broken_files_are_refused(model, config, lens, tmp_path):
    folder = lens.save(tmp_path / "lens")
    with pytest.raises(LensError, match="weights differ"):
        TunedLens.load(folder, Transformer(config, seed=2).double())
    small = ModelConfig(vocab=13, n_layers=1, n_heads=1, d_model=8, n_ctx=8)
    with pytest.raises(LensError, match="d_model 16, not 8"):
        TunedLens.load(folder, Transformer(small))
    with pytest.raises(LensError, match="another model"):
        lens.compare(Transformer(small))
    path = folder / "weights.safetensors"
    whole = path.read_bytes()
    for cut in (0, 5, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:cut])
        with pytest.raises(LensError, match="truncated"):
            TunedLens.load(folder, model)
    path.write_bytes(whole[:-8] + np.array([np.nan]).tobytes())
    with pytest.raises(LensError, match="NaN"):
        TunedLens.load(folder, model)
    path.write_bytes(whole)
    document = json.loads((folder / "lens.json").read_text())
    for text, match in (
        ("{", "missing or broken"),
        ("[]", "missing or broken"),
        (json.dumps({**document, "format": "x"}), "format 'x'"),
        (json.dumps({**document, "sites": document["sites"][:1]}), "no such name"),
    ):
        (folder / "lens.json").write_text(text)
        with pytest.raises(LensError, match=match):
            TunedLens.load(folder, model)
    lens.b[lens.sites[0]][0], kept = np.nan, float(lens.b[lens.sites[0]][0])
    with pytest.raises(LensError, match="NaN"):
        lens.save(tmp_path / "other")
    lens.b[lens.sites[0]][0] = kept


def test_refusals(model, lens, tokens):
    headless = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=1, d_model=8, n_ctx=8, head=False))
    with pytest.raises(UnsupportedModelError, match="no unembedding"):
        TunedLens.train(headless, DRAWN)
    for options, match in (
        ({"held_out": 0.0}, "held_out"), ({"steps": -1}, "steps"), ({"optimizer": "lion"}, "'sgd'"),
        ({"learning_rate": -1.0}, "learning_rate"), ({"batch_tokens": 0}, "batch_tokens"), ({"sites": "z"}, "not 0.z"),
    ):  # fmt: skip
        with pytest.raises(LensError, match=match):
            TunedLens.train(model, DRAWN, **options)
    with pytest.raises(LensError, match="at least 2"):
        TunedLens.train(model, DRAWN[:1])
    with pytest.raises(LensError, match=r"no translator for '1\.resid_post'"):
        lens(torch.zeros(16), "1.resid_post")


def test_bias_of_a_lens_without_any_and_of_one_that_favours_a_token(model):
    table = lens_bias(model, [DRAWN[:10], DRAWN[10:]], batch_tokens=30)
    last = table[table["site"] == "1.resid_post"].iloc[0]
    assert abs(last["bias"]) < 1e-12 and last["n"] == 420 and (table["bias"] > -1e-12).all()
    assert table["bias"].max() > 1e-3 and list(table) == ["site", "layer", "name", "bias", "n"]
    shares = [0.0, 0.0]
    for row in DRAWN.tolist():  # the definition, from the other function's code path
        got = run(model, torch.tensor([row]), record="0.resid_pre")
        shares[0] = shares[0] + model.unembed(got.cache["0.resid_pre"]).softmax(-1).sum((0, 1)).detach()
        shares[1] = shares[1] + got.logits.softmax(-1).sum((0, 1))
    p, q = (one / 420 for one in shares)
    assert table["bias"].iloc[0] == pytest.approx(float((p * (p / q).log()).sum()), rel=1e-9)
    assert logit_lens(model, DRAWN[:2]).shape[0] == 2 * 4
