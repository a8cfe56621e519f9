"""Patching sweeps against patches written by hand, exact zeros, and refusals."""

from __future__ import annotations

import pytest
import torch

from interp import Inputs, ModelConfig, Transformer, logit_difference, patch_sweep
from interp.metrics import MetricError
from interp.sweep import SweepError


@pytest.fixture(scope="module")
def pair(tokens):
    corrupted = tokens.clone()
    corrupted[:, 3] = (corrupted[:, 3] + 5) % 13
    return tokens, corrupted


METRIC = logit_difference(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))


def by_hand(model, source, base, site, index):
    """One patched run with nothing but the model's tap."""
    kept = {}
    model(source, lambda s, v: kept.setdefault(s, v))

    def patch(s, value):
        if str(s) == site:
            value = value.clone()
            value[index] = kept[s][index]
        return value

    with torch.no_grad():
        logits = model(base, patch)[:, -1]
    rows = torch.arange(3)
    return logits[rows, [1, 2, 3]] - logits[rows, [4, 5, 6]]


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_every_cell_equals_a_patch_by_hand(model, pair, direction):
    clean, corrupted = pair
    source, base = (clean, corrupted) if direction == "denoising" else (corrupted, clean)
    stream = patch_sweep(model, clean, corrupted, METRIC, direction=direction)
    for site, values in stream.values.items():
        assert values.shape == (2, 7, 3)
        for layer in range(2):
            for position in range(7):
                expected = by_hand(model, source, base, f"{layer}.{site}", (slice(None), position))
                assert torch.allclose(values[layer, position], expected, atol=1e-10)
    heads = patch_sweep(model, clean, corrupted, METRIC, "z", ("layer", "head"), direction=direction)
    for layer in range(2):
        for head in range(4):
            expected = by_hand(model, source, base, f"{layer}.z", (slice(None), slice(None), head))
            assert torch.allclose(heads.values["z"][layer, head], expected, atol=1e-10)


def test_a_patch_before_the_first_difference_has_effect_exactly_zero(model, pair):
    got = patch_sweep(model, *pair, METRIC, by=("layer", "position"))
    for values in got.values.values():
        assert torch.equal(values[:, :3], got.corrupted.expand(2, 3, 3))


def test_the_last_stream_restores_everything(model, pair):
    got = patch_sweep(model, *pair, METRIC, "resid_post")
    assert torch.allclose(got.values["resid_post"][1, 6], got.clean, atol=1e-12)
    assert abs(float(got.effect()["resid_post"][1, 6]) - 1) < 1e-12


def test_effect_is_a_ratio_of_means(model, pair):
    got = patch_sweep(model, *pair, METRIC, "ffn_out")
    gain = (got.values["ffn_out"] - got.corrupted).mean(-1)
    assert torch.allclose(got.effect()["ffn_out"], gain / (got.clean.mean() - got.corrupted.mean()))
    noising = patch_sweep(model, *pair, METRIC, "resid_post", direction="noising")
    assert abs(float(noising.effect()["resid_post"][1, 6]) - 1) < 1e-12
    same = patch_sweep(model, pair[0], pair[0], METRIC, "ffn_out")
    with pytest.raises(ValueError, match="same mean logit_difference"):
        same.effect()


def test_the_table_is_tidy_and_complete(model, pair):
    got = patch_sweep(model, *pair, METRIC, ["z", "k"], ("layer", "head", "position"))
    table = got.table()
    assert list(table.columns) == ["site", "layer", "head", "position", "example", "clean", "corrupted", "patched"]
    assert len(table) == 2 * 7 * 3 * (4 + 2), "grouped keys have two heads: no invented cells"
    assert set(table[table["site"] == "k"]["head"]) == {0, 1}
    row = table[(table["site"] == "z") & (table["layer"] == 1) & (table["head"] == 2) & (table["position"] == 5)]
    assert torch.equal(torch.tensor(row["patched"].tolist(), dtype=torch.float64), got.values["z"][1, 2, 5])
    assert row["clean"].tolist() == got.clean.tolist()
    whole = patch_sweep(model, *pair, METRIC, "attn_out", ("layer",)).table()
    assert whole["position"].isna().all() and whole["head"].isna().all() and len(whole) == 6


