"""What the claims' studies found, one figure per study."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from interp.plots.style import COLOURS, need, new_figure


def parameter_shares(table: pd.DataFrame) -> Figure:
    """The FFNs' share of the parameters of each model, as two bars: of all but embeddings, and of all; a line at one half.

    table: columns model, share_blocks, share, and origin where models are to be grouped by it. Raises PlotError."""
    need(table, ["model", "share_blocks", "share"])
    n = len(table)
    figure, (ax,) = new_figure(1, 6.4, 1.2 + 0.26 * n)
    place = np.arange(n)
    for shift, column, colour, label in ((-0.2, "share_blocks", COLOURS[0], "of all but embeddings"),
                                         (0.2, "share", COLOURS[3], "of all")):  # fmt: skip
        ax.barh(place + shift, table[column].to_numpy(dtype=float), 0.38, color=colour, label=label)
    ax.axvline(0.5, color="#1c2330", linewidth=1, linestyle="--", label="one half")
    ax.set_yticks(place, table["model"].tolist())
    ax.set(xlim=(0, 1), ylim=(n - 0.5, -0.5), xlabel="FFNs' share of the parameters")
    if "origin" in table.columns:
        kinds = table["origin"].to_numpy()
        for cut in np.flatnonzero(kinds[1:] != kinds[:-1]):
            if {"published"} & {kinds[cut], kinds[cut + 1]}:
                ax.axhline(cut + 0.5, color="0.7", linewidth=0.8)
    figure.legend(*ax.get_legend_handles_labels(), loc="outside upper center", ncols=3, fontsize=8)
    return figure


def gradient_slopes(table: pd.DataFrame) -> Figure:
    """The last FFN's gradient at initialisation against depth, both axes logarithmic: one panel per setting, one line per place
    of the norm (mean over seeds, points are seeds), and the slopes 0 and -1/2 that the theory gives.

    table: columns seed, setting, arm, depth, quantity, value (rows of the quantity "gradient" are drawn). Raises PlotError."""
    need(table, ["seed", "setting", "arm", "depth", "quantity", "value"])
    rows = table[table["quantity"] == "gradient"]
    settings = list(dict.fromkeys(rows["setting"]))
    figure, axes = new_figure(len(settings), 3.6, 3.2, sharey=True)
    for ax, setting in zip(axes, settings, strict=True):
        for colour, arm, slope in ((COLOURS[1], "post", 0.0), (COLOURS[0], "pre", -0.5)):
            mine = rows[(rows["setting"] == setting) & (rows["arm"] == arm)]
            means = mine.groupby("depth")["value"].mean()
            depths = means.index.to_numpy(dtype=float)
            ax.plot(mine["depth"], mine["value"], ".", color=colour, alpha=0.35, markersize=4)
            ax.plot(depths, means.to_numpy(), "-", color=colour, label=f"{arm}-norm")
            guide = means.iloc[0] * (depths / depths[0]) ** slope
            ax.plot(depths, guide, ":", color=colour, label=f"slope {slope:g}", linewidth=1)
        ax.set(xscale="log", yscale="log", title=setting, xlabel="number of layers")
        ax.set_xticks(np.unique(rows["depth"]), [str(depth) for depth in np.unique(rows["depth"])])
        ax.xaxis.minorticks_off()
    axes[0].set_ylabel("gradient norm of the last FFN's W_out\n(nats per unit of weight)")
    axes[0].legend(fontsize=7)
    return figure


def reached_grid(table: pd.DataFrame) -> Figure:
    """The share of seeds that reached the target: one panel per arm, learning rate against depth, annotated.

    table: columns seed, arm, depth, learning_rate, reached; several warm-ups are averaged. Raises PlotError."""
    need(table, ["seed", "arm", "depth", "learning_rate", "reached"])
    arms = list(dict.fromkeys(table["arm"]))
    figure, axes = new_figure(len(arms), 2.6, 2.6, sharey=True)
    image = None
    for ax, arm in zip(axes, arms, strict=True):
        part = table[table["arm"] == arm].assign(reached=lambda one: one["reached"].astype(float))
        grid = part.pivot_table(index="depth", columns="learning_rate", values="reached", aggfunc="mean")
        image = ax.imshow(grid.to_numpy(), vmin=0, vmax=1, cmap="Blues", aspect="auto")
        for (i, j), value in np.ndenumerate(grid.to_numpy()):
            ax.text(
                j, i, f"{value:.2f}", ha="center", va="center", fontsize=8, color="white" if value > 0.6 else "#1c2330"
            )
        ax.set_xticks(range(grid.shape[1]), [f"{rate:g}" for rate in grid.columns])
        ax.set_yticks(range(grid.shape[0]), [str(depth) for depth in grid.index])
        ax.set(title=arm, xlabel="learning rate")
    axes[0].set_ylabel("number of layers")
    assert image is not None
    figure.colorbar(image, ax=axes, label="share of seeds that reached the target")
    return figure
