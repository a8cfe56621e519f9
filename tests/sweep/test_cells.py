"""Cells of any interventions against one run each, and what counts as a change."""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, small, translator
from sweep_cases import CASES, assert_close, metric_of, pair_of, values_of

from interp import (
    Add,
    AddNoise,
    Freeze,
    KnockOut,
    Mean,
    Project,
    Replace,
    Resample,
    Scale,
    Zero,
    patch_sweep,
    run,
    run_many,
)
from interp.interventions import Intervention
from interp.metrics import evaluate
from interp.sweep.cells import Grid, GridWrite
from interp.sweep.listed import Listed

FAR = torch.linspace(-2, 2, 8, dtype=torch.float64)  # not the same in every entry: norms would remove that


@pytest.fixture(scope="module")
def pair():
    return pair_of(replace(CASES["modern"], padding=((0, 0),) * 3, length=6), (1,))


@pytest.fixture(scope="module")
def held(pair):
    return run(pair.model, pair.clean, record=[str(site) for site in pair.model.sites])


def check(pair, cells, metric="last", change=(), inputs=None, **options):
    """Each cell against a run of its own; the result, and how far the cells moved the metric."""
    read, inputs = metric_of(metric, pair), pair.corrupted if inputs is None else inputs
    got = run_many(pair.model, inputs, cells, read, change=change, check=0, **options)
    always = [change] if isinstance(change, Intervention) else list(change)
    listed = [[cell] if isinstance(cell, Intervention) else list(cell) for cell in cells]
    base = run(pair.model, inputs, change=always)
    assert_close(got.clean, evaluate(read, base.logits, inputs))
    expected = torch.stack(
        [evaluate(read, run(pair.model, inputs, change=[*always, *cell]).logits, inputs) for cell in listed]
    )
    assert_close(got.values["cells"], expected, float(base.logits.abs().max()))
    assert bool(((expected - got.clean).abs().amax(1) > 1e-8).all()), "every cell must do something"
    return got


