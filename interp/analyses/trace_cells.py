"""The cells of a causal trace, for the sweep engine: windows of any shape, and paths severed beside a restored state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import Tensor

from interp.interventions import Intervention
from interp.sites import Site
from interp.sweep.cells import Grid, GridWrite
from interp.sweep.grid import SiteGrid

Values = Mapping[Site, Tensor]


def span_cells(
    name: str,
    sites: Sequence[Site],
    spans: Sequence[tuple[int, ...]],
    rows: np.ndarray,
    clean: Values,
    order: Sequence[Site],
    always: Sequence[Intervention] = (),
) -> tuple[SiteGrid, Grid]:
    """One cell per (centre, position): the clean values of the centre's layers. rows [position batch]: where, per example."""
    return _made(name, _writes(sites, spans), {site: clean[site] for site in sites}, len(spans), rows, order, always)


def severed_cells(
    name: str,
    sites: Sequence[Site],
    cut: str,
    held: Sequence[Site],
    rows: np.ndarray,
    clean: Values,
    corrupted: Values,
    order: Sequence[Site],
    always: Sequence[Intervention] = (),
) -> tuple[SiteGrid, Grid]:
    """One cell per (layer, position): the clean state, and in every later layer the token's sub-layer as in the corrupted run.

    The published code holds the sub-layers of all layers; those up to the restored state have their corrupted values anyway.
    """
    layers = range(len(sites))
    writes = [*_writes(sites, [(layer,) for layer in layers])]
    writes += _writes(held, [tuple(range(layer + 1, len(held))) for layer in layers])
    values = {**{site: clean[site] for site in sites}, **{site: corrupted[site] for site in held}}
    return _made(f"{name} without {cut}", writes, values, len(sites), rows, order, always)


def _writes(sites: Sequence[Site], spans: Sequence[tuple[int, ...]]) -> list[GridWrite]:
    """The k-th layer of every span as one write."""
    longest = max(map(len, spans))
    return [
        GridWrite(tuple(sites), np.array([span[k] if k < len(span) else -1 for span in spans])) for k in range(longest)
    ]


def _made(name, writes, values, n_layers, rows, order, always) -> tuple[SiteGrid, Grid]:
    cells = Grid(("layer", "position"), (n_layers, len(rows)), writes, values, rows, None, order, always)
    where = (list(range(n_layers)), list(range(len(rows))))
    return SiteGrid(
        name, cells.sites, ("layer", "position"), where, tuple((at,) for at in range(n_layers)), rows, 1
    ), cells
