"""Full forwards: bit for bit the reference's values, as many cells at once as a canary allows, from the layer that changes."""

from __future__ import annotations

import pytest
import torch
from strategies import Case, small
from sweep_cases import CASES, assert_close, by_hand, grid_cells, metric_of, pair_of, values_of

from interp import (
    Add,
    KnockOut,
    Replace,
    Resample,
    Scale,
    Zero,
    ablation_sweep,
    knock_out_sweep,
    patch_sweep,
    path_patch,
    run,
    run_many,
)
from interp.sweep.full import Full
from interp.sweep.result import SweepResult


def same(make) -> SweepResult:
    """make(engine, exact): bitwise and reference have the same bits, and something happens."""
    fast, slow = make("fast", "bitwise"), make("reference", "rounding")
    for name, values in slow.values.items():
        assert torch.equal(fast.values[name], values), name
        start = slow.clean if slow.corrupted is None else slow.corrupted
        assert float((values - start).abs().max()) > 1e-6
    assert torch.equal(fast.clean, slow.clean)
    assert (fast.checked, fast.exact) == (0.0, "bitwise") and fast.checks > 0
    return fast


@pytest.mark.parametrize(
    "name",
    [
        "modern",
        "two stacks, padded",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("left padding", "prefix, padded")),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)])
def test_patches_have_the_references_bits(name, dtype):
    pair = pair_of(CASES[name], (0, 1, 3))
    model = pair.model.to(dtype)
    stack = "decoder." if model.encoder is not None else ""
    for sites, by in ((["resid_pre", "ffn_act", "pattern"], ("layer",)), (["z", "embed", "k"], ("role",))):
        asked = [stack + site for site in sites]
        same(lambda engine, exact, asked=asked, by=by: patch_sweep(
            model, pair.clean, pair.corrupted, metric_of("kl", pair), asked, by, engine=engine, exact=exact))  # fmt: skip


def test_every_other_kind_of_sweep_has_the_references_bits():
    pair = pair_of(CASES["modern"], (1,))
    model, read = pair.model.float(), metric_of("last", pair)
    held = run(model, pair.clean, record="resid_mid")
    cells = [Zero("1.z"), Scale("embed", 2.0), Replace("2.resid_mid", held, at=3), Resample("1.attn_out"),
             [KnockOut("1.scores", at=(0, -1, 1)), Add("logits", 1.0)]]  # fmt: skip
    same(lambda engine, exact: run_many(model, pair.corrupted, cells, read, engine=engine, exact=exact))
    for value in ("zero", "mean", "resample", "noise"):
        same(lambda engine, exact, value=value: ablation_sweep(
            model, pair.corrupted, read, value, "ffn_out", seed=1, engine=engine, exact=exact))  # fmt: skip
    same(lambda engine, exact: knock_out_sweep(
        model, pair.corrupted, read, {"own": ("late", "own"), "all": (-1, slice(0, 4))}, ("window", "head"), window=3,
        engine=engine, exact=exact))  # fmt: skip
    receivers = {"q": ("2.q", (-1,)), "out": ("final", ())}
    same(lambda engine, exact: path_patch(
        model, pair.clean, pair.corrupted, read, receivers, engine=engine, exact=exact))  # fmt: skip


def batches(monkeypatch) -> list[tuple[int, int]]:
    """(first layer, cells) of every forward."""
    made, original = [], Full._forward

    def counting(self, start, changes):
        made.append((start, len(changes)))
        return original(self, start, changes)

    monkeypatch.setattr(Full, "_forward", counting)
    return made


def test_untouched_cells_are_not_run_and_later_layers_resumed(monkeypatch):
    pair, made = pair_of(CASES["attention only"], (2,)), batches(monkeypatch)
    read = metric_of("last", pair)
    got = patch_sweep(
        pair.model, pair.clean, pair.corrupted, read, "z", ("layer", "position"), exact="bitwise", check=0
    )
    assert {start for start, _ in made} == {0, 1, 2}
    tokens = pair.clean.tokens.numel()
    assert got.work["token_layers"] == tokens * sum(cells * (3 - start) for start, cells in made)
    assert torch.equal(got.values["z"][:, :2], got.corrupted.expand(3, 2, 2)), "before the first difference"


