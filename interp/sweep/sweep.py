"""Activation patching (Zhang & Nanda 2024): one value of one run written into another, cell by cell."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from tqdm.auto import tqdm

from interp.at import POSITION_AXES, side
from interp.hookable import Hookable, require_head
from interp.interventions import Replace
from interp.metrics import Metric, evaluate
from interp.model.inputs import Inputs
from interp.run import Run, prepare, run
from interp.sites import SITES, Site, SiteSpec, expand
from interp.sweep.result import SweepResult

AXES = ("layer", "position", "role", "head", "neuron")
_AXIS_OF = {"position": ("position",), "role": ("position",), "head": ("head", "kv_head"), "neuron": ("d_ff",)}


class SweepError(ValueError):
    """A sweep that cannot be run as asked; the message names the value and what is allowed."""


def patch_sweep(
    model: Hookable,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    sites: str | Sequence[str] = ("resid_pre", "attn_out", "ffn_out"),
    by: Sequence[str] = ("layer", "position"),
    direction: Literal["denoising", "noising"] = "denoising",
    engine: Literal["reference"] = "reference",
    positions: Sequence[int] | None = None,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
    progress: bool = False,
) -> SweepResult:
    """The metric after each patch, one forward pass per cell, all examples in its batch.

    clean, corrupted: inputs of equal shape, row i of both forming a pair. sites: per-layer site names, in an
    encoder-decoder with their stack ("encoder.resid_post"; positions of its encoder are the source's). by: the axes to
    sweep, a subset of "layer", "position" or "role" (the inputs' named positions), "head", "neuron"; an axis left out is
    patched whole (without "layer": every layer's site at once). direction: denoising writes clean values into the
    corrupted run (sufficiency), noising the reverse (necessity). positions: only these, default all.
    Every run of a sweep computes the same sites, so a patch that changes nothing has effect exactly 0.
    Raises SweepError, InputsError, UnknownSiteError, MetricError.
    """
    clean, corrupted = (prepare(model, inputs, tokenizer, prefix) for inputs in (clean, corrupted))
    require_head(model)
    names = [sites] if isinstance(sites, str) else list(sites)
    by = (by,) if isinstance(by, str) else tuple(by)
    _check(model, clean, corrupted, names, by, direction, engine)
    for name in names:
        where = expand(name, model.sites)[0]
        for axis in where.spec.axes:
            if axis in POSITION_AXES:
                _check_positions(side(where, axis, clean), by, positions)
    wanted = [site for name in names for site in expand(name, model.sites)]
    runs = {"clean": run(model, clean, record=wanted), "corrupted": run(model, corrupted, record=wanted)}
    source, base = (
        runs[key] for key in (("clean", "corrupted") if direction == "denoising" else ("corrupted", "clean"))
    )
    baselines = {key: evaluate(metric, one.logits, one.inputs) for key, one in runs.items()}
    grids = {name: _grid(model, name, by, base, positions) for name in names}
    total = sum(len(list(itertools.product(*grid))) for grid in grids.values())
    values, forwards = {}, 2
    with tqdm(total=total, disable=not progress, desc="patching", unit="patch") as bar:
        for name, grid in grids.items():
            cells = []
            for cell in itertools.product(*grid):
                change = list(_patches(model, name, dict(zip(by, cell, strict=True)), source, base.inputs))
                patched = run(model, base.inputs, change=change, wanted=wanted)
                cells.append(evaluate(metric, patched.logits, base.inputs))
                forwards += 1
                bar.update()
            values[name] = torch.stack(cells).unflatten(0, [len(axis) for axis in grid])
    return SweepResult(
        metric=getattr(metric, "name", getattr(metric, "__name__", "metric")),
        unit=getattr(metric, "unit", ""),
        direction=direction,
        values=values,
        axes=dict.fromkeys(names, by),
        coordinates=grids,
        clean=baselines["clean"],
        corrupted=baselines["corrupted"],
        engine=engine,
        work={"forwards": forwards, "blocks_times_tokens": forwards * clean.tokens.numel() * model.config.n_layers},
    )


def _patches(model: Hookable, name: str, cell: dict[str, Any], source: Run, inputs: Inputs) -> Iterator[Replace]:
    """The interventions of one cell: one, or one per layer when layers are not swept."""
    at = []
    for axis in _spec(name).axes:
        key = next((key for key in cell if axis in _AXIS_OF.get(key, ())), None)
        at.append(slice(None) if key is None else cell[key])
    for site in expand(name, model.sites):
        if cell.get("layer", site.layer) == site.layer:
            yield Replace(site, source, at=tuple(at))


def _grid(
    model: Hookable, name: str, by: Sequence[str], base: Run, positions: Sequence[int] | None
) -> tuple[list, ...]:
    """The coordinates of each swept axis of one site."""
    found = expand(name, model.sites)
    shape = dict(zip(_spec(name).axes, base.cache[found[0]].shape[1:], strict=True))
    sizes: dict[str, list] = {
        "layer": [site.layer for site in found],
        "role": list(side(found[0], "position", base.inputs).roles),
    }
    for axis, candidates in _AXIS_OF.items():
        size = next((shape[candidate] for candidate in candidates if candidate in shape), None)
        if axis != "role" and size is not None:
            sizes[axis] = list(range(size))
    if positions is not None:
        sizes["position"] = [int(position) for position in positions]
    return tuple(sizes[axis] for axis in by)


def _check(model, clean: Inputs, corrupted: Inputs, names, by, direction: str, engine: str) -> None:
    _check_pairs(clean, corrupted, "prompts")
    for name in ("prefix_length", "segments"):
        a, b = getattr(clean, name), getattr(corrupted, name)
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
            raise SweepError(f"clean and corrupted prompts differ in {name}; pairs may differ in their tokens only")
    if clean.source is not None:
        _check_pairs(clean.encoder, corrupted.encoder, "sources")
    for value, allowed, what in (
        (direction, ("denoising", "noising"), "direction"),
        (engine, ("reference",), "engine"),
    ):
        if value not in allowed:
            raise SweepError(f"{what}={value!r} is not allowed; allowed: {', '.join(map(repr, allowed))}")
    if not by or len(set(by)) != len(by) or not set(by) <= set(AXES) or {"position", "role"} <= set(by):
        raise SweepError(f"by={by!r} is not allowed; allowed: different ones of {', '.join(AXES)}, position or role")
    if not names:
        raise SweepError("sites is empty: nothing to patch")
    for name in names:
        if not isinstance(name, str) or name.split(".")[-1] not in SITES or name.partition(".")[0].isdecimal():
            raise SweepError(f"sites holds {name!r}; allowed: names without a layer, such as 'z' or 'attn_out' (layers are an "
                             "axis of the sweep)")  # fmt: skip
        found = expand(name, model.sites)
        if len({site.stack for site in found}) > 1:
            raise SweepError(
                f"sites holds {name!r}, which both stacks have; allowed: 'encoder.{name}', 'decoder.{name}'"
            )
        for site in found:
            for axis in by:
                if axis != "layer" and not set(_AXIS_OF[axis]) & set(site.spec.axes):
                    raise SweepError(
                        f"site '{site}' has axes {', '.join(site.spec.axes)}: it cannot be swept by {axis!r}"
                    )
                if axis == "layer" and site.layer is None:
                    raise SweepError(f"site '{site}' has no layer: it cannot be swept by 'layer'")
    if "role" in by:
        for name in names:
            where = expand(name, model.sites)[0]
            _check_roles(name, side(where, "position", clean), side(where, "position", corrupted))


def _spec(name: str) -> SiteSpec:
    """The dictionary's entry of 'resid_post' or 'encoder.resid_post'."""
    return SITES[name.split(".")[-1]]


def _check_pairs(clean: Inputs, corrupted: Inputs, what: str) -> None:
    if clean.tokens.shape != corrupted.tokens.shape:
        raise SweepError(f"clean {what} have shape {tuple(clean.tokens.shape)} and corrupted ones "
                         f"{tuple(corrupted.tokens.shape)} [batch pos]; pairs must have equal length")  # fmt: skip
    masks = [torch.ones_like(x.tokens, dtype=torch.bool) if x.mask is None else x.mask for x in (clean, corrupted)]
    if not torch.equal(*masks):
        rows = (masks[0] != masks[1]).any(1).nonzero()[:, 0].tolist()
        raise SweepError(f"clean and corrupted {what} of pair(s) {rows[:5]} have different lengths or padding")


def _check_positions(clean: Inputs, by: Sequence[str], positions: Sequence[int] | None) -> None:
    if positions is not None and "position" not in by:
        raise SweepError(f"positions={positions!r} needs 'position' in by={by!r}")
    if positions is not None and (isinstance(positions, str) or len(positions) == 0):
        raise SweepError(f"positions={positions!r} is not allowed; allowed: a list of ints, not empty")
    if "position" in by and positions is None and clean.mask is not None and not bool(clean.mask.all()):
        raise SweepError("prompts of different length have no common positions; allowed: by='role', or positions= counted from "
                         "the end, such as [-1, -2], or prompts of one length")  # fmt: skip


def _check_roles(name: str, clean: Inputs, corrupted: Inputs) -> None:
    if not clean.roles:
        raise SweepError(f"by='role' needs inputs with roles for the positions of {name!r}, such as a fact set's prompts; these "
                         "have none (an encoder's positions are named by source_roles)")  # fmt: skip
    for name, role in clean.roles.items():
        other: Site | Tensor | None = corrupted.roles.get(name)
        if other is None or not torch.equal(role, other):
            raise SweepError(f"role {name!r} stands at different positions in clean and corrupted prompts")
