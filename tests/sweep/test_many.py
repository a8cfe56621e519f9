"""Ablations and knock-outs against the runs that define them, and the refusals of every list of changes."""

from __future__ import annotations

import itertools

import pytest
import torch
from strategies import Case, random_model, small
from sweep_cases import (
    CASES,
    Pair,
    assert_close,
    by_hand,
    grid_cells,
    joint,
    logits_by_hand,
    pair_of,
    values_of,
)

from interp import (
    Freeze,
    Inputs,
    KnockOut,
    Mean,
    Replace,
    Resample,
    Zero,
    ablation_sweep,
    knock_out_sweep,
    logit_difference,
    run,
    run_many,
)
from interp.at import SelectionError
from interp.interventions import InterventionError, derangement
from interp.metrics import evaluate
from interp.sites import UnknownSiteError
from interp.sweep import SweepError

READ = logit_difference(1, 2)


@pytest.fixture(scope="module")
def pair():
    return pair_of(Case(small(n_layers=3, n_heads=4), ((0, 0),) * 4, length=6), (1, 2))


def ablated(values: dict, value: str, seed: int) -> dict:
    """What takes the place of each site's value, worked out by hand for a batch."""
    if value == "zero":
        return {site: torch.zeros_like(one) for site, one in values.items()}
    if value == "mean":
        return {site: one.mean(0, keepdim=True).expand(one.shape) for site, one in values.items()}
    order = derangement(len(next(iter(values.values()))), seed)
    return {site: one[order] for site, one in values.items()}


@pytest.mark.parametrize("value", ["zero", "mean", "resample"])
@pytest.mark.parametrize("sites", [["z", "k"], ["ffn_act", "ffn_out"], ["resid_mid"]])
def test_ablations_by_hand(pair, value, sites):
    by = {"z": ("layer", "head"), "ffn_act": ("layer", "neuron"), "resid_mid": ("layer", "position")}[sites[0]]
    sites = [site for site in sites if site != "ffn_out"]
    got = ablation_sweep(pair.model, pair.corrupted, READ, value, sites, by, seed=3)
    new = ablated(values_of(pair.model, pair.corrupted), value, 3)
    for site in sites:
        expected = by_hand(pair, grid_cells(pair.model, site, by, new, pair.clean), READ)
        assert_close(got.values[site].flatten(0, -2), expected)
        assert float((expected - got.clean).abs().max()) > 1e-6
        assert torch.allclose(got.effect()[site].flatten(), (expected - got.clean).mean(-1))
    assert got.direction == f"ablation ({value})" and got.corrupted is None


def test_ablations_with_another_runs_values(pair):
    held = run(pair.model, pair.clean, record="attn_out")
    for value in ("mean", "resample"):
        got = ablation_sweep(
            pair.model, pair.corrupted, READ, value, "attn_out", ("window", "position"), held, seed=2, window=3
        )
        new = ablated({str(site): one for site, one in held.cache.items()}, value, 2)
        each = grid_cells(pair.model, "attn_out", ("layer", "position"), new, pair.clean)
        windows = ((0, 1), (0, 1, 2), (1, 2))
        cells = [joint(each[layer * 6 + position] for layer in layers) for layers in windows for position in range(6)]
        assert_close(got.values["attn_out"].flatten(0, -2), by_hand(pair, cells, READ))


def test_noise_is_the_seeds(pair):
    first, again, other = (ablation_sweep(pair.model, pair.corrupted, READ, "noise", "resid_pre", std=0.3, seed=seed)
                           for seed in (1, 1, 2))  # fmt: skip
    assert torch.equal(first.values["resid_pre"], again.values["resid_pre"])
    assert not torch.allclose(first.values["resid_pre"], other.values["resid_pre"])
    louder = ablation_sweep(pair.model, pair.corrupted, READ, "noise", "resid_pre", std=1e-9, seed=1)
    assert_close(louder.values["resid_pre"], louder.clean.expand(3, 6, 4), 1e4)


