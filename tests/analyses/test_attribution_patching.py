"""Attribution patching: equal to exact patches where the metric is linear, to finite differences everywhere, honest elsewhere."""

from __future__ import annotations

import pytest
import torch

from interp import Inputs, ModelConfig, Replace, Transformer, logit_difference, patch_sweep, run
from interp.analyses.attribution_patching import attribution_patch
from interp.analyses.estimate_agreement import agreement_of
from interp.hookable import UnsupportedModelError
from interp.model.inputs import InputsError
from interp.sweep import SweepError

METRIC = logit_difference(1, 2)


@pytest.fixture(scope="module")
def other(tokens):
    changed = tokens.clone()
    changed[:, 2] = (changed[:, 2] + 1) % 13
    changed[0, 4] = (changed[0, 4] + 3) % 13
    return changed


@pytest.fixture(scope="module")
def linear():
    """After the last attention nothing but the head: no norm, no FFN."""
    config = ModelConfig(vocab=13, n_layers=2, n_heads=2, d_model=8, n_ctx=8, norm="none", final_norm=False, ffn="none")
    return Transformer(config, seed=4).double()


class Counting:
    """A model that counts its forward passes."""

    def __init__(self, model):
        self.model, self.forwards = model, 0

    def __getattr__(self, name):
        return getattr(self.model, name)

    can_resume = False

    def __call__(self, inputs, tap=None):
        self.forwards += 1
        return self.model(inputs, tap)


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_where_the_logits_are_linear_it_is_the_exact_sweep(linear, tokens, other, direction):
    for sites, by in (
        ("attn_out", ("layer", "position")),
        ("z", ("position", "head", "layer")),
        ("resid_post", ("layer",)),
    ):
        found = attribution_patch(linear, tokens, other, METRIC, sites, by, direction, check=1000)
        swept = patch_sweep(linear, tokens, other, METRIC, sites, by, direction, engine="reference")
        axes = found.sweep.axes[sites]
        assert axes == by == swept.axes[sites] and found.sweep.coordinates == swept.coordinates
        assert torch.allclose(found.sweep.clean, swept.clean, atol=1e-12, rtol=0)
        assert torch.allclose(found.sweep.corrupted, swept.corrupted, atol=1e-12, rtol=0)
        last = [slice(None)] * len(by)
        last[by.index("layer")] = -1
        difference = (found.sweep.values[sites] - swept.values[sites])[tuple(last)]
        assert difference.abs().max() < 1e-10 < found.estimates[sites].abs().max()
    base = swept.corrupted if direction == "denoising" else swept.clean
    known = ~found.exact["resid_post"].isnan()
    assert torch.allclose(found.exact["resid_post"][known], (swept.values["resid_post"] - base)[known], atol=1e-12)


CASES = [
    ("resid_pre", ("layer", "position"), {}),
    ("resid_mid", ("layer", "position"), {}),
    ("resid_post", ("layer",), {}),
    ("attn_out", ("layer", "position"), {}),
    ("ffn_out", ("position", "layer"), {}),
    ("z", ("layer", "head"), {}),
    ("z", ("head", "position", "layer"), {}),
    ("k", ("layer", "head", "position"), {}),
    ("pattern", ("layer", "head"), {}),
    ("ffn_act", ("layer", "neuron"), {}),
    ("ffn_act", ("neuron", "layer", "position"), {"positions": [-1, 2]}),
]


