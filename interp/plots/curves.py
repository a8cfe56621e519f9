"""Curves over training steps and over layers."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from interp.plots.style import COLOURS, need, new_figure

LENS_PANELS = {
    "probability": "probability of the answer",
    "rank": "rank of the answer (0 = top)",
    "kl_to_final": "KL from the final distribution (nats)",
}


def training_curves(curves: pd.DataFrame, title: str = "") -> Figure:
    """Loss of the last batch and accuracy per split against the step; columns step, split, loss, accuracy."""
    return run_curves(curves.assign(run="run"), title)


def run_curves(curves: pd.DataFrame, title: str = "") -> Figure:
    """The training curves of several runs: a thin line each and their median; columns run, step, split, loss, accuracy."""
    need(curves, ["run", "step", "split", "loss", "accuracy"])
    figure, (left, right) = new_figure(2, 3.6, 2.7)
    single = curves["run"].nunique() == 1
    _lines(left, curves.drop_duplicates(["run", "step"]), "loss", COLOURS[0], "", single)
    left.set(xlabel="training step", ylabel="loss of the batch (nats)", yscale="log")
    shown = curves.assign(percent=100 * curves["accuracy"])
    for colour, (split, rows) in zip(COLOURS, shown.groupby("split", sort=False), strict=False):
        _lines(right, rows, "percent", colour, str(split).replace("_", " "), single)
    right.set(xlabel="training step", ylabel="accuracy (% of asked tokens)", ylim=(0, 102))
    handles, names = right.get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title)
    return figure


def _lines(ax: Axes, rows: pd.DataFrame, column: str, colour: str, label: str, single: bool) -> None:
    dots = "." if rows["step"].nunique() < 20 else ""  # a single evaluation is a point, not an invisible line
    if not single:
        for _, one in rows.groupby("run"):
            ax.plot(one["step"], one[column], color=colour, alpha=0.35, linewidth=0.8)
        label = f"{label}, median of {rows['run'].nunique()} runs" if label else ""
    middle = rows.groupby("step")[column].median()
    ax.plot(middle.index, middle, color=colour, linewidth=1.5 if single else 2.2, marker=dots, label=label)


def lens_curves(table: pd.DataFrame, title: str = "") -> Figure:
    """A logit lens over depth: mean and middle half of the examples; table of `logit_lens` on resid_post (or resid_pre)."""
    need(table, ["layer", "name", *LENS_PANELS])
    figure, axes = new_figure(3, 3.1, 3.0)
    for ax, (column, label) in zip(axes, LENS_PANELS.items(), strict=True):
        for colour, (name, rows) in zip(COLOURS, table.groupby("name", sort=False), strict=False):
            by_layer = rows.groupby("layer")[column]
            mean, low, high = by_layer.mean(), by_layer.quantile(0.25), by_layer.quantile(0.75)
            ax.plot(mean.index, mean, color=colour, label=f"{name}, mean", marker=".", markersize=4)
            ax.fill_between(mean.index, low, high, color=colour, alpha=0.2, linewidth=0, label="middle half of prompts")
        ax.set(xlabel="after layer", ylabel=label)
        ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes[1].set_yscale("symlog", linthresh=1)
    axes[1].set_ylim(bottom=0)
    axes[0].set_ylim(0, 1)
    axes[2].set_ylim(bottom=0)
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title)
    return figure
