"""Sweeps of any interventions: lists of them, ablations, attention edges cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from interp.hookable import Hookable, require_head
from interp.interventions import AddNoise, Intervention, KnockOut, Mean, Resample
from interp.metrics import Metric
from interp.model.inputs import Inputs
from interp.run import Run, prepare, run
from interp.sites import Site, resolve
from interp.sweep.base import further_sites, record
from interp.sweep.checkpoint import Checkpoint
from interp.sweep.errors import SweepError
from interp.sweep.execute import Exact, Job, engine_for
from interp.sweep.grid import SiteGrid, axes_of, check_choices, layer_spans, site_grids, site_groups, sites_of
from interp.sweep.listed import Listed
from interp.sweep.patch import SweepPlan
from interp.sweep.result import SweepResult

Engine = Literal["fast", "reference"]
Ablation = Literal["zero", "mean", "resample", "noise"]


def run_many(
    model: Hookable,
    inputs: Any,
    cells: Mapping[str, Sequence[Intervention] | Intervention] | Sequence[Sequence[Intervention] | Intervention],
    metric: Metric | Callable[[Tensor], Tensor],
    change: Sequence[Intervention] | Intervention = (),
    engine: Engine = "fast",
    exact: Exact = "rounding",
    budget: float | None = None,
    check: int = 2,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: bool = False,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> SweepResult:
    """The metric of many runs of the same inputs, each with its own changes: `run(model, inputs, change=…)` per cell, at once.

    cells: per cell an intervention or several (a joint patch), with names (a mapping) or numbered. change: made in every cell
    and in the base run, before the cell's own (a corruption by noise). The result's only axis is "cell"; `clean` is the base
    run's metric. Other arguments as in `patch_sweep`. Raises SweepError, InterventionError, UnknownSiteError and what
    `patch_sweep` raises.
    """
    if isinstance(cells, Intervention | str) or not isinstance(cells, Mapping | Sequence):
        raise SweepError(
            f"cells={cells!r} is not allowed; allowed: a list of interventions or of lists of them, or name -> those"
        )
    names = list(cells) if isinstance(cells, Mapping) else list(range(len(cells)))
    given = list(cells.values()) if isinstance(cells, Mapping) else list(cells)
    if not given:
        raise SweepError("cells is empty: nothing to run")
    listed = [
        [one] if isinstance(one, Intervention) else list(one) if isinstance(one, list | tuple) else [one]
        for one in given
    ]
    always = [change] if isinstance(change, Intervention) else list(change)
    inputs = prepare(model, inputs, tokenizer, prefix)
    grid = SiteGrid("cells", (), ("cell",), (names,), (), None, 1)
    plan = listed_plan(model, inputs, [(grid, listed)], metric, always, engine, exact, budget)
    return plan.run(check, checkpoint, progress)


def plan_ablation(
    model: Hookable,
    inputs: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    value: Ablation = "zero",
    sites: str | Sequence[str | Sequence[str]] = ("attn_out", "ffn_out"),
    by: str | Sequence[str] = ("layer", "position"),
    reference: Run | None = None,
    std: float = 1.0,
    seed: int = 0,
    engine: Engine = "fast",
    exact: Exact = "rounding",
    window: int = 1,
    positions: Sequence[int] | None = None,
    budget: float | None = None,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> SweepPlan:
    """An ablation sweep with its unchanged run made and nothing else computed: see `ablation_sweep`, which runs it."""
    if value not in ("zero", "mean", "resample", "noise"):
        raise SweepError(f"value={value!r} is not allowed; allowed: 'zero', 'mean', 'resample', 'noise'")
    if not 0 <= std < float("inf"):
        raise SweepError(f"std={std!r} is not allowed; allowed: a number >= 0")
    by = axes_of(by)
    inputs = prepare(model, inputs, tokenizer, prefix)
    groups = site_groups(model, sites, by, window)
    wanted = sites_of(groups)
    held = run(model, inputs, record=wanted, wanted=wanted) if reference is None else reference
    if not isinstance(held, Run) or any(site not in held.cache for site in wanted):
        raise SweepError(
            f"reference={held!r} is not allowed; allowed: a Run that recorded {', '.join(map(str, wanted[:3]))} …"
        )
    _own_run(model, held)
    shapes = {site: tuple(held.cache[site].shape) for site in wanted}
    grids = site_grids(groups, by, shapes, inputs, None, window, positions)
    jobs: list[tuple[SiteGrid, Any]] = []
    for grid in grids:
        if value == "zero":
            zeros = {site: torch.zeros_like(held.cache[site]) for site in grid.sites}
            jobs.append((grid, grid.cells(zeros, model.sites)))
            continue
        places = grid.cells(held.cache, model.sites)
        make = {
            "mean": lambda site, at: Mean(site, held, at=at),
            "resample": lambda site, at: Resample(site, seed=seed, reference=held, at=at),
            "noise": lambda site, at: AddNoise(site, std=std, seed=seed, at=at),
        }[value]
        cells = [[make(one.place, one.at) for one in places.interventions(i)] for i in range(len(places))]  # type: ignore[attr-defined]
        jobs.append((grid, cells))
    return listed_plan(model, inputs, jobs, metric, (), engine, exact, budget, f"ablation ({value})", wanted)


def ablation_sweep(
    model: Hookable,
    inputs: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    value: Ablation = "zero",
    sites: str | Sequence[str | Sequence[str]] = ("attn_out", "ffn_out"),
    by: str | Sequence[str] = ("layer", "position"),
    reference: Run | None = None,
    std: float = 1.0,
    seed: int = 0,
    engine: Engine = "fast",
    exact: Exact = "rounding",
    window: int = 1,
    positions: Sequence[int] | None = None,
    budget: float | None = None,
    check: int = 2,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: bool = False,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> SweepResult:
    """The metric after each ablation; which one is chosen changes what comes out, so the result's direction names it.

    value: "zero"; "mean", over the examples of `reference` (a Run of as many prompts, default the unchanged run); "resample",
    another example's value of `reference`, a derangement drawn from `seed`; "noise", Gaussian of standard deviation `std` added.
    Other arguments as in `patch_sweep`; `effect()` is the mean of ablated − clean in the metric's unit.
    """
    plan = plan_ablation(model, inputs, metric, value, sites, by, reference, std, seed, engine, exact, window, positions, budget,
                         tokenizer, prefix)  # fmt: skip
    return plan.run(check, checkpoint, progress)


def knock_out_sweep(
    model: Hookable,
    inputs: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    edges: Mapping[str, tuple[Any, Any]],
    by: str | Sequence[str] = "layer",
    site: str = "scores",
    engine: Engine = "fast",
    exact: Exact = "rounding",
    window: int = 1,
    budget: float | None = None,
    check: int = 2,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: bool = False,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> SweepResult:
    """The metric with attention edges cut (Geva et al. 2023): which layers carry what from where.

    edges: name -> (query, key), each a position, a role, a slice or a list; a query left without an edge reads nothing. by:
    "layer" or "window", and "head". site: "scores", "encoder.scores" or "cross_scores". Axes of the result: "edges", then by.
    """
    by = axes_of(by)
    if not edges:
        raise SweepError("edges is empty: nothing to cut")
    if not isinstance(edges, Mapping) or not all(isinstance(one, tuple) and len(one) == 2 for one in edges.values()):
        raise SweepError(
            f"edges={edges!r} is not allowed; allowed: name -> (query, key), such as {{'subject': ('final', 'subject')}}"
        )
    if not set(by) <= {"layer", "window", "head"}:
        raise SweepError(f"by={by!r} is not allowed; allowed: 'layer' or 'window', and 'head'")
    inputs = prepare(model, inputs, tokenizer, prefix)
    (name, group), *_ = site_groups(model, site, by, window).items()
    sites = group[0]
    layers = [one.layer for one in sites]
    coordinates: list[list[Any]] = [list(edges)]
    coordinates += [layers if axis != "head" else list(range(model.config.n_heads)) for axis in by]
    spans = layer_spans(tuple(layers), by, window)
    cells = []
    for edge, *where in itertools.product(*coordinates):
        place = dict(zip(by, where, strict=True))
        index = next((layers.index(place[axis]) for axis in ("layer", "window") if axis in place), 0)
        query, key = edges[edge]
        cut = [one for one in sites if one.layer in spans[index]]
        cells.append([KnockOut(one, at=(place.get("head", slice(None)), query, key)) for one in cut])
    grid = SiteGrid(name, tuple(sites), ("edges", *by), tuple(coordinates), spans, None, window)
    plan = listed_plan(model, inputs, [(grid, cells)], metric, (), engine, exact, budget, "knock-out")
    return plan.run(check, checkpoint, progress)


def listed_plan(
    model: Hookable,
    inputs: Inputs,
    jobs: Sequence[tuple[SiteGrid, Any]],
    metric: Metric | Callable[[Tensor], Tensor],
    always: Sequence[Intervention] = (),
    engine: Engine = "fast",
    exact: Exact = "rounding",
    budget: float | None = None,
    direction: str = "change",
    wanted: Sequence[Site] = (),
) -> SweepPlan:
    """Grids of cells (`Cells`, or lists of interventions) on one unpatched run."""
    require_head(model)
    check_choices(direction="denoising", engine=engine, exact=exact, budget=budget)
    for _, cells in jobs:
        for change in itertools.chain(always, *cells) if isinstance(cells, list) else ():
            _own_source(model, change)
    made = [Listed(cells, model.sites, always) if isinstance(cells, list) else cells for _, cells in jobs]
    wanted = list(dict.fromkeys([*wanted, *(site for cells in made for site in cells.sites)]))
    own = [resolve(change.place, model.sites) for change in always]
    reads = list(dict.fromkeys([*wanted, *own, *further_sites(model, engine, exact)]))
    base = record(model, inputs, reads, metric, always, wanted, engine == "reference" or exact == "bitwise")
    planned = []
    for (grid, _), cells in zip(jobs, made, strict=True):
        way = engine_for(engine, model, cells)
        planned.append(Job(model, cells, base, exact, way, budget, grid.name, grid.label, wanted))
    return SweepPlan(planned, [grid for grid, _ in jobs], direction, base.metric, None)


def _own_source(model: Hookable, change: Any) -> None:
    """SweepError for a change that takes its values from another model's run."""
    if not isinstance(change, Intervention):
        raise SweepError(f"a cell holds {change!r}; allowed: interventions such as Zero('3.z')")
    resolve(change.place, model.sites)
    for name in ("value", "run", "reference"):
        held = getattr(change, name, None)
        if isinstance(held, Run):
            _own_run(model, held, f" that {type(change).__name__} at '{change.site}' takes its values from")


def _own_run(model: Hookable, held: Run, what: str = "") -> None:
    if held.model is None or held.made_by is model:  # not known, after unpickling: the shapes decide
        return
    maker = "one that is gone" if held.made_by is None else _short(held.made_by)
    raise SweepError(f"the run{what} was made by another model ({maker}, not {_short(model)}); allowed: runs of this model, or "
                     "Replace(site, tensor) with that run's tensor, which says that it is meant")  # fmt: skip


def _short(model: Any) -> str:
    config = model.config
    return f"{type(model).__name__} of {config.n_layers} layers, d_model {config.d_model}"
