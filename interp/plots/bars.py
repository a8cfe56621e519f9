"""Effects along one axis as bars, and how many entries have which effect."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from interp.plots.heatmap import unit_of
from interp.plots.style import COLOURS, PlotError, axis_label, clipped, need, new_figure, printable, x_ticks


def effect_bars(
    table: pd.DataFrame,
    x: str = "layer",
    labels: Sequence[str] | None = None,
    value: str = "effect",
    unit: str | None = None,
    title: str = "",
) -> Figure:
    """One panel per site, one bar per `x`, one shared scale; windows that are cut off at an end of the model are hatched.

    table: columns site, `x`, `value` (several rows are averaged). labels: printed form of each x in order.
    """
    need(table, ["site", x, value])
    sites, ticks = list(dict.fromkeys(table["site"])), list(dict.fromkeys(table[x]))
    if labels is not None and len(labels) != len(ticks):
        raise PlotError(f"{len(labels)} labels for {len(ticks)} values of {x!r}")
    shown = [printable(str(label)) for label in (labels if labels is not None else ticks)]
    cut = clipped(table, x)
    figure, axes = new_figure(len(sites), max(2.4, 0.26 * len(ticks) + 1.0), 2.9, sharey=True)
    for ax, site in zip(axes, sites, strict=True):
        means = table[table["site"] == site].groupby(x, sort=False)[value].mean().reindex(ticks)
        bars = ax.bar(range(len(ticks)), means.to_numpy(dtype=float), color=COLOURS[0], width=0.8)
        for bar, tick in zip(bars, ticks, strict=True):
            bar.set(hatch="////" if tick in cut else None, edgecolor="white", linewidth=0)
        ax.axhline(0, color="#1c2330", linewidth=0.8)
        ax.set_title(str(site))
        x_ticks(ax, shown)
        ax.set_xlabel(axis_label(table, x))
    axes[0].set_ylabel(unit or unit_of(table, value))
    if title:
        figure.suptitle(title)
    return figure


def effect_histogram(table: pd.DataFrame, value: str = "effect", unit: str | None = None, title: str = "") -> Figure:
    """One panel per site: how many rows have which `value`, on a logarithmic scale of counts; table: columns site, `value`."""
    need(table, ["site", value])
    sites = list(dict.fromkeys(table["site"]))
    figure, axes = new_figure(len(sites), 3.6, 2.8, sharey=True, sharex=True)
    top = max(float(table[value].abs().max()), 1e-9)
    for ax, site in zip(axes, sites, strict=True):
        rows = table.loc[table["site"] == site, value]
        ax.hist(
            rows.to_numpy(dtype=float), bins=np.linspace(-top, top, 42).tolist(), color=COLOURS[0]
        )  # 0 is a bin's middle
        ax.set(title=str(site), xlabel=unit or unit_of(table, value), yscale="log")
    axes[0].set_ylabel("number of entries")
    if title:
        figure.suptitle(title)
    return figure