def test_every_kind_of_change(pair, held):
    basis = torch.randn(2, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    check(pair, [
        Zero("1.z", at=(slice(None), 2)),
        Add("0.resid_mid", FAR, at=3),
        Scale("1.ffn_act", 3.0, at=(slice(2, 5), [0, 3, 5])),
        Mean("1.attn_out", held),
        Mean("2.v", held, at=(4, 1)),
        Resample("0.ffn_out", 3, held, at="own"),
        AddNoise("1.resid_pre", 0.5, seed=2, at=[1, 4]),
        AddNoise("embed", 0.5, at="own"),
        Replace("2.norm1_scale", 0.3),
        Replace("1.k_rot", held, at=("own", 1)),
        Replace("final_hat", FAR),
        Replace("logits", 0.0, at=(5, [2])),
        Freeze("0.resid_post", held, at=torch.tensor([1, 2, 5])),
        Project("1.resid_post", basis),
        Project("2.resid_mid", basis, keep=True, at="late"),
        KnockOut("1.scores", at=(1, "late", "own")),
        KnockOut("2.scores", at=(slice(None), [4, 5], slice(0, 2))),
        Add("1.scores", 2.0, at=(0, "late", 2)),
        Scale("2.pattern", 0.5, at=(2, slice(None), 3)),
    ], "all")  # fmt: skip


def test_several_changes_in_a_cell(pair, held):
    check(pair, [
        [Add("0.z", 0.4, at=(2, 1)), Scale("0.z", 3.0, at=(slice(1, 4), 1)), Zero("0.z", at=(3, 3))],
        [Scale("0.z", 3.0, at=(slice(1, 4), 1)), Add("0.z", 0.4, at=(2, 1))],
        [Zero("2.ffn_out"), Zero("0.attn_out", at=1), KnockOut("1.scores", at=(2, 4))],
        [KnockOut("1.scores", at=(0, "late", "own")), Add("1.scores", 1.0, at=(1, 5, [0, 1])), Add("1.pattern", 0.2, at=(1, 4))],
        [Replace("embed", held, at=1), Freeze("0.ffn_out", held, at=1), AddNoise("1.q", 0.3, at=(4, 2))],
        [Zero("1.v", at=(0, 1)), Zero("1.k", at=(0, 1)), Mean("2.head_out", held, at=(5, 1)), Scale("logits", 2.0)],
    ], "all")  # fmt: skip


def test_order_within_a_site_is_the_lists(pair):
    first, second = Scale("1.resid_mid", 2.0, at=5), Add("1.resid_mid", FAR, at=5)
    got = check(pair, [[first, second], [second, first]])
    assert not torch.allclose(got.values["cells"][0], got.values["cells"][1])


def test_severed_tracing(pair, held):
    """A state is restored, and every later FFN (or attention) output of that token held at the corrupted run's (Meng 2022)."""
    corrupted = run(pair.model, pair.corrupted, record=["ffn_out", "attn_out"])
    cells = [
        [Replace(f"{layer}.resid_pre", held, at=position)]
        + [Freeze(f"{later}.{kind}", corrupted, at=position) for later in range(layer, 3)]
        for kind in ("ffn_out", "attn_out")
        for layer, position in ((0, 1), (1, 1), (1, 4), (1, 5), (2, 5))
    ]
    got = check(pair, cells, "last")
    whole = check(pair, [cell[:1] for cell in cells], "last")
    assert not torch.allclose(got.values["cells"], whole.values["cells"])


def test_changes_of_the_base_run_are_made_in_every_cell(pair, held):
    noise = AddNoise("embed", 1.0, at=1)
    got = check(pair, [Replace("0.resid_post", held, at=1), Zero("2.z"), [Replace("1.resid_mid", held, at=4), Zero("1.ffn_out")]],
                change=noise, inputs=pair.clean)  # fmt: skip
    assert not torch.allclose(got.clean, run_many(pair.model, pair.clean, [Zero("2.z")], metric_of("last", pair)).clean)


LATER = [
    (Add("1.resid_pre", FAR), ["1.z", "0.z", "1.ffn_out", "2.q"]),
    (Add("1.resid_mid", FAR), ["1.ffn_out", "0.z"]),
    (Scale("1.ffn_act", 2.0), ["0.attn_out"]),
    (Scale("1.ffn_act", 2.0), ["0.ffn_act", "1.ffn_act", "2.ffn_act"]),
    (KnockOut("1.scores", at=(0, 5, 1)), ["0.scores", "1.scores", "2.scores"]),
]


@pytest.mark.parametrize(("change", "sites"), LATER)
def test_changes_of_the_base_run_inside_the_blocks(pair, change, sites):
    at = {"scores": (slice(None), 5)}
    check(pair, [Scale(site, 0.5, at=at.get(site.split(".")[-1], ())) for site in sites], change=change)


@pytest.mark.parametrize("options", [{"exact": "bitwise"}, {}])
def test_changes_of_the_base_run_where_a_full_forward_resumes(pair, options):
    cells = [Resample("1.z")] if not options else [Zero("1.z")]
    check(pair, cells, change=Add("1.resid_pre", FAR), **options)


def test_noise_in_the_first_stream_is_a_corruption_too(pair):
    noise, read = AddNoise("0.resid_pre", 1.0, at=1), metric_of("last", pair)
    fast, slow = (patch_sweep(pair.model, pair.clean, noise, read, "attn_out", engine=engine, check=0)
                  for engine in ("fast", "reference"))  # fmt: skip
    assert_close(fast.values["attn_out"], slow.values["attn_out"])


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_noise_in_the_embedding_as_a_corruption(pair, direction):
    noise, read = AddNoise("embed", 1.0, at="own"), metric_of("last", pair)
    for sites, by in ((["resid_pre", "z"], ("layer", "role")), (["embed"], ("position",))):
        fast, slow = (patch_sweep(pair.model, pair.clean, noise, read, sites, by, direction, engine, check=0)
                      for engine in ("fast", "reference"))  # fmt: skip
        for site in sites:
            assert_close(fast.values[site], slow.values[site])
            assert float((slow.values[site] - slow.values[site].flatten(0, -2)[0]).abs().max()) > 1e-6


def test_examples_that_meet_are_run_in_full(pair):
    """Resampling from the run itself mixes examples: no walk, and the same numbers."""
    got = check(pair, [Resample("1.z", 1), [Zero("0.ffn_out"), Resample("2.resid_mid", 2, at=5)]])
    assert got.engine == "full" and got.work["token_layers"] == 6 * 3 * (2 + 3)
    assert check(pair, [Zero("1.z")]).engine == "fast"


@dataclass(frozen=True, eq=False)
class Reverse(Intervention):
    """A change of the user's own, which may do anything."""

    def edited(self, chosen, value, index):
        return chosen.flip(0)


def test_a_change_of_ones_own_is_run_in_full(pair):
    assert check(pair, [Reverse("1.resid_pre"), [Zero("0.z"), Reverse("2.ffn_out")]]).engine == "full"


def test_padded_and_prefixed_and_translating_models():
    for name, site, more in (
        ("left padding", "0.attn_out", KnockOut("1.scores", at=(0, "late", "own"))),
        ("prefix, padded", "0.v", KnockOut("1.scores", at=(1, "late", "late"))),
        ("encoder, padded", "0.k", Replace("1.pattern", 0.5, at=(0, "late", "own"))),
    ):
        pair = pair_of(replace(CASES[name], seed=5), (1, 4))
        check(pair, [Scale(site, 3.0), Scale(site, -2.0, at="own"), more], "kl")
    pair = pair_of(CASES["two stacks, padded"], (1, 2))
    check(pair, [
        Scale("encoder.0.z", 3.0, at="word"),
        Scale("encoder.embed", 3.0, at="word"),
        Add("encoder.final", FAR, at="word"),
        KnockOut("1.cross_scores", at=(2, "late", "word")),
        [Zero("0.cross_k", at=("word", 0)), Scale("1.cross_v", 2.0), Zero("1.cross_z", at=("late", 3))],
        [Scale("encoder.0.ffn_out", 2.0), Zero("decoder.0.attn_out", at="own"), Scale("decoder.embed", 2.0, at="late")],
    ], "kl")  # fmt: skip


def random_change(draw, pair, held, depth: int) -> Intervention:
    """Any change at any site of the model, at one token's row, at roles, or everywhere."""
    site = draw(st.sampled_from(pair.model.sites))
    edges = site.spec.axes[0] == "head"
    kinds = ["scale", "add", "zero", "freeze", "noise", *(["cut"] if site.name in ("scores", "cross_scores") else [])]
    kind = draw(st.sampled_from(kinds))
    side = site.stack == "encoder" or site.name in ("cross_k", "cross_v")
    row = draw(st.sampled_from([slice(None), *(["word"] if side else ["own", "late"])]))
    at = (draw(st.sampled_from([0, slice(None)])), row) if edges else (row,)
    if kind == "cut":
        return KnockOut(site, at=at)
    if kind == "freeze":
        return Freeze(site, held, at=at)
    if kind == "zero" and "scale" not in site.name:
        return Zero(site, at=at)
    if kind == "add" and "scale" not in site.name:
        return Add(site, 0.7 + depth, at=at)
    return AddNoise(site, 0.1, seed=depth, at=at) if kind == "noise" else Scale(site, 1.4 + depth, at=at)


@st.composite
def many_changes(draw):
    """A model of any kind, a few cells of a few changes, and sometimes changes of the base run."""
    pair = pair_of(CASES[draw(st.sampled_from(sorted(CASES)))], (0, 1, 3))
    held = run(pair.model, pair.clean, record=[str(site) for site in pair.model.sites])
    lists = [
        [random_change(draw, pair, held, i) for i in range(draw(st.integers(1, 3)))]
        for _ in range(draw(st.integers(1, 5)))
    ]
    always = [random_change(draw, pair, held, i + 3) for i in range(draw(st.sampled_from([0, 0, 1, 2])))]
    return pair, lists, always


def check_changes(case, exact="rounding") -> None:
    """Cells at once are what single runs are."""
    pair, cells, always = case
    read = metric_of("all" if pair.corrupted.mask is None else "role", pair)
    got = run_many(pair.model, pair.corrupted, cells, read, change=always, check=0, exact=exact)
    logits = [run(pair.model, pair.corrupted, change=[*always, *cell]).logits for cell in cells]
    expected = torch.stack([evaluate(read, one, pair.corrupted) for one in logits])
    assert_close(got.values["cells"], expected, max(float(one.abs().max()) for one in logits))


@settings(max_examples=5, deadline=None, derandomize=True)
@given(many_changes())
def test_any_changes_at_once_are_what_single_runs_are(case):
    check_changes(case)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(many_changes(), st.sampled_from(["rounding", "bitwise"]))
def test_many_changes_at_once_are_what_single_runs_are(case, exact):
    check_changes(case, exact)


# What counts as a change


def test_only_rows_with_other_values_are_touched(pair, held):
    site = pair.model.sites[0]
    base = run(pair.model, pair.corrupted, record=[str(one) for one in pair.model.sites]).cache
    source = held.cache
    cells = Listed(
        [[Replace("embed", held)], [Replace("embed", held, at=2)], [Zero("1.z", at=(3, 1))], []], pair.model.sites
    )
    found = cells.touched(np.arange(4), base, pair.corrupted)
    expected = np.zeros((4, 3, 6), dtype=bool)
    expected[0, :, 1] = True  # the only token that differs
    assert (found[site] == expected).all(), "position 2 holds the same token in both"
    z = next(one for one in found if one.name == "z")
    assert found[z].sum() == 3 and found[z][2, :, 3].all()
    grid = Grid(("position",), (6,), [GridWrite((site,), np.zeros(6, dtype=np.int64))], source,
                np.arange(6)[:, None].repeat(3, 1), None, pair.model.sites)  # fmt: skip
    found = grid.touched(np.arange(6), base, pair.corrupted)[site]
    assert found.sum() == 3 and found[1, :, 1].all()


def test_a_later_site_is_touched_wherever_it_is_written(pair, held):
    """What reaches it is not known before it is run, so its freezing counts."""
    frozen = run(pair.model, pair.corrupted, record=["0.resid_pre", "1.ffn_out"])
    base = frozen.cache
    cells = Listed([[Replace("0.resid_pre", held, at=1), Freeze("1.ffn_out", frozen, at=4)], [Freeze("1.ffn_out", frozen)]],
                   pair.model.sites)  # fmt: skip
    found = {site.name: mask for site, mask in cells.touched(np.arange(2), base, pair.corrupted).items()}
    assert found["ffn_out"][0, :, 4].all() and found["ffn_out"][0].sum() == 3
    assert not found["ffn_out"][1].any(), "alone it changes nothing"


def test_heads_are_told_apart():
    """Values that differ in one head only are a change for that head's cell alone."""
    pair = pair_of(Case(small(n_heads=2)), (1,))
    held = run(pair.model, pair.clean, record=["z"])
    other = {site: value.clone() for site, value in held.cache.items()}
    for value in other.values():
        value[:, 2, 1] += 1
    sites = tuple(other)
    grid = Grid(("layer", "head"), (2, 2), [GridWrite(sites, np.arange(2))], other, None, np.arange(2), sites)
    found = grid.touched(np.arange(4), held.cache, pair.clean)
    touched = {
        (site.layer, cell): mask[cell].sum() for site, mask in found.items() for cell in range(4) if mask[cell].any()
    }
    assert touched == {(0, 1): 2, (1, 3): 2}


def test_a_grid_cell_is_its_interventions():
    """The definition that checks and the reference use, for one example too."""
    pair = pair_of(CASES["left padding"], (3,))
    held = run(pair.model, pair.clean, record=["z"])
    grid = Grid(("layer", "role", "head"), (2, 1, 2), [GridWrite(tuple(held.cache), np.arange(2))], held.cache,
                pair.clean.roles["own"].numpy()[None], np.arange(2), pair.model.sites)  # fmt: skip
    (change,) = grid.interventions(3)
    place = values_of(pair.model, pair.corrupted)["1.z"]
    new = change.apply(place, pair.corrupted)
    where = (torch.arange(3), pair.clean.roles["own"], 1)
    assert str(change.place) == "1.z" and torch.equal(new[where], held.cache["1.z"][where])
    assert int((new != place).any(-1).sum()) <= 3
    (alone,) = grid.interventions(3, 1)
    assert torch.equal(alone.apply(place[1:2], pair.corrupted.select([1])), new[1:2])


def test_a_cell_holds_interventions(pair):
    with pytest.raises(TypeError, match="a cell holds interventions"):
        Listed([[SimpleNamespace()]], pair.model.sites)


def test_translators_stacks_are_filled_in():
    pair = pair_of(Case(translator()))
    cells = Listed([[Zero("0.cross_z")], [Zero("encoder.0.z")]], pair.model.sites)
    assert [str(site) for site in cells.sites] == ["encoder.0.z", "decoder.0.cross_z"]
