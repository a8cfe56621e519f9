"""The grid of one site's sweep: its axes, their coordinates, and what is refused before anything runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.at import positions, side
from interp.hookable import Hookable
from interp.interventions import Intervention
from interp.model.inputs import Inputs
from interp.sites import SITES, Site, UnknownSiteError, expand, suggest
from interp.sweep.cells import Grid, GridWrite
from interp.sweep.errors import SweepError

AXES = ("layer", "window", "position", "role", "head", "neuron")
_AXIS_OF = {"position": ("position",), "role": ("position",), "head": ("head", "kv_head"), "neuron": ("d_ff",)}
_ONE_OF = ({"layer", "window"}, {"position", "role"}, {"head", "neuron"})


@dataclass(frozen=True)
class SiteGrid:
    """One site's cells, or those of several patched jointly: axes, their coordinates, and where each lies.

    layers [coordinate …]: which layers a coordinate of the layer axis patches; rows [coordinate batch]: its positions.
    """

    name: str
    sites: tuple[Site, ...]
    axes: tuple[str, ...]
    coordinates: tuple[list[Any], ...]
    layers: tuple[tuple[int | None, ...], ...]
    rows: np.ndarray | None
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """How many coordinates each axis has."""
        return tuple(len(one) for one in self.coordinates)

    @property
    def spans(self) -> dict[Any, tuple[int, int, bool]]:
        """With windows: centre -> first layer, last layer, whether it is cut off at an end of the model."""
        if "window" not in self.axes:
            return {}
        centres = self.coordinates[self.axes.index("window")]
        return {
            centre: (layers[0], layers[-1], len(layers) < self.width)  # type: ignore[misc]
            for centre, layers in zip(centres, self.layers, strict=True)
        }

    def label(self, cell: int) -> str:
        """What a cell is, for a message: 'layer 3, position 5'."""
        index = np.unravel_index(cell, self.shape)
        return ", ".join(f"{axis} {self.coordinates[i][index[i]]}" for i, axis in enumerate(self.axes))

    def cells(self, source: Mapping[Site, Tensor], order: Sequence[Site], always: Sequence[Intervention] = ()) -> Grid:
        """The grid with its values: each cell writes the source's over the base run's."""
        writes = []
        by_name: dict[tuple[str, str | None], list[Site]] = {}
        for site in self.sites:
            by_name.setdefault((site.name, site.stack), []).append(site)
        for same in by_name.values():
            number = {site.layer: i for i, site in enumerate(same)}
            for offset in range(max(len(layers) for layers in self.layers)):
                which = [number[layers[offset]] if offset < len(layers) else -1 for layers in self.layers]
                writes.append(GridWrite(tuple(same), np.array(which)))
        entries = next((self.coordinates[i] for i, axis in enumerate(self.axes) if axis in ("head", "neuron")), None)
        return Grid(
            self.axes,
            self.shape,
            writes,
            source,
            self.rows,
            None if entries is None else np.array(entries),
            order,
            always,
        )


def site_groups(
    model: Hookable, sites: str | Sequence[str | Sequence[str]], by: str | Sequence[str], window: int = 1
) -> dict[str, list[list[Site]]]:
    """Per site name, or names that are patched jointly, every layer's site of each. Raises SweepError, UnknownSiteError."""
    by = axes_of(by)
    _check_axes(by, window)
    asked = [sites] if isinstance(sites, str) else list(sites)
    if not asked:
        raise SweepError("sites is empty: nothing to patch")
    found: dict[str, list[list[Site]]] = {}
    for one in asked:
        names = tuple(one) if isinstance(one, list | tuple) else (one,)
        name = "+".join(map(str, names))
        if len(set(names)) < len(names):
            raise SweepError(f"the joint sites {name!r} name a site twice; allowed: each once")
        if not names or name in found:
            raise SweepError(f"sites holds {'an empty tuple' if not names else f'{name!r} twice'}; allowed: each once")
        groups = [_sites(model, single, by) for single in names]
        if len({tuple(site.layer for site in group) for group in groups}) > 1:
            raise SweepError(f"the sites of {name!r} do not lie in the same layers; allowed: sites of one stack")
        found[name] = groups
    return found


def sites_of(groups: Mapping[str, list[list[Site]]]) -> list[Site]:
    """Every site of some groups, each once."""
    return list(dict.fromkeys(site for group in groups.values() for same in group for site in same))


