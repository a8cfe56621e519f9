"""FFN memories and probes over depth; tables come in, nothing is computed but quantiles and percentages."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from interp.plots.style import COLOURS, need, new_figure

NULLS = {"null_mean": ("permuted pairs, mean", "--"), "frequency_null": ("draws of ordinary continuations", ":")}
GREY = "#6b7280"


def agreement_curves(table: pd.DataFrame, title: str = "") -> Figure:
    """Key-value agreement over depth beside both nulls, a panel per sign; table of `memory_agreement`.

    Dots are filled where p < .05 after Bonferroni over the table's rows. Above 10,000 permutations the 99.9th percentile of the
    null is drawn too.
    """
    need(table, ["layer", "sign", "agreement", "null_mean", "p", "frequency_null", "n"])
    signs = sorted(set(table["sign"]), reverse=True)
    figure, axes = new_figure(len(signs), 3.9, 3.1, sharey=True)
    for ax, sign, colour in zip(axes, signs, COLOURS, strict=False):
        rows = table[table["sign"] == sign].sort_values("layer")
        ax.plot(
            rows["layer"], 100 * rows["agreement"], color=colour, label="next token of strongest trigger = top of value"
        )
        clear = rows["p"] * len(table) < 0.05
        for some, face in ((rows[clear], colour), (rows[~clear], "white")):
            ax.plot(some["layer"], 100 * some["agreement"], "o", color=colour, markerfacecolor=face, markersize=4)
        for column, (label, line) in NULLS.items():
            ax.plot(rows["layer"], 100 * rows[column], line, color=GREY, label=label)
        if "null_999" in rows and rows["null_999"].notna().any():
            ax.plot(
                rows["layer"], 100 * rows["null_999"], "-.", color=GREY, linewidth=0.8, label="permuted pairs, 99.9%"
            )
        keys = f"{rows['n'].min():,}" if rows["n"].nunique() == 1 else f"{rows['n'].min():,}–{rows['n'].max():,}"
        ax.set(title=f"coefficient {'+' if sign > 0 else '−'}, {keys} keys", xlabel="layer")
    axes[0].set(ylabel="keys that agree with their value (%)")
    return _finish(figure, axes, title)


def subupdate_curves(table: pd.DataFrame, title: str = "") -> Figure:
    """What the dominant memories write, over depth: median and middle half of the examples; table of `subupdate_shares`."""
    need(table, ["layer", "k", "of_memories", "size_share", "output_share", "composed"])
    figure, (left, right) = new_figure(2, 3.9, 3.1)
    for colour, (column, label) in zip(
        COLOURS, (("size_share", "of all sizes |m|·‖v‖"), ("output_share", "of the output, projected")), strict=False
    ):
        by_layer = (100 * table[column]).groupby(table["layer"])
        low, middle, high = (by_layer.quantile(q) for q in (0.25, 0.5, 0.75))
        left.plot(middle.index, middle, ".-", color=colour, markersize=5, label=f"{label}, median")
        left.fill_between(middle.index, low, high, color=colour, alpha=0.2, linewidth=0)
    share = 100 * float(table["of_memories"].iloc[0])
    left.axhline(share, color=GREY, linestyle=":", label=f"{table['k'].iloc[0]} memories of all ({share:.2f}%)")
    left.set(xlabel="layer", ylabel="dominant sub-updates' share (%)")
    left.set_ylim(bottom=min(0, left.get_ylim()[0]))
    composed = 100 * table["composed"].astype(float).groupby(table["layer"]).mean()
    right.plot(
        composed.index,
        composed,
        ".-",
        color=COLOURS[2],
        markersize=5,
        label="top token is no single memory's",
    )
    right.set(xlabel="layer", ylabel="composed FFN outputs (%)", ylim=(0, 102))
    return _finish(figure, [left, right], title)


def probe_curves(table: pd.DataFrame, title: str = "") -> Figure:
    """A probe's score, its control's and the majority's over depth, and the selectivity; table of `probe`, sites with layers."""
    need(table, ["site", "layer", "measure", "accuracy", "control_accuracy", "selectivity", "majority"])
    known = table[table["layer"].notna()]
    need(known, ["layer"])
    figure, (left, right) = new_figure(2, 3.9, 3.1)
    names = known["site"].str.split(".").str[-1]
    several, unit = names.nunique() > 1, known["measure"].iloc[0]
    factor, shown = (100, "accuracy on the test part (%)") if unit == "accuracy" else (1, "R² on the test part")
    baseline = "most frequent label" if unit == "accuracy" else "mean of the training part"
    for colour, (name, rows) in zip(COLOURS, known.groupby(names, sort=False), strict=False):
        rows, of = rows.sort_values("layer"), f", {name}" if several else ""
        left.plot(rows["layer"], factor * rows["accuracy"], ".-", color=colour, markersize=5, label=f"probe{of}")
        left.plot(
            rows["layer"],
            factor * rows["control_accuracy"],
            "x--",
            color=colour,
            markersize=4,
            label=f"control labels{of}",
        )
        right.plot(
            rows["layer"], factor * rows["selectivity"], ".-", color=colour, markersize=5, label=f"selectivity{of}"
        )
        left.plot(
            rows["layer"],
            factor * rows["majority"],
            ":",
            color=GREY,
            label=baseline,
        )
    left.set(xlabel="layer", ylabel=shown)
    right.axhline(0, color=GREY, linewidth=0.8)
    right.set(xlabel="layer", ylabel=f"probe − control ({'points' if factor == 100 else 'R²'})")
    return _finish(figure, [left, right], title)


def _finish(figure: Figure, axes: list[Axes], title: str) -> Figure:
    """Whole layers on the axes, one legend for all panels, the title."""
    found = {}
    for ax in axes:
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            found.setdefault(label, handle)
    figure.legend(found.values(), found.keys(), loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title)
    return figure
