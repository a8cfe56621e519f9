"""Heat maps of signed effects: colour bar centred at 0, layers upward, token labels on positions."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from interp.plots.style import PlotError, axis_label, clipped, layers_of, need, new_figure, printable, x_ticks

UNIT = "normalised effect\n(share of logit difference)"


def unit_of(table: pd.DataFrame, value: str) -> str:
    """What a colour bar says when nothing else is given: the unit that a sweep's effect table carries, or the column's name."""
    if value != "effect":
        return value.replace("_", " ")
    return str(table.attrs.get("unit", UNIT))


def effect_heatmaps(
    table: pd.DataFrame,
    x: str = "position",
    labels: Sequence[str] | None = None,
    value: str = "effect",
    unit: str | None = None,
    title: str = "",
    y: str | None = None,
    panel: str = "site",
) -> Figure:
    """One panel per site, layer upward, `x` ("position", "role", …) to the right, one shared scale centred at 0.

    table: columns `panel`, `y`, `x`, `value` (one row per cell; several rows are averaged). labels: printed form of each
    x in order, such as the prompt's tokens. y: what goes upward, by default "window" where the table has one, else "layer";
    windows that are cut off at an end of the model are hatched. panel: what tells panels apart, such as "role".
    """
    y = y or layers_of(table)
    need(table, [panel, y, x, value])
    panels = list(dict.fromkeys(table[panel]))
    ticks = list(dict.fromkeys(table[x])) if x == "role" else sorted(set(table[x]))
    if labels is not None and len(labels) != len(ticks):
        raise PlotError(f"{len(labels)} labels for {len(ticks)} values of {x!r}")
    shown = [printable(str(label)) for label in (labels if labels is not None else ticks)]
    rows = sorted(set(table[y]))
    width = max(2.2, 0.34 * len(ticks) + 0.9)
    figure, axes = new_figure(len(panels), width, max(2.9, 0.13 * len(rows) + 1.9), sharey=True)
    top = max(float(table[value].abs().max()), 1e-9)
    for ax, name in zip(axes, panels, strict=True):
        grid = table[table[panel] == name].pivot_table(index=y, columns=x, values=value, aggfunc="mean")
        image = _draw(ax, grid.reindex(index=rows, columns=ticks), top)
        _hatch(ax, rows, clipped(table, y), len(ticks))
        ax.set_title(str(name).replace("_", " ") if panel == "role" else str(name))
        x_ticks(ax, shown)
        ax.set_xlabel(axis_label(table, x))
    _layer_axis(axes[0], rows, axis_label(table, y))
    figure.colorbar(image, ax=axes, label=unit or unit_of(table, value), shrink=0.9, pad=0.02)
    if title:
        figure.suptitle(title)
    return figure


def head_heatmap(
    table: pd.DataFrame,
    value: str = "effect",
    unit: str | None = None,
    title: str = "",
) -> Figure:
    """Layer (or window of layers) × head of one per-head quantity; table: columns layer or window, head, `value`.

    unit: label of the colour bar; by default the effect's, or the column's name. A signed effect's scale is centred at 0, any
    other quantity without negative values starts there.
    """
    y = layers_of(table)
    need(table, [y, "head", value])
    unit = unit or unit_of(table, value)
    grid = table.pivot_table(index=y, columns="head", values=value, aggfunc="mean")
    figure, [ax] = new_figure(1, max(3.2, 0.34 * grid.shape[1] + 1.4), max(2.9, 0.13 * grid.shape[0] + 1.3))
    image = _draw(
        ax, grid, max(float(table[value].abs().max()), 1e-9), signed=value == "effect" or bool((table[value] < 0).any())
    )
    ax.set_xticks(range(grid.shape[1]), [str(head) for head in grid.columns])
    ax.set_xlabel("head")
    _hatch(ax, list(grid.index), clipped(table, y), grid.shape[1])
    _layer_axis(ax, list(grid.index), axis_label(table, y))
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


def _hatch(ax: Axes, rows: Sequence[int], cut: set[int], width: int) -> None:
    """Mark the rows of windows that hold fewer layers than the others."""
    for i, row in enumerate(rows):
        if row in cut:
            ax.add_patch(Rectangle((-0.5, i - 0.5), width, 1, fill=False, hatch="//", edgecolor="#999999", linewidth=0))


def _layer_axis(ax: Axes, layers: Sequence[int], label: str = "layer") -> None:
    step = max(1, round(len(layers) / 10))
    ax.set_yticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
    ax.set_ylabel(label)
