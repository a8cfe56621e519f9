"""Attribution patching (Nanda 2023; Syed et al. 2023): every patch of a sweep estimated to first order from one gradient.

A patch writes source − base into one cell of an activation h; the metric then changes by ≈ ∂m/∂h · (h_source − h_base). At a
saturated point that is wrong; integrated gradients (Sundararajan et al. 2017; Hanna et al. 2024) average the gradient along the
line from base to source. Estimates are checked against exact patches of the same call, and say when they only rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from interp.analyses.attribution_result import AttributionResult, as_sweep, relative_errors
from interp.analyses.estimate_agreement import Agreement, agreement_of
from interp.hookable import Hookable, require_head
from interp.interventions import Intervention, Replace
from interp.metrics import Metric, evaluate, wide
from interp.model.inputs import Inputs
from interp.run import RunTap, check_weights, prepare, run
from interp.sites import Site
from interp.sweep import SweepError, run_many
from interp.sweep.grid import SiteGrid, axes_of, check_choices, check_pairs, site_grids, site_groups, sites_of

_SIZES = ("head", "kv_head", "d_ff")


def attribution_patch(
    model: Hookable,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    sites: str | Sequence[str] = ("resid_pre", "attn_out", "ffn_out"),
    by: str | Sequence[str] = ("layer", "position"),
    direction: Literal["denoising", "noising"] = "denoising",
    steps: int | None = None,
    check: int = 50,
    seed: int = 0,
    positions: Sequence[int] | None = None,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> AttributionResult:
    """An estimate of every patch that `patch_sweep` would make with the same arguments, in the metric's unit.

    clean, corrupted: inputs, row i of both forming a pair. by: "layer", then "position" or "role", "head" or "neuron"; an axis
    left out is patched whole. steps: None = one gradient at the base run: one forward each of base and source and one
    backward for all cells. n = integrated gradients, midpoint rule over n points where this site of this layer lies between
    base and source: n forwards and backwards, and one forward for the completeness error, per site and layer. The whole site
    moves along the line, so a cell's share holds its interactions with the others: complete sums can stand beside cells that
    differ from their own patches, which `exact` and `agreement` show.
    completeness_error: |Σ attributions − (metric with the whole site patched − base)| / |metric … − base|, per example.
    check: how many cells, drawn from `seed` among those that change anything, are measured exactly by `run_many`; 0 for none.
    The model's parameters get no gradients. Scores are refused (−∞), and joint patches and windows, which one gradient does not
    estimate. Raises SweepError, InputsError, UnknownSiteError, MetricError.
    """
    require_head(model)
    check_choices(direction=direction, engine="reference", exact="rounding", budget=None)
    _check_counts(steps, check)
    clean, corrupted = (prepare(model, one, tokenizer, prefix) for one in (clean, corrupted))
    check_pairs(clean, corrupted)
    by = axes_of(by)
    groups = site_groups(model, sites, by)
    wanted = sites_of(groups)
    _refuse_groups(groups, by)
    starts, gives = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    # The source run keeps a graph for a moment, too: fused attention with and without one may round differently.
    source_value, source = _with_graph(model, gives, metric, wanted)
    source_value, source = source_value.detach(), {site: value.detach() for site, value in source.items()}
    value, leaves = _with_graph(model, starts, metric, wanted)
    base_value, base = value.detach(), {site: one.detach() for site, one in leaves.items()}
    grids = site_grids(groups, by, {s: tuple(base[s].shape) for s in wanted}, clean, corrupted, only=positions)
    if any(len(layers) > 1 for grid in grids for layers in grid.layers):
        raise SweepError(
            f"by={by!r} patches all layers at once, which one gradient does not estimate; allowed: with 'layer'"
        )
    change, errors = {site: source[site] - base[site] for site in wanted}, {}
    if steps is None:
        gradients = _gradients(value, leaves)
    else:
        del value, leaves  # and with them the graph
        gradients = {s: _along(model, starts, metric, s, base[s], change[s], wanted, steps) for s in wanted}
        for site in wanted:
            patched = run(model, starts, change=Replace(site, source[site]), wanted=wanted)
            total = (gradients[site] * wide(change[site])).flatten(1).sum(1)
            errors[site] = total, evaluate(metric, patched.logits, starts) - base_value
    products = {site: wide(gradients[site]) * wide(change[site]) for site in wanted}
    moved = {site: (change[site] != 0).double() for site in wanted}
    estimates, moved = ({grid.name: _cells_of(grid, by_site).cpu() for grid in grids} for by_site in (products, moved))
    exact = _validated(model, starts, metric, grids, source, estimates, moved, check, seed)
    ends = (source_value, base_value) if direction == "denoising" else (base_value, source_value)
    complete = None if steps is None else {grid.name: relative_errors(grid, errors) for grid in grids}
    sweep = as_sweep(grids, estimates, base_value.cpu(), ends, direction, metric)
    return AttributionResult(estimates, exact, sweep, complete, _agreement(estimates, exact, list(errors.values())))


def _agreement(
    estimates: Mapping[str, Tensor], exact: Mapping[str, Tensor], sums: list[tuple[Tensor, Tensor]]
) -> Agreement:
    known = {name: ~one.isnan() for name, one in exact.items()}
    pairs = [torch.cat([by[name][where].double() for name, where in known.items()]) for by in (estimates, exact)]
    cells = sum(int(where.any(-1).sum()) for where in known.values())
    return replace(agreement_of(pairs[0], pairs[1], sums), n_cells=cells)


class _Line(RunTap):
    """Where no gradient flows yet, as behind frozen weights, a recorded value starts one; at `leaf` `value` stands instead."""

    def __init__(
        self, model: Hookable, inputs: Inputs, wanted: Sequence[Site], leaf: Site | None = None, value: Any = None
    ) -> None:
        super().__init__(model, inputs, wanted, (), (), keep_graph=True)
        self.leaf, self.value = leaf, value

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        if site == self.leaf:
            value = self.value.to(value.dtype)
        elif self.leaf is None and site in self.wanted and not value.requires_grad:
            value = value.detach().requires_grad_()
        return super().__call__(site, value)


def _with_graph(model: Hookable, inputs: Inputs, metric: Any, wanted: list[Site]) -> tuple[Tensor, dict[Site, Tensor]]:
    """One forward with its graph: the metric [batch], and the activations that gradients can be asked of."""
    tap = _Line(model, inputs, wanted)
    with torch.enable_grad():
        value = evaluate(metric, model(inputs, tap), inputs)
    tap.check_reached()
    if not bool(torch.isfinite(value.detach().sum())):
        check_weights(model)
    return value, tap.recorded


@torch.enable_grad()
def _gradients(value: Tensor, leaves: Mapping[Site, Tensor]) -> dict[Site, Tensor]:
    """∂ Σ metric / ∂ activation of every site, one backward; zeros where the metric does not depend on a site."""
    found = torch.autograd.grad(value.sum(), list(leaves.values()), allow_unused=True)
    return {
        site: torch.zeros_like(leaves[site]) if one is None else one for site, one in zip(leaves, found, strict=True)
    }


def _along(
    model: Hookable,
    inputs: Inputs,
    metric: Any,
    site: Site,
    base: Tensor,
    change: Tensor,
    wanted: list[Site],
    steps: int,
) -> Tensor:
    """The gradient averaged over the midpoints of `steps` pieces of the line from base to source, at one site alone."""
    mean = torch.zeros_like(wide(base))
    for k in range(steps):
        leaf = (base + (k + 0.5) / steps * change).requires_grad_()
        with torch.enable_grad():
            tap = _Line(model, inputs, wanted, site, leaf)
            value = evaluate(metric, model(inputs, tap), inputs)
        mean += _gradients(value, {site: leaf})[site] / steps
    return mean


def _cells_of(grid: SiteGrid, products: Mapping[Site, Tensor]) -> Tensor:
    """Per cell and example the sum of what the cell holds: [batch, *site axes] -> [*grid axes, batch]."""
    layers = []
    for site in grid.sites:
        value, names = products[site], list(site.spec.axes)
        if grid.rows is not None:
            rows = torch.from_numpy(grid.rows).to(value.device)  # [coordinate batch]
            value = value[torch.arange(value.shape[0], device=value.device), rows]  # [coordinate batch …]
            names[0] = "rows"
            value = value.transpose(0, 1)
        kept = {"rows": next((a for a in grid.axes if a in ("position", "role")), "")}
        kept |= {name: next((a for a in grid.axes if a in ("head", "neuron")), "") for name in _SIZES}
        drop = [i + 1 for i, name in enumerate(names) if not kept.get(name)]
        value = value.sum(drop) if drop else value
        order = [kept[name] for name in names if kept.get(name)]
        inner = [axis for axis in grid.axes if axis != "layer"]
        layers.append(value.permute(*[order.index(axis) + 1 for axis in inner], 0))
    if "layer" not in grid.axes:
        return layers[0]
    return torch.stack(layers, grid.axes.index("layer"))


def _validated(
    model: Hookable,
    inputs: Inputs,
    metric: Any,
    grids: list[SiteGrid],
    source: Mapping[Site, Tensor],
    estimates: Mapping[str, Tensor],
    moved: Mapping[str, Tensor],
    check: int,
    seed: int,
) -> dict[str, Tensor]:
    """The exact change of `check` cells, drawn among those that change anything; NaN elsewhere and where nothing changes.

    Cells that change nothing are exactly 0 both ways; counted as agreement they would flatter.
    """
    exact = {name: torch.full_like(one, math.nan) for name, one in estimates.items()}
    places = [(grid, int(i)) for grid in grids for i in (moved[grid.name] > 0).flatten(0, -2).any(-1).nonzero()[:, 0]]
    drawn = torch.randperm(len(places), generator=torch.Generator().manual_seed(seed))[:check].tolist()
    if not drawn:
        return exact
    cells: list[list[Intervention]] = []
    for i in drawn:
        grid, cell = places[i]
        cells.append(grid.cells(source, model.sites).interventions(cell))
    found = run_many(model, inputs, cells, metric, check=0)
    for i, patched in zip(drawn, found.values["cells"], strict=True):
        grid, cell = places[i]
        true = moved[grid.name].flatten(0, -2)[cell] > 0
        exact[grid.name].flatten(0, -2)[cell] = torch.where(
            true, (patched - found.clean).to(exact[grid.name]), torch.nan
        )
    return exact


def _refuse_groups(groups: Mapping[str, list[list[Site]]], by: tuple[str, ...]) -> None:
    if "window" in by:
        raise SweepError(
            f"by={by!r}: a window patches layers jointly, which one gradient does not estimate; allowed: 'layer'"
        )
    for name, group in groups.items():
        if len(group) > 1:
            raise SweepError(
                f"{name!r} is a joint patch, which one gradient does not estimate; allowed: its sites one by one"
            )
        if group[0][0].name in ("scores", "cross_scores"):
            raise SweepError(
                f"{name!r} holds −∞, whose difference is not a number; allowed: 'pattern', 'q', 'k' and others"
            )


def _check_counts(steps: Any, check: Any) -> None:
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise SweepError(
            f"steps={steps!r} is not allowed; allowed: None (first order), or how many points of the line, >= 1"
        )
    if not isinstance(check, int) or isinstance(check, bool) or check < 0:
        raise SweepError(f"check={check!r} is not allowed; allowed: how many cells to measure exactly, 0 for none")
