"""What the stream holds at which depth, which heads compose, and where cross-attention looks."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from interp.plots.style import COLOURS, need, new_figure


def variance_curves(table: pd.DataFrame, title: str = "") -> Figure:
    """Share of the stream's variance that the current and the next token explain, by depth: thin lines are seeds, thick their
    mean.

    table: columns site, place, state, seed, current, next (held-out R²); one panel per state."""
    need(table, ["site", "place", "state", "seed", "current", "next"])
    states = list(dict.fromkeys(table["state"]))
    figure, axes = new_figure(len(states), 4.4, 3.4, sharey=True)
    for ax, state in zip(axes, states, strict=True):
        mine = table[table["state"] == state]
        for name, colour in (("current", COLOURS[0]), ("next", COLOURS[1])):
            for _, rows in mine.groupby("seed"):
                ax.plot(rows["place"], rows[name], color=colour, lw=0.6, alpha=0.35)
            mean = mine.groupby("place")[name].mean()
            ax.plot(mean.index, mean, color=colour, lw=2, marker="o", ms=3, label=f"{name} token")
        sites = mine.drop_duplicates("place").sort_values("place")
        ax.set_xticks(sites["place"], sites["site"], rotation=60, ha="right", fontsize=7)
        ax.set_xlabel("place in the stream")
        ax.set_title(str(state))
    axes[0].set_ylabel("share of variance explained (held-out R²)")
    axes[0].legend(fontsize=8)
    if title:
        figure.suptitle(title)
    return figure


def composition_ranks(table: pd.DataFrame, title: str = "") -> Figure:
    """Every pair's K-composition per seed; filled dots join a head that looks at the previous token to an induction head.

    table: columns seed, score, previous, induction (attention of the pair's two heads, at least .3 counts)."""
    need(table, ["seed", "score", "previous", "induction"])
    figure, (ax,) = new_figure(1, 6.0, 3.4)
    right = (table["previous"] >= 0.3) & (table["induction"] >= 0.3)
    seeds = {seed: i for i, seed in enumerate(sorted(table["seed"].unique()))}
    x = table["seed"].map(seeds)
    ax.scatter(
        x[~right], table["score"][~right], s=14, facecolors="none", edgecolors="#999", label="other pairs of heads"
    )
    ax.scatter(x[right], table["score"][right], s=18, color=COLOURS[1], label="previous-token head → induction head")
    ax.set_xticks(list(seeds.values()), [str(seed) for seed in seeds])
    ax.set(xlabel="seed", ylabel="K-composition (0 … 1)")
    ax.legend(fontsize=8)
    if title:
        ax.set_title(title)
    return figure


def alignment_bars(layers: pd.DataFrame, title: str = "") -> Figure:
    """Cross-attention on the true source position per task and layer: bars are means, dots seeds, short lines the permuted null.

    layers: columns task, seed, layer, mass, permuted."""
    need(layers, ["task", "seed", "layer", "mass", "permuted"])
    figure, (ax,) = new_figure(1, 5.6, 3.4)
    groups = list(layers.groupby(["task", "layer"], sort=False))
    for i, ((_, layer), rows) in enumerate(groups):
        colour = COLOURS[int(layer) % len(COLOURS)]  # type: ignore[arg-type]
        ax.bar(i, rows["mass"].mean(), color=colour, alpha=0.55, width=0.7)
        ax.scatter(np.full(len(rows), i), rows["mass"], s=8, color=colour)
        ax.hlines(rows["permuted"].mean(), i - 0.35, i + 0.35, color="#333", lw=1)
    ax.set_xticks(range(len(groups)), [f"{task}\nlayer {layer}" for (task, layer), _ in groups], fontsize=8)
    ax.set(ylim=(0, 1), ylabel="attention on the true source position")
    ax.axhline(0.8, ls="--", color="#777", lw=0.8)
    ax.set_title(title or "dots: seeds; black: the same positions in another order; dashed: the rule's .8", fontsize=8)
    return figure
