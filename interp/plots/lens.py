"""Lenses over depth, and estimates beside what they estimate."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from interp.plots.style import COLOURS, PlotError, need, new_figure

COMPARED = {
    "kl_to_final": "KL from final distribution\n(nats per token)",
    "cross_entropy": "cross-entropy to next token\n(nats per token)",
    "bias": "bias, KL of the means\n(nats)",
}


def lens_comparison(table: pd.DataFrame, title: str = "") -> Figure:
    """Several lenses over depth, a panel per quantity; table of `TunedLens.compare` (columns layer, name, lens, …).

    Where a lens is worse than the plain one (column worse), its point on the KL panel is a cross.
    """
    need(table, ["layer", "name", "lens", *COMPARED])
    figure, axes = new_figure(len(COMPARED), 3.0, 3.0)
    groups = list(table.groupby(["name", "lens"], sort=False))
    names, lenses = (list(dict.fromkeys(table[column])) for column in ("name", "lens"))
    for ax, (column, label) in zip(axes, COMPARED.items(), strict=True):
        for (name, lens), rows in groups:
            rows, colour = rows.sort_values("layer"), COLOURS[names.index(name) % len(COLOURS)]
            shown = f"{lens} lens, {name}" if len(names) > 1 else f"{lens} lens"
            style = ("--", "-", ":", "-.")[lenses.index(lens) % 4]
            ax.plot(rows["layer"], rows[column], style, color=colour, marker=".", markersize=5, label=shown)
            if column == "kl_to_final" and "worse" in rows.columns and rows["worse"].any():
                bad = rows[rows["worse"].astype(bool)]
                ax.plot(bad["layer"], bad[column], "x", color=colour, markersize=8, label=f"{shown}: worse than plain")
        ax.set(xlabel="layer read", ylabel=label)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        ax.set_ylim(bottom=0)
    handles, shown = axes[0].get_legend_handles_labels()
    figure.legend(handles, shown, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title)
    return figure


def estimate_scatter(table: pd.DataFrame, unit: str | None = None, title: str = "") -> Figure:
    """One panel per site: each validated cell's estimated against its exact effect, with the line on which they are equal.

    table: of `attribution_patch` (columns site, estimate, exact; rows without exact are left out). unit: default that of the
    table's metric. Both axes have one scale, so distance from the line is error.
    """
    need(table, ["site", "estimate", "exact"])
    known = table[table["exact"].notna()]
    if known.empty:
        raise PlotError(
            "no row of the table was validated (exact is missing in all); allowed: a table made with check > 0"
        )
    metric, unit = str(table.attrs.get("metric", "metric")), unit or table.attrs.get("unit") or "the metric's unit"
    name = f"change of {metric.replace('_', ' ')} ({unit})"
    sites = list(dict.fromkeys(known["site"]))
    figure, axes = new_figure(len(sites), 3.0, 3.2, sharex=True, sharey=True)
    values = known[["estimate", "exact"]].to_numpy(dtype=float)
    low, high = float(values.min()), float(values.max())
    edge = 0.06 * (high - low) or 1.0
    for ax, site in zip(axes, sites, strict=True):
        _one_site(ax, known[known["site"] == site], (low - edge, high + edge))
        ax.set(title=str(site), xlabel=f"exact {name}")
    axes[0].set_ylabel(f"estimated {name}")
    axes[0].legend(loc="upper left", fontsize=7)
    verdict = table.attrs.get("verdict")
    if title or verdict:
        figure.suptitle(" – ".join(filter(None, [title, f"verdict: {verdict}" if verdict else ""])))
    return figure


def _one_site(ax: Axes, rows: pd.DataFrame, limits: tuple[float, float]) -> None:
    ax.plot(limits, limits, color="#1c2330", linewidth=0.8, label="estimate = exact")
    layers = rows["layer"] if "layer" in rows.columns and rows["layer"].notna().all() else None
    for i, (layer, some) in enumerate(rows.groupby(layers) if layers is not None else [(None, rows)]):
        label = None if layer is None or layers is None or layers.nunique() > len(COLOURS) else f"layer {layer}"
        colour = COLOURS[i] if label else COLOURS[0]
        ax.plot(some["exact"], some["estimate"], ".", color=colour, markersize=5, alpha=0.7, label=label)
    ax.set(xlim=limits, ylim=limits, aspect="equal")
    ax.axhline(0, color="#bbbbbb", linewidth=0.6, zorder=0)
    ax.axvline(0, color="#bbbbbb", linewidth=0.6, zorder=0)
    r = (
        np.corrcoef(rows["exact"], rows["estimate"])[0, 1]
        if rows["exact"].nunique() > 1 < rows["estimate"].nunique()
        else None
    )
    ax.text(0.97, 0.03, f"n = {len(rows)}" + (f", r = {r:.3f}" if r is not None else ""), ha="right", transform=ax.transAxes,
            fontsize=8)  # fmt: skip