@pytest.mark.parametrize(("site", "by", "options"), CASES)
def test_every_cell_is_the_slope_along_its_patch(model, tokens, other, site, by, options):
    """The metric a small step along the patch, both ways: central differences of full runs, cell by cell."""
    found = attribution_patch(model, tokens, other, METRIC, site, by, check=0, **options)
    table = found.table()
    assert found.agreement.verdict == "not validated" and table["exact"].isna().all()
    clean, base = (run(model, one, record=site).cache for one in (tokens, other))
    step, checked = 1e-5, 0
    cells = table.drop_duplicates(list(by))
    for row in cells.iloc[:: max(1, len(cells) // 12)].to_dict("records"):
        place = f"{row['layer']}.{site}"
        mask = torch.zeros_like(base[place])
        where = tuple(
            row[name] if name in by else slice(None)
            for name in (("head", "position", "position") if site == "pattern" else ("position", "head"))
        )
        if site == "ffn_act":
            where = tuple(row[name] if name in by else slice(None) for name in ("position", "neuron"))
        mask[(slice(None), *where[: mask.ndim - 1])] = 1
        ends = [
            run(
                model, other, change=Replace(place, base[place] + sign * step * mask * (clean[place] - base[place]))
            ).logits
            for sign in (1, -1)
        ]
        slope = [(one[:, -1, 1] - one[:, -1, 2]) for one in ends]
        slope = (slope[0] - slope[1]) / (2 * step)
        same = table
        for name in by:
            same = same[same[name] == row[name]]
        assert torch.allclose(torch.tensor(same["estimate"].to_numpy()), slope, atol=1e-8), row
        checked += int((slope.abs() > 1e-6).any())
    assert checked > 0


def test_one_forward_and_one_backward_for_all_cells(model, tokens, other, monkeypatch):
    backwards, grad = [], torch.autograd.grad
    monkeypatch.setattr(torch.autograd, "grad", lambda *a, **k: backwards.append(1) or grad(*a, **k))
    counted = Counting(model)
    sites = ("resid_pre", "z", "ffn_act")
    attribution_patch(counted, tokens, other, METRIC, sites, ("layer",), check=0)
    assert counted.forwards == 2 and len(backwards) == 1, "one of the base, one of the source"
    attribution_patch(counted, tokens, other, METRIC, sites, ("layer",), check=0, steps=3)
    assert counted.forwards == 2 + 2 + 6 * (3 + 1) and len(backwards) == 1 + 6 * 3


def test_integrated_gradients_are_complete_and_follow_the_midpoint_rule(model, tokens, other):
    errors = []
    for steps in (1, 4, 16):
        found = attribution_patch(model, tokens, other, METRIC, "resid_mid", steps=steps, check=0)
        errors.append(float(found.agreement.completeness))
    # A midpoint rule: four times the points, a sixteenth of the error.
    assert errors[0] > errors[1] > errors[2] > 0 and errors[1] / errors[2] > 10 and errors[2] < 3e-3
    clean, base = (run(model, one, record="0.resid_mid").cache["0.resid_mid"] for one in (tokens, other))
    mean = 0
    for k in range(4):
        x = (base + (k + 0.5) / 4 * (clean - base)).requires_grad_()
        logits = run(model, other, change=Replace("0.resid_mid", x), grad=True).logits[:, -1]
        mean = mean + torch.autograd.grad((logits[:, 1] - logits[:, 2]).sum(), x)[0] / 4
    want = (mean * (clean - base)).sum(-1).T
    found = attribution_patch(model, tokens, other, METRIC, "resid_mid", steps=4, check=0)
    assert torch.allclose(found.estimates["resid_mid"][0], want, atol=1e-12)
    whole = run(model, other, change=Replace("0.resid_mid", clean)).logits[:, -1]
    effect = whole[:, 1] - whole[:, 2] - found.sweep.corrupted
    rows = found.table().query("layer == 0 and position == 3")
    assert torch.allclose(
        torch.tensor(rows["completeness_error"].to_numpy()), ((want.sum(0) - effect) / effect).abs(), atol=1e-10
    )


def test_at_a_saturated_point_the_gradient_fails_and_says_so():
    """A ReLU that is dead at the base: the gradient there is 0, the true effect is not. The line between them sees it."""
    config = ModelConfig(vocab=4, n_layers=1, n_heads=1, d_model=4, n_ctx=2, norm="none", final_norm=False, ffn="relu",
                         positions="none", bias=True)  # fmt: skip
    planted = Transformer(config, seed=0).double()
    with torch.no_grad():
        for parameter in planted.parameters():
            parameter.zero_()
        planted.embedding.weight.copy_(torch.eye(4))
        planted.unembedding.weight.copy_(torch.eye(4) * 3)
        planted.blocks[0].ffn.up.weight[0, 1] = 2.0  # neuron 0 reads token 1 and writes token 2; the bias keeps it shut
        planted.blocks[0].ffn.up.bias.fill_(-1.0)
        planted.blocks[0].ffn.down.weight[2, 0] = 5.0
    clean, corrupted = torch.tensor([[0, 1], [3, 1]]), torch.tensor([[0, 0], [3, 3]])
    metric = logit_difference(2, 3)
    first = attribution_patch(planted, clean, corrupted, metric, "ffn_act", ("layer", "neuron"))
    assert first.agreement.verdict == "effects", "after the ReLU the metric is linear"
    first = attribution_patch(planted, clean, corrupted, metric, "resid_mid", ("layer", "position"))
    assert first.estimates["resid_mid"][0, 1].tolist() == [0.0, 3.0] and first.exact["resid_mid"][0, 1].tolist() == [
        15.0,
        18.0,
    ]
    assert first.agreement.verdict in ("ranking only", "unreliable") and first.agreement.largest == 15.0
    assert first.agreement.n_cells == 1 and first.agreement.n == 2, (
        "cells that change nothing are not counted as agreement"
    )
    lined = attribution_patch(planted, clean, corrupted, metric, "resid_mid", ("layer", "position"), steps=200)
    assert lined.agreement.verdict == "effects" and lined.agreement.completeness < 0.02


def test_validated_cells_are_exact_and_drawn_from_the_seed(model, tokens, other):
    found = attribution_patch(model, tokens, other, METRIC, ("z", "ffn_out"), ("layer", "position"), check=5, seed=1)
    again = attribution_patch(model, tokens, other, METRIC, ("z", "ffn_out"), ("layer", "position"), check=5, seed=1)
    third = attribution_patch(model, tokens, other, METRIC, ("z", "ffn_out"), ("layer", "position"), check=5, seed=2)
    table = found.table()
    assert found.table().equals(again.table()) and not table.equals(third.table())
    swept = patch_sweep(model, tokens, other, METRIC, ("z", "ffn_out"), engine="reference").table()
    exact = (swept["patched"] - swept["corrupted"]).to_numpy()
    known = table["exact"].notna().to_numpy()
    assert found.agreement.n_cells == 5 and known.sum() == found.agreement.n
    assert abs(table["exact"].to_numpy() - exact)[known].max() < 1e-12
    assert (table.loc[known, "position"] >= 2).all(), "before the first differing token nothing changes"
    assert table.columns.tolist() == [
        "site",
        "layer",
        "head",
        "position",
        "example",
        "clean",
        "corrupted",
        "estimate",
        "exact",
    ]
    assert table.attrs["unit"] == "logits" and table.attrs["verdict"] == found.agreement.verdict


def test_the_model_stays_as_it_was_frozen_or_not(config, tokens, other):
    fresh = Transformer(config, seed=1).double()
    wanted = attribution_patch(fresh, tokens, other, METRIC, check=3).estimates
    for frozen in (True, False):
        for parameter in fresh.parameters():
            parameter.requires_grad_(not frozen)
        with torch.no_grad():
            found = attribution_patch(fresh, tokens, other, METRIC, check=3, steps=None)
            attribution_patch(fresh, tokens, other, METRIC, "z", "layer", check=1, steps=2)
        assert all(torch.allclose(found.estimates[site], wanted[site], atol=1e-12) for site in wanted)
        for parameter in fresh.parameters():
            assert parameter.grad is None and parameter.requires_grad is not frozen


def test_roles_stand_where_they_stand(model, tokens, other):
    roles = {"subject": torch.tensor([2, 4, 3])}
    by_role = attribution_patch(
        model, Inputs(tokens, roles=roles), Inputs(other, roles=roles), METRIC, "resid_pre", ("role", "layer")
    )
    by_place = attribution_patch(model, tokens, other, METRIC, "resid_pre", ("layer", "position")).estimates[
        "resid_pre"
    ]
    assert torch.equal(by_role.estimates["resid_pre"][0], by_place[:, [2, 4, 3], [0, 1, 2]])


def test_agreement_by_hand():
    found = agreement_of(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
    assert found.largest == 1 and found.relative == pytest.approx(1 / 6) and found.spearman == 1
    assert found.pearson == pytest.approx(3 / (2 * 14 / 3) ** 0.5) and found.verdict == "ranking only"
    assert agreement_of(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.05])).verdict == "effects"
    bad = [(torch.tensor([1.0]), torch.tensor([2.0]))]
    assert agreement_of(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.0]), bad).verdict == "ranking only"
    assert agreement_of(torch.tensor([2.0, 1.0]), torch.tensor([1.0, 2.0])).verdict == "unreliable"


def test_refusals(model, tokens, other):
    for options, match in (
        ({"sites": [("z", "ffn_out")]}, "joint patch"),
        ({"by": ("window", "position")}, "window"),
        ({"by": ("position",)}, "all layers at once"),
        ({"sites": "scores", "by": ("layer", "head")}, "−∞"),
        ({"steps": 0}, "steps=0"),
        ({"check": -1}, "check=-1"),
        ({"direction": "up"}, "direction='up'"),
    ):
        with pytest.raises(SweepError, match=match):
            attribution_patch(model, tokens, other, METRIC, **options)
    with pytest.raises(SweepError, match="equal length"):
        attribution_patch(model, tokens, other[:, :5], METRIC)
    with pytest.raises(InputsError, match="outside the vocabulary"):
        attribution_patch(model, tokens, other + 20, METRIC)
    headless = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=1, d_model=8, n_ctx=8, head=False))
    with pytest.raises(UnsupportedModelError, match="no unembedding"):
        attribution_patch(headless, tokens, other, METRIC)