def axes_of(by: str | Sequence[str]) -> tuple[str, ...]:
    """The axes to sweep as a tuple."""
    return (by,) if isinstance(by, str) else tuple(by)


def site_grids(
    groups: Mapping[str, list[list[Site]]],
    by: str | Sequence[str],
    shapes: Mapping[Site, tuple[int, ...]],
    clean: Inputs,
    corrupted: Inputs | None,
    window: int = 1,
    only: Sequence[int] | None = None,
) -> list[SiteGrid]:
    """One grid per entry of `groups`; shapes: of the recorded values, whose axes are the coordinates. Raises SweepError."""
    by = axes_of(by)
    if only is not None and "position" not in by:
        raise SweepError(f"positions={only!r} needs 'position' in by={by!r}")
    return [_grid(name, group, by, shapes, clean, corrupted, window, only) for name, group in groups.items()]


def _grid(
    name: str,
    groups: list[list[Site]],
    by: tuple[str, ...],
    shapes: Mapping[Site, tuple[int, ...]],
    clean: Inputs,
    corrupted: Inputs | None,
    window: int,
    only: Sequence[int] | None,
) -> SiteGrid:
    first = groups[0][0]
    layers = tuple(site.layer for site in groups[0])
    inputs = side(first, "position", clean)
    if {"position", "role"} & set(by) and len({side(g[0], "position", clean) is clean for g in groups}) > 1:
        raise SweepError(f"the sites of {name!r} count positions of different sequences; allowed: of one stack")
    coordinates: list[list[Any]] = []
    rows: np.ndarray | None = None
    for axis in by:
        if axis in ("layer", "window"):
            coordinates.append(list(layers))
        elif axis in ("position", "role"):
            if axis == "position":
                _check_positions(inputs, only)
                coordinates.append(list(range(inputs.length)) if only is None else [int(one) for one in only])
            else:
                _check_roles(name, inputs, None if corrupted is None else side(first, "position", corrupted))
                coordinates.append(list(inputs.roles))
            rows = _rows(inputs, coordinates[-1])
        else:
            sizes = sorted({_size(shapes[group[0]], group[0], axis) for group in groups})
            if len(sizes) > 1:
                raise SweepError(
                    f"the sites of {name!r} have {sizes} entries on the axis {axis!r}; allowed: as many each"
                )
            coordinates.append(list(range(sizes[0])))
    flat = tuple(site for group in groups for site in group)
    return SiteGrid(name, flat, by, tuple(coordinates), layer_spans(layers, by, window), rows, window)


def _rows(inputs: Inputs, where: list[Any]) -> np.ndarray:
    """The position of each coordinate in every example [coordinate batch]; roles and negative ones differ between examples."""
    if inputs.mask is None and all(isinstance(one, int) and 0 <= one < inputs.length for one in where):
        return np.repeat(np.array(where)[:, None], inputs.batch, 1)
    return np.stack([positions(inputs, one).cpu().numpy() for one in where])


def layer_spans(layers: tuple[int | None, ...], by: tuple[str, ...], window: int) -> tuple[tuple[int | None, ...], ...]:
    """Which layers each coordinate of the layer axis patches; one coordinate with all of them without such an axis."""
    if "layer" in by:
        return tuple((layer,) for layer in layers)
    if "window" in by:
        half = window // 2
        return tuple(layers[max(0, i - half) : i + half + 1] for i in range(len(layers)))
    return (layers,)


def _sites(model: Hookable, name: Any, by: tuple[str, ...]) -> list[Site]:
    """Every layer's site of one name, each with the axes that are swept."""
    if isinstance(name, str) and name.split(".")[-1] not in SITES:
        unknown = name.split(".")[-1]
        raise UnknownSiteError(f"unknown site {unknown!r}{suggest(unknown, SITES)}; allowed: {', '.join(SITES)}")
    if not isinstance(name, str) or name.removeprefix("encoder.").removeprefix("decoder.") not in SITES:
        raise SweepError(f"sites holds {name!r}; allowed: names without a layer, such as 'z' or 'attn_out' (layers are an "
                         "axis of the sweep)")  # fmt: skip
    found = expand(name, model.sites)
    if len({site.stack for site in found}) > 1:
        raise SweepError(f"sites holds {name!r}, which both stacks have; allowed: 'encoder.{name}', 'decoder.{name}'")
    for axis in by:
        if axis in ("layer", "window"):
            if found[0].layer is None:
                raise SweepError(f"site '{found[0]}' has no layer: it cannot be swept by {axis!r}")
        elif not set(_AXIS_OF[axis]) & set(found[0].spec.axes):
            axes = ", ".join(found[0].spec.axes)
            raise SweepError(f"site '{found[0]}' has axes {axes}: it cannot be swept by {axis!r}")
    return found


