"""How a change of facts is shared between FFNs and attention, and how fast models with and without FFNs learn facts."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from interp.plots.style import need, new_figure

COLOURS = {"adamw": "#1f5fa8", "sgd": "#c2571a"}
NAMES = {"adamw": "AdamW", "sgd": "SGD, momentum 0.9"}


def allocation_curve(table: pd.DataFrame, title: str = "") -> Figure:
    """The FFNs' share of a change of facts against their share of parameters, a dot per seed, means joined, one panel.

    table: columns rho, phi, seed, optimizer (`allocation` of the claims). The dashed diagonal is storage in proportion to
    size."""
    need(table, ["rho", "phi", "seed", "optimizer"])
    figure, (ax,) = new_figure(1, 5.2, 4.4)
    ax.plot([0, 1], [0, 1], "--", color="#777", lw=1, label="in proportion to size")
    for name, rows in table.groupby("optimizer"):
        colour = COLOURS.get(str(name), "#444")
        mean = rows.groupby("rho")["phi"].mean()
        ax.scatter(rows["rho"], rows["phi"], s=9, alpha=0.4, color=colour, linewidths=0)
        ax.plot(mean.index, mean, "-o", ms=4, color=colour, label=f"fine-tuned by {NAMES.get(str(name), name)}")
    ax.set(xlim=(0, 1), ylim=(0, 1), xlabel="FFNs' share of the blocks' parameters",
           ylabel="FFNs' share of the change (logit difference)")  # fmt: skip
    ax.set_title(
        title or f"Into which weights is a change of facts written? ({table['seed'].nunique()} seeds)", fontsize=10
    )
    ax.legend(frameon=False, fontsize=8, loc="upper left")
    ax.set_aspect("equal")
    return figure


def twin_curves(table: pd.DataFrame, title: str = "") -> Figure:
    """Recall against exposures, a panel per split: mean over seeds and range, per architecture.

    table: columns arm, seed, exposures, split, accuracy."""
    need(table, ["arm", "seed", "exposures", "split", "accuracy"])
    splits = list(dict.fromkeys(table["split"]))
    figure, axes = new_figure(len(splits), 4.2, 3.6)
    colours = dict(zip(dict.fromkeys(table["arm"]), ["#1f5fa8", "#c2571a", "#5a8f3c", "#7b4aa0"], strict=False))
    for ax, split in zip(axes, splits, strict=True):
        for arm, colour in colours.items():
            rows = table[(table["arm"] == arm) & (table["split"] == split)]
            by = rows.groupby("exposures")["accuracy"]
            ax.plot(by.mean().index, 100 * by.mean(), "-o", ms=3, color=colour, label=str(arm))
            ax.fill_between(np.asarray(by.mean().index), 100 * by.min(), 100 * by.max(), color=colour, alpha=0.15, lw=0)
        ax.set(xlabel="exposures of each fact", ylabel="recall (% of prompts)", ylim=(0, 102))
        ax.set_title(str(split).replace("_", " "), fontsize=10)
    axes[0].legend(frameon=False, fontsize=8, loc="lower right")
    figure.suptitle(
        title or f"Equal parameters and depth ({table['seed'].nunique()} seeds; band: all of them)", fontsize=10
    )
    return figure