def test_roles_sweep_each_examples_own_position(model, pair):
    roles = {"subject": torch.tensor([3, 3, 3]), "mixed": torch.tensor([4, 5, 6])}
    clean, corrupted = (Inputs(tokens, roles=roles) for tokens in pair)
    got = patch_sweep(model, clean, corrupted, METRIC, "resid_pre", ("layer", "role"))
    plain = patch_sweep(model, *pair, METRIC, "resid_pre")
    assert torch.allclose(got.values["resid_pre"][:, 0], plain.values["resid_pre"][:, 3], atol=1e-12)
    for example, position in enumerate((4, 5, 6)):
        a = got.values["resid_pre"][:, 1, example]
        assert torch.allclose(a, plain.values["resid_pre"][:, position, example], atol=1e-12)
    assert got.table()["role"].unique().tolist() == ["subject", "mixed"]


def test_chosen_positions_and_all_layers_at_once(model, pair):
    some = patch_sweep(model, *pair, METRIC, "ffn_out", positions=[3, 6])
    every = patch_sweep(model, *pair, METRIC, "ffn_out")
    assert torch.allclose(some.values["ffn_out"], every.values["ffn_out"][:, [3, 6]], atol=1e-12)
    both = patch_sweep(model, *pair, METRIC, ["embed"], ("position",))
    assert torch.allclose(both.values["embed"][3], both.clean, atol=1e-12)
    slow = patch_sweep(model, *pair, METRIC, "ffn_out", positions=[3, 6], engine="reference")
    assert slow.work["forwards"] == 4


def test_it_works_post_norm_and_without_roles_of_its_own(pair):
    model = Transformer(ModelConfig(vocab=13, n_layers=2, n_heads=2, d_model=8, n_ctx=8, norm_position="post")).double()
    got = patch_sweep(model, *pair, METRIC, ["resid_mid_sum", "resid_post"])
    assert torch.allclose(got.values["resid_post"][1, 6], got.clean, atol=1e-12)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"by": ("layer", "layer")}, "by="),
        ({"by": ("position", "role")}, "position or role"),
        ({"by": ()}, "by="),
        ({"by": ("layer", "head")}, "cannot be swept by 'head'"),
        ({"direction": "both"}, "direction='both'"),
        ({"engine": "warp"}, "engine='warp'"),
        ({"sites": []}, "nothing to patch"),
        ({"sites": "embed", "by": ("layer",)}, "has no layer"),
        ({"by": ("layer", "role")}, "needs inputs with roles"),
        ({"by": ("layer",), "positions": [0]}, "needs 'position' in by"),
        ({"positions": []}, "not empty"),
        ({"sites": ["1.z"]}, "names without a layer"),
    ],
)
def test_what_cannot_be_swept_is_refused(model, pair, change, words):
    with pytest.raises(SweepError, match=words):
        patch_sweep(model, *pair, METRIC, **change)


def test_pairs_of_different_length_or_roles_are_refused(model, pair):
    clean, corrupted = pair
    with pytest.raises(SweepError, match=r"shape \(3, 7\) and corrupted ones \(3, 6\)"):
        patch_sweep(model, clean, corrupted[:, :6], METRIC)
    mask = torch.ones(3, 7).bool()
    mask[1, 6] = False
    with pytest.raises(SweepError, match=r"pair\(s\) \[1\]"):
        patch_sweep(model, Inputs(clean, mask=mask), corrupted, METRIC)
    a, b = (Inputs(x, roles={"subject": torch.tensor(p)}) for x, p in ((clean, [1, 2, 3]), (corrupted, [1, 2, 4])))
    with pytest.raises(SweepError, match="different positions"):
        patch_sweep(model, a, b, METRIC, by=("layer", "role"))


def test_a_metric_of_the_wrong_shape_is_refused_before_any_patch(model, pair):
    with pytest.raises(MetricError):
        patch_sweep(model, *pair, lambda logits: logits.mean())


def test_prompts_of_different_length_need_positions_from_the_end_or_roles(model, pair):
    mask = torch.ones(3, 7).bool()
    mask[1, 5:] = False
    clean, corrupted = (Inputs(x, mask=mask) for x in pair)
    with pytest.raises(SweepError, match="no common positions"):
        patch_sweep(model, clean, corrupted, METRIC)
    got = patch_sweep(model, clean, corrupted, METRIC, "resid_post", positions=[-1])
    assert torch.allclose(got.values["resid_post"][1, 0], got.clean, atol=1e-12)
