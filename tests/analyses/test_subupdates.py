"""Sub-updates sum to the output; shares, events and their controls against plain numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from interp import ModelConfig, Transformer, run
from interp.analyses.subupdates import FFNError, prediction_events, subupdate_shares, vocabulary


@pytest.fixture(scope="module")
def biased() -> Transformer:
    """LayerNorm, GELU and every bias away from 0; the FFN is loud, so that tops change."""
    model = Transformer(ModelConfig(vocab=17, n_layers=3, n_heads=2, d_model=12, n_ctx=16, ffn="gelu"), seed=4).double()
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 2.0 if "down.weight" in name else 0.3
            parameter.add_(scale * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype))
    return model


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(0, 17, (24, 6), generator=torch.Generator().manual_seed(2))


def at(model, tokens, position):
    """Every site at one position, as numpy: {(name, layer): [example …]}."""
    cache = run(model, tokens, record=["ffn_act", "ffn_out", "resid_pre", "resid_mid", "resid_post"]).cache
    return {(site.name, site.layer): value[:, position].numpy() for site, value in cache.items()}


def weights(model, layer):
    return model.weight("W_out", layer).detach().numpy(), model.W_U.detach().numpy()


def test_the_memories_sum_to_the_output_with_its_bias(biased, tokens):
    seen = at(biased, tokens, 3)
    for layer in range(3):
        v, _ = weights(biased, layer)
        whole = np.einsum("ei,id->ed", seen["ffn_act", layer], v) + biased.weight("b_out", layer).detach().numpy()
        assert np.abs(whole - seen["ffn_out", layer]).max() < 1e-12


def test_shares_by_numpy(biased, tokens):
    seen, got = at(biased, tokens, 3), subupdate_shares(biased, tokens, position=3, k=4, batch_size=7)
    assert len(got) == 72 and got["layer"].tolist() == [0, 1, 2] * 24
    for row in got.itertuples():
        v, head = weights(biased, row.layer)
        m, out = seen["ffn_act", row.layer][row.example], seen["ffn_out", row.layer][row.example]
        size = np.abs(m) * np.linalg.norm(v, axis=1)
        best = np.argsort(-size)[:4]
        written = m[best] @ v[best]
        assert row.size_share == pytest.approx(size[best].sum() / size.sum(), abs=1e-12)
        assert row.output_share == pytest.approx(written @ out / (out @ out), abs=1e-12)
        assert row.cosine == pytest.approx(written @ out / np.linalg.norm(written) / np.linalg.norm(out), abs=1e-12)
        assert row.output_top == (out @ head).argmax() and row.of_memories == 4 / len(m)
        tops = {((m[i] * v[i]) @ head).argmax() for i in range(len(m)) if m[i] != 0}
        assert row.composed == (row.output_top not in tops)
    assert got["composed"].nunique() == 2, "both cases occur"


def test_all_memories_without_a_bias_have_the_whole_output(model, tokens):
    got = subupdate_shares(model, tokens % 13, 1, k=43)
    assert np.allclose(got["size_share"], 1) and np.allclose(got["output_share"], 1) and np.allclose(got["cosine"], 1)


@pytest.mark.parametrize("norm", ["none", "final"])
def test_events_by_numpy(biased, tokens, norm):
    seen = at(biased, tokens, -1)
    tops = {(name, layer): biased.unembed(torch.from_numpy(value)).argmax(-1).numpy()
            for (name, layer), value in seen.items() if name.startswith("resid")}  # fmt: skip
    got = prediction_events(biased, tokens, k=4, norm=norm, batch_size=5)
    expected = set()
    for example in range(24):
        final = tops["resid_post", 2][example]
        for layer in range(3):
            before, middle, after = (tops[name, layer][example] for name in ("resid_pre", "resid_mid", "resid_post"))
            if before != final and all(tops["resid_post", later][example] == final for later in range(layer, 3)):
                expected.add((example, layer, "saturation", final, middle != final))
            if before != after:
                expected.add((example, layer, "elimination", before, middle == before))
    found = set(zip(*(got[name] for name in ("example", "layer", "event", "token", "by_ffn")), strict=True))
    assert found == expected and len(got) == 3 * len(expected) and set(got["by_ffn"]) == {True, False}
    gain = biased.final_norm.weight.detach().numpy()
    for row in got[got["updates"] == "dominant"].itertuples():
        v, head = weights(biased, row.layer)
        read = head if norm == "none" else (gain[:, None] * head) - (gain[:, None] * head).mean(0)
        m = seen["ffn_act", row.layer][row.example]
        best = np.argsort(-np.abs(m) * np.linalg.norm(v, axis=1))[:4]
        scores = m[best] * (v[best] @ read[:, row.token])
        assert np.allclose([row.mean, row.max, row.min], [scores.mean(), scores.max(), scores.min()], atol=1e-12)
    assert set(got["norm"]) == {"none" if norm == "none" else "gain, centred"}


def test_matched_updates_have_the_dominant_sizes_and_others_directions():
    """All values equal but in the sizes of their coefficients: random ones score less, matched ones exactly as the dominant."""
    from interp.analyses.subupdates import _scores

    values = torch.ones(20, 4).double()
    act = torch.linspace(1, 20, 20).double()[None]
    got = _scores(act, values, torch.ones(4, 3).double(), torch.tensor([1]), 3, torch.Generator().manual_seed(0))
    assert got["dominant"].tolist() == [[80, 76, 72]] == got["matched"].tolist()
    assert got["random"].amax() <= 68 and len(set(got["random"][0].tolist())) == 3
    silent = torch.zeros(1, 20).double()
    silent[0, :8] = torch.arange(8, 0, -1)
    got = _scores(silent, values, torch.ones(4, 3).double(), torch.tensor([1]), 3, torch.Generator().manual_seed(0))
    assert (got["random"] > 0).all(), "silent memories are drawn only where others are too few"


def test_events_repeat_with_the_seed_and_a_still_model_has_none(biased, tokens):
    one, two = (prediction_events(biased, tokens, k=4, seed=3) for _ in range(2))
    assert one.equals(two)
    other = prediction_events(biased, tokens, k=4, seed=4)
    assert not other.equals(one) and other[other["updates"] == "dominant"].equals(one[one["updates"] == "dominant"])
    import copy

    still = copy.deepcopy(biased)
    with torch.no_grad():
        for block in still.blocks:
            for part in (block.ffn.down, block.attention.out):
                part.weight.zero_()
                part.bias.zero_()
    assert len(prediction_events(still, tokens, k=4)) == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m, t: subupdate_shares(m, t, [0, 3]), r"layers=\[0, 3\].*\[0, 1, 2\]"),
        (lambda m, t: subupdate_shares(m, t, k=0), "k=0"),
        (lambda m, t: prediction_events(m, t, k=25), "1 to 24"),
        (lambda m, t: vocabulary(m, "gain"), "norm='gain'"),
    ],
)
def test_bad_input_is_refused_by_name(biased, tokens, call, message):
    with pytest.raises(FFNError, match=message):
        call(biased, tokens)
    bare = Transformer(ModelConfig(vocab=17, n_layers=1, n_heads=2, d_model=8, n_ctx=8, ffn="none"))
    with pytest.raises(FFNError, match="no FFN"):
        subupdate_shares(bare, tokens)
