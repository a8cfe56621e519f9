"""Curves over training steps and over layers."""

from __future__ import annotations

import pandas as pd
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
    need(curves, ["step", "split", "loss", "accuracy"])
    figure, (left, right) = new_figure(2, 3.6, 2.7)
    loss = curves.drop_duplicates("step")
    dots = "." if len(loss) < 20 else ""  # a single evaluation is a point, not an invisible line
    left.plot(loss["step"], loss["loss"], color=COLOURS[0], marker=dots)
    left.set(xlabel="training step", ylabel="loss of the batch (nats)", yscale="log")
    for colour, (split, rows) in zip(COLOURS, curves.groupby("split", sort=False), strict=False):
        right.plot(rows["step"], 100 * rows["accuracy"], color=colour, marker=dots, label=str(split).replace("_", " "))
    right.set(xlabel="training step", ylabel="accuracy (% of asked tokens)", ylim=(0, 102))
    right.legend(frameon=False)
    if title:
        figure.suptitle(title)
    return figure


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