@pytest.mark.parametrize("allowed", [1, 2])
def test_cells_share_a_forward_only_where_the_canary_has_the_single_runs_bits(monkeypatch, allowed):
    """A machine on which batches above `allowed` cells give other bits."""
    pair = pair_of(CASES["modern"], (0,))
    made, original = [], Full._forward

    def forward(self, start, changes):
        logits = original(self, start, changes)
        made.append((len(changes), any(changes)))
        return logits if len(changes) <= allowed else logits + torch.finfo(logits.dtype).eps * 100

    monkeypatch.setattr(Full, "_forward", forward)
    read = metric_of("last", pair)
    got = patch_sweep(
        pair.model, pair.clean, pair.corrupted, read, "resid_pre", ("layer", "position"), exact="bitwise", check=15
    )
    slow = patch_sweep(
        pair.model, pair.clean, pair.corrupted, read, "resid_pre", ("layer", "position"), engine="reference"
    )
    assert torch.equal(got.values["resid_pre"], slow.values["resid_pre"]) and got.checked == 0
    assert max(size for size, real in made if real) <= allowed < max(size for size, _ in made)


def test_rounding_needs_no_canary(monkeypatch):
    made = batches(monkeypatch)
    pair = pair_of(CASES["modern"], (0,))
    cells = [Resample("0.z", seed) for seed in range(5)]
    run_many(pair.model, pair.clean, cells, metric_of("last", pair), check=0)
    assert made == [(0, 5)]
    made.clear()
    run_many(pair.model, pair.clean, [Resample("2.z"), Resample("embed"), Resample("final"), Resample("2.k")],
             metric_of("last", pair), check=0)  # fmt: skip
    assert made == [(-1, 1), (2, 2), (3, 1)]


class Bridged:
    """A model that offers what is asked of one from another library, and no more: it cannot be entered in the middle."""

    can_resume = False
    additive_stream = True

    def __init__(self, model):
        self.model, self.config, self.sites = model, model.config, model.sites
        self.calls = []

    def __call__(self, inputs, tap=None):
        self.calls.append(inputs.batch)
        return self.model(inputs, tap)

    def unembed(self, stream):
        return self.model.unembed(stream)

    def weight(self, kind, layer=None, stack=None):
        return self.model.weight(kind, layer, stack)


@pytest.mark.parametrize("exact", ["rounding", "bitwise"])
@pytest.mark.parametrize("name", ["modern", "left padding"])
def test_a_bridged_model_is_run_in_batched_full_forwards(name, exact):
    pair = pair_of(CASES[name], (1, 3))
    model, read = Bridged(pair.model), metric_of("last", pair)
    got = patch_sweep(model, pair.clean, pair.corrupted, read, ["resid_mid", "final"], ("role",), exact=exact)
    values = values_of(pair.model, pair.clean)
    for site in ("resid_mid", "final"):
        expected = by_hand(pair, grid_cells(pair.model, site, ("role",), values, pair.clean), read)
        assert_close(got.values[site], expected)
    assert got.engine == "full" and got.checks > 0
    slow = patch_sweep(model, pair.clean, pair.corrupted, read, ["resid_mid", "final"], ("role",), engine="reference")
    if exact == "bitwise":
        assert all(torch.equal(got.values[site], slow.values[site]) for site in slow.values)
    batch = pair.clean.batch
    model.calls.clear()
    patch_sweep(model, pair.clean, pair.corrupted, read, "resid_pre", ("layer",), check=0)
    assert model.calls == [batch, batch, model.config.n_layers * batch], "two runs, then all cells at once"


def test_paths_through_a_bridged_model():
    pair = pair_of(Case(small(n_layers=3), ((0, 0),) * 2), (1,))
    read = metric_of("last", pair)
    models = Bridged(pair.model), pair.model
    found = [path_patch(model, pair.clean, pair.corrupted, read, {"v": ("2.v", ())}) for model in models]
    assert_close(found[0].values["z → receiver"], found[1].values["z → receiver"])
    assert (found[0].engine, found[1].engine) == ("full", "fast")