def test_ablations_of_padded_prompts_use_roles():
    pair = pair_of(CASES["left padding"], (3,))
    got = ablation_sweep(pair.model, pair.corrupted, READ, "zero", ["z"], ("layer", "role"))
    new = ablated(values_of(pair.model, pair.corrupted), "zero", 0)
    expected = by_hand(pair, grid_cells(pair.model, "z", ("layer", "role"), new, pair.clean), READ)
    assert_close(got.values["z"].flatten(0, -2), expected)
    with pytest.raises(InterventionError, match="would read padding"):
        ablation_sweep(pair.model, pair.corrupted, READ, "mean", ["z"], ("layer",))
    with pytest.raises(SweepError, match="no common positions"):
        ablation_sweep(pair.model, pair.corrupted, READ, "zero", ["z"], ("layer", "position"))


EDGES = {
    "own": ("late", "own"),
    "pairs": ([3, 5], slice(1, 3)),
    "first": (5, 0),
    "one": (2, torch.tensor([0, 1, 2, 0])),
}


def cut(pair: Pair, layers, head, edge: str) -> list:
    """The scores of some layers with one edge at −∞, from the definition."""
    values = values_of(pair.model, pair.corrupted)
    query, key = EDGES[edge]
    writes = []
    for layer in layers:
        closed = torch.full_like(values[f"{layer}.scores"], float("-inf"))
        for example, one_head in itertools.product(range(4), range(4) if head is None else [head]):
            queries = pair.clean.roles[query][example].item() if isinstance(query, str) else query
            keys = pair.clean.roles[key][example].item() if isinstance(key, str) else key
            keys = keys[example].item() if isinstance(keys, torch.Tensor) else keys
            for i, j in itertools.product(range(6)[queries] if isinstance(queries, slice) else _list(queries),
                                          range(6)[keys] if isinstance(keys, slice) else _list(keys)):  # fmt: skip
                writes.append((f"{layer}.scores", (example, one_head, i, j), closed))
    return writes


def _list(one) -> list:
    return one if isinstance(one, list) else [one]


@pytest.mark.parametrize(
    "by",
    [("layer",), ("window",), *(pytest.param(by, marks=pytest.mark.slow) for by in (("layer", "head"), ("head",)))],
)
def test_edges_cut_by_hand(pair, by):
    got = knock_out_sweep(pair.model, pair.corrupted, READ, EDGES, by, window=3 if "window" in by else 1)
    layers = {"layer": [[0], [1], [2]], "window": [[0, 1], [0, 1, 2], [1, 2]], "head": [[0, 1, 2]]}[by[0]]
    heads = range(4) if "head" in by else [None]
    cells = [cut(pair, some, head, edge) for edge in EDGES for some in layers for head in heads]
    expected = by_hand(pair, cells, READ)
    assert got.axes["scores"] == ("edges", *by)
    assert_close(got.values["scores"].flatten(0, -2), expected)
    assert float((expected - got.clean).abs().max()) > 1e-6
    assert got.table()["edges"].unique().tolist() == list(EDGES) and got.direction == "knock-out"


def test_an_edge_that_the_mask_shuts_already_changes_nothing(pair):
    got = knock_out_sweep(pair.model, pair.corrupted, READ, {"future": (1, slice(2, 6)), "past": (5, slice(0, 6))})
    assert torch.equal(got.values["scores"][0], got.clean.expand(3, 4))
    assert float((got.values["scores"][1] - got.clean).abs().max()) > 1e-6


def test_a_query_without_any_edge_reads_nothing(pair):
    """Cutting every edge of a head is zeroing its z."""
    got = knock_out_sweep(pair.model, pair.corrupted, READ, {"all": (slice(None), slice(None))}, ("layer", "head"))
    zero = ablation_sweep(pair.model, pair.corrupted, READ, "zero", "z", ("layer", "head"))
    assert_close(got.values["scores"][0], zero.values["z"])


def test_cross_attention_can_be_cut():
    pair = pair_of(CASES["two stacks, padded"], (1, 2))
    edges = {"word": ("late", "word"), "all": (slice(None), slice(None))}
    got = knock_out_sweep(pair.model, pair.corrupted, READ, edges, ("layer", "head"), "cross_scores")
    for i, (query, key) in enumerate(edges.values()):
        for layer, head in itertools.product(range(2), range(4)):
            changed = run(pair.model, pair.corrupted, change=KnockOut(f"{layer}.cross_scores", at=(head, query, key)))
            assert_close(got.values["cross_scores"][i, layer, head], evaluate(READ, changed.logits, pair.corrupted))
    encoder = knock_out_sweep(pair.model, pair.corrupted, READ, {"word": ("word", 1)}, "layer", "encoder.scores")
    assert float((encoder.values["encoder.scores"] - encoder.clean).abs().max()) > 1e-9