def _size(shape: tuple[int, ...], site: Site, axis: str) -> int:
    """How many entries a site's value has on the axis "head" or "neuron"."""
    return next(size for name, size in zip(site.spec.axes, shape[1:], strict=True) if name in _AXIS_OF[axis])


def _check_axes(by: tuple[str, ...], window: int) -> None:
    twice = [pair for pair in _ONE_OF if pair <= set(by)]
    if not by or len(set(by)) != len(by) or not set(by) <= set(AXES) or twice:
        raise SweepError(
            f"by={by!r} is not allowed; allowed: different ones of layer or window, position or role, head or neuron"
        )
    if not isinstance(window, int) or isinstance(window, bool) or window < 1 or window % 2 == 0:
        raise SweepError(f"window={window!r} is not allowed; allowed: an odd number of layers, so that it has a centre")
    if window > 1 and "window" not in by:
        raise SweepError(f"window={window} needs 'window' in by={by!r}")


def check_choices(direction: str, engine: str, exact: str, budget: float | None) -> None:
    """Raise SweepError for a choice that is none of the allowed ones."""
    for value, allowed, what in (
        (direction, ("denoising", "noising"), "direction"),
        (engine, ("fast", "reference"), "engine"),
        (exact, ("rounding", "bitwise"), "exact"),
    ):
        if value not in allowed:
            raise SweepError(f"{what}={value!r} is not allowed; allowed: {', '.join(map(repr, allowed))}")
    if budget is not None and (not isinstance(budget, int | float) or isinstance(budget, bool) or not budget > 0):
        raise SweepError(f"budget={budget!r} is not allowed; allowed: bytes > 0, or None for half of what is free")


def check_pairs(clean: Inputs, corrupted: Inputs) -> None:
    """Raise SweepError where pairs differ in anything but their tokens."""
    _same_shape(clean, corrupted, "prompts")
    for name in ("prefix_length", "segments"):
        a, b = getattr(clean, name), getattr(corrupted, name)
        if (a is None) != (b is None) or (a is not None and not torch.equal(a, b)):
            raise SweepError(f"clean and corrupted prompts differ in {name}; pairs may differ in their tokens only")
    if clean.source is not None:
        _same_shape(clean.encoder, corrupted.encoder, "sources")


def _same_shape(clean: Inputs, corrupted: Inputs, what: str) -> None:
    if clean.tokens.shape != corrupted.tokens.shape:
        raise SweepError(f"clean {what} have shape {tuple(clean.tokens.shape)} and corrupted ones "
                         f"{tuple(corrupted.tokens.shape)} [batch pos]; pairs must have equal length")  # fmt: skip
    masks = [torch.ones_like(x.tokens, dtype=torch.bool) if x.mask is None else x.mask for x in (clean, corrupted)]
    if not torch.equal(*masks):
        rows = (masks[0] != masks[1]).any(1).nonzero()[:, 0].tolist()
        raise SweepError(f"clean and corrupted {what} of pair(s) {rows[:5]} have different lengths or padding")


def _check_positions(clean: Inputs, only: Sequence[int] | None) -> None:
    if only is not None and (isinstance(only, str) or len(only) == 0):
        raise SweepError(f"positions={only!r} is not allowed; allowed: a list of ints, not empty")
    if only is None and clean.mask is not None and not bool(clean.mask.all()):
        raise SweepError("prompts of different length have no common positions; allowed: by='role', or positions= counted from "
                         "the end, such as [-1, -2], or prompts of one length")  # fmt: skip


def _check_roles(name: str, clean: Inputs, corrupted: Inputs | None) -> None:
    if not clean.roles:
        raise SweepError(f"by='role' needs inputs with roles for the positions of {name!r}, such as a fact set's prompts; these "
                         "have none (an encoder's positions are named by source_roles)")  # fmt: skip
    for role, where in clean.roles.items():
        other = where if corrupted is None else corrupted.roles.get(role)
        if other is None or not torch.equal(where, other):
            raise SweepError(f"role {role!r} stands at different positions in clean and corrupted prompts")
