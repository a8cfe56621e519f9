"""Grokking seen through its progress measures (Nanda et al. 2023, figure 7), and the Fourier spectrum of the embedding."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from interp.plots.style import COLOURS, PlotError, need, new_figure

# measure, split -> name, line style. Restricted over all inputs, excluded over those seen, as in the paper.
LOSSES = {
    ("loss", "train"): ("train loss", "-"),
    ("loss", "held_out"): ("test loss", "-"),
    ("restricted_loss", "all"): ("restricted loss (all inputs)", "--"),
    ("excluded_loss", "train"): ("excluded loss (train)", "--"),
}
SMALLEST = 1e-9  # nats; float32 logits hold no smaller loss, and a log axis has no 0


def progress_curves(table: pd.DataFrame, title: str = "") -> Figure:
    """Train, test, restricted and excluded loss against the training step, on a log axis in nats.

    table: `progress_measures` along a training (columns step, measure, frequency, split, value). Losses below 1e-9 nats are
    drawn there. Raises PlotError.
    """
    need(table, ["step", "measure", "frequency", "split", "value"])
    shown = table[table["frequency"].isna()]
    figure, [ax] = new_figure(1, 6.4, 3.6)
    found = 0
    for colour, ((measure, split), (name, style)) in zip(COLOURS, LOSSES.items(), strict=False):
        rows = shown[(shown["measure"] == measure) & (shown["split"] == split)].sort_values("step")
        found += len(rows)
        if len(rows):
            ax.plot(
                rows["step"],
                rows["value"].clip(lower=SMALLEST),
                style,
                color=colour,
                label=name,
                marker=".",
                markersize=4,
            )
    if not found:
        raise PlotError(f"the table has none of the losses shown: {', '.join(map(str, LOSSES))} (measure, split)")
    ax.set(xlabel="training step", ylabel="loss (nats per input)", yscale="log")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title)
    return figure


def fourier_power(table: pd.DataFrame, title: str = "") -> Figure:
    """Each frequency's share of the power of W_E, and of the logits' cos and sin w(a+b); key frequencies stand out.

    table: of `key_frequencies`, of one model. Raises PlotError.
    """
    need(table, ["frequency", "embedding_share", "logit_share", "key"])
    if table["frequency"].duplicated().any():
        raise PlotError("the table has several rows of one frequency; allowed: the key_frequencies of one model")
    figure, axes = new_figure(2, 3.6, 2.8)
    for ax, column, name in zip(axes, ("embedding_share", "logit_share"), ("embedding", "logits"), strict=True):
        _spectrum(ax, table, column)
        ax.set(xlabel="frequency (cycles over the p numbers)", ylabel="share of power (%)", title=name, ylim=(0, None))
    handles, names = axes[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title)
    return figure


def _spectrum(ax: Axes, table: pd.DataFrame, column: str) -> None:
    key = table["key"].astype(bool)
    for rows, colour, name in ((table[key], COLOURS[1], "key frequency"), (table[~key], COLOURS[0], "other frequency")):
        if len(rows):
            ax.bar(rows["frequency"], 100 * rows[column], color=colour, label=name, width=0.8)
    ax.axhline(100 / len(table), color="0.4", linewidth=0.8, linestyle=":", label="uniform")
