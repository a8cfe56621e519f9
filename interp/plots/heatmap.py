"""Heat maps of signed effects: colour bar centred at 0, layers upward, token labels on positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from interp.plots.style import PlotError, need, new_figure, printable

UNIT = "normalised effect\n(share of logit difference)"


def effect_heatmaps(
    table: pd.DataFrame,
    x: str = "position",
    labels: Sequence[str] | None = None,
    value: str = "effect",
    unit: str = UNIT,
    title: str = "",
) -> Figure:
    """One panel per site, layer upward, `x` ("position", "role", …) to the right, one shared scale centred at 0.

    table: columns site, layer, `x`, `value` (one row per cell; several rows are averaged). labels: printed form of each
    x in order, such as the prompt's tokens.
    """
    need(table, ["site", "layer", x, value])
    sites = list(dict.fromkeys(table["site"]))
    ticks = list(dict.fromkeys(table[x])) if x == "role" else sorted(set(table[x]))
    if labels is not None and len(labels) != len(ticks):
        raise PlotError(f"{len(labels)} labels for {len(ticks)} values of {x!r}")
    shown = [printable(str(label)) for label in (labels if labels is not None else ticks)]
    layers = sorted(set(table["layer"]))
    width = max(2.2, 0.34 * len(ticks) + 0.9)
    figure, axes = new_figure(len(sites), width, max(2.9, 0.13 * len(layers) + 1.9), sharey=True)
    top = max(float(table[value].abs().max()), 1e-9)
    for ax, site in zip(axes, sites, strict=True):
        grid = table[table["site"] == site].pivot_table(index="layer", columns=x, values=value, aggfunc="mean")
        image = _draw(ax, grid.reindex(index=layers, columns=ticks), top)
        ax.set_title(f"{site}")
        ax.set_xticks(range(len(ticks)), shown, rotation=60, ha="right", rotation_mode="anchor")
        ax.set_xlabel("token position" if x == "position" else x)
    _layer_axis(axes[0], layers)
    figure.colorbar(image, ax=axes, label=unit, shrink=0.9, pad=0.02)
    if title:
        figure.suptitle(title)
    return figure


def head_heatmap(
    table: pd.DataFrame,
    value: str = "effect",
    unit: str | None = None,
    title: str = "",
) -> Figure:
    """Layer × head of one per-head quantity; table: columns layer, head, `value`.

    unit: label of the colour bar; by default the effect's, or the column's name. A signed effect's scale is centred at 0, any
    other quantity without negative values starts there.
    """
    need(table, ["layer", "head", value])
    unit = unit or (UNIT if value == "effect" else value.replace("_", " "))
    grid = table.pivot_table(index="layer", columns="head", values=value, aggfunc="mean")
    figure, [ax] = new_figure(1, max(3.2, 0.34 * grid.shape[1] + 1.4), max(2.9, 0.13 * grid.shape[0] + 1.3))
    image = _draw(
        ax, grid, max(float(table[value].abs().max()), 1e-9), signed=value == "effect" or bool((table[value] < 0).any())
    )
    ax.set_xticks(range(grid.shape[1]), [str(head) for head in grid.columns])
    ax.set_xlabel("head")
    _layer_axis(ax, list(grid.index))
    figure.colorbar(image, ax=ax, label=unit, shrink=0.9)
    if title:
        ax.set_title(title)
    return figure


def _draw(ax: Axes, grid: pd.DataFrame, top: float, signed: bool = True):
    ax.set_facecolor("#dddddd")  # cells that were not swept
    return ax.imshow(
        np.ma.masked_invalid(grid.to_numpy(dtype=float)),
        aspect="auto",
        origin="lower",
        cmap="RdBu_r" if signed else "Blues",
        vmin=-top if signed else 0.0,
        vmax=top,
    )


def _layer_axis(ax: Axes, layers: Sequence[int]) -> None:
    step = max(1, round(len(layers) / 10))
    ax.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    ax.set_ylabel("layer")