def test_names_and_numbers_of_cells(pair):
    cells = {"a": Zero("1.z"), "b": [Zero("1.z"), Zero("2.z")], "nothing": []}
    got = run_many(pair.model, pair.clean, cells, READ)
    assert got.coordinates["cells"] == (["a", "b", "nothing"],) and got.corrupted is None
    assert torch.equal(got.values["cells"][2], got.clean), "a cell without changes is the base run"
    numbered = run_many(pair.model, pair.clean, list(cells.values()), READ)
    assert numbered.coordinates["cells"] == ([0, 1, 2],) and torch.equal(numbered.values["cells"], got.values["cells"])
    alone = logits_by_hand(pair.model, pair.clean, [[("1.z", (slice(None),), torch.zeros(4, 6, 4, 2).double())]])[
        0, :, -1
    ]
    assert_close(got.values["cells"][0], alone[:, 1] - alone[:, 2])


def other_model(**options):
    return random_model(small(n_heads=4, **{"n_layers": 3, **options}), 7)


@pytest.mark.parametrize(
    ("options", "words"),
    [({}, "of 3 layers, d_model 8"), ({"n_layers": 4}, "of 4 layers"), ({"d_model": 16}, "d_model 16")],
)
def test_another_models_run_is_refused(pair, options, words):
    other = other_model(**options)
    held = run(other, pair.clean, record="z")
    for change in (Replace("1.z", held), Freeze("1.z", held), Mean("1.z", held), Resample("1.z", 0, held)):
        with pytest.raises(SweepError, match=f"made by another model .*{words}"):
            run_many(pair.model, pair.clean, [Zero("0.z"), [Zero("0.z"), change]], READ)
    with pytest.raises(SweepError, match="made by another model"):
        run_many(pair.model, pair.clean, [Zero("0.z")], READ, change=Replace("1.z", held))
    with pytest.raises(SweepError, match="made by another model"):
        ablation_sweep(pair.model, pair.clean, READ, "mean", "z", ("layer",), held)
    if not options:  # a tensor says that it is meant
        run_many(pair.model, pair.clean, [Replace("1.z", held.cache["1.z"])], READ)


def test_what_no_list_can_be_is_refused(pair):
    model, clean = pair.model, pair.clean
    for empty in ([], {}):
        with pytest.raises(SweepError, match="cells is empty"):
            run_many(model, clean, empty, READ)
    with pytest.raises(SweepError, match=r"a cell holds '1\.z'"):
        run_many(model, clean, [["1.z"]], READ)
    with pytest.raises(UnknownSiteError):
        run_many(model, clean, [Zero("3.z")], READ)
    with pytest.raises(UnknownSiteError):
        run_many(model, clean, [Zero("1.cross_z")], READ)
    with pytest.raises(SelectionError):
        run_many(model, clean, [Zero("1.z", at=6)], READ)
    with pytest.raises(InterventionError):
        run_many(model, clean, [Replace("1.z", torch.zeros(3))], READ)
    with pytest.raises(SweepError, match="edges is empty"):
        knock_out_sweep(model, clean, READ, {})
    with pytest.raises(SweepError, match="'layer' or 'window', and 'head'"):
        knock_out_sweep(model, clean, READ, EDGES, ("layer", "position"))
    with pytest.raises(InterventionError, match="KnockOut cuts attention edges"):
        knock_out_sweep(model, clean, READ, EDGES, site="z")
    with pytest.raises(SweepError, match="value='max'"):
        ablation_sweep(model, clean, READ, "max")  # type: ignore[arg-type]
    with pytest.raises(InterventionError, match="at least 2 examples"):
        ablation_sweep(model, clean.select([0]), READ, "resample")
    short = run(model, Inputs(clean.tokens[:, :5]), record="z")
    with pytest.raises((InterventionError, SweepError)):
        ablation_sweep(model, clean, READ, "mean", "z", ("layer",), short)


@pytest.mark.parametrize("names", [[(0, 1), (2, 0)], [0, "b"]])
def test_any_names_of_cells_make_a_table(pair, names):
    table = run_many(pair.model, pair.clean, dict(zip(names, [Zero("1.z"), Zero("0.z")], strict=True)), READ).table()
    assert table["cell"].tolist() == [name for name in names for _ in range(4)]
