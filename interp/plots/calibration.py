"""What localisers read against what was planted."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from interp.plots.style import COLOURS, need, new_figure

LOW, HIGH = -0.6, 1.6  # a share of two effects that nearly cancel has no bounds


def calibration_curves(readings: pd.DataFrame, fits: pd.DataFrame) -> Figure:
    """Storage and mediation side by side: each localiser's reading of every seed (points), its fitted line, and the diagonal
    that a perfect one would follow; dashed where it is not calibrated.

    readings: columns localiser, kind, seed, share, reading. fits: of `calibrate`. Raises PlotError.
    """
    need(readings, ["localiser", "kind", "seed", "share", "reading"])
    need(fits, ["localiser", "kind", "slope", "intercept", "calibrated"])
    kinds = [kind for kind in ("storage", "mediation") if kind in set(fits["kind"])]
    figure, axes = new_figure(len(kinds), 4.2, 3.9, sharey=True)
    ends = np.array([0.0, 1.0])
    for ax, kind in zip(axes, kinds, strict=True):
        ax.plot(ends, ends, color="0.7", linewidth=1, label="planted = read")
        for colour, row in zip(COLOURS, fits[fits["kind"] == kind].to_dict("records"), strict=False):
            mine = readings[readings["localiser"] == row["localiser"]]
            ax.plot(mine["share"], mine["reading"], ".", color=colour, alpha=0.6, markersize=5)
            name = row["localiser"] if row["calibrated"] else f"{row['localiser']} (not calibrated)"
            ax.plot(
                ends,
                row["intercept"] + row["slope"] * ends,
                "-" if row["calibrated"] else "--",
                color=colour,
                label=name,
            )
        outside = int(((readings["reading"] < LOW) | (readings["reading"] > HIGH))[readings["kind"] == kind].sum())
        title = kind if not outside else f"{kind} ({outside} reading(s) outside the frame)"
        ax.set(
            title=title,
            xlabel="share of facts planted in FFNs",
            xticks=np.sort(readings["share"].unique()),
            ylim=(LOW, HIGH),
        )
        ax.legend(fontsize=7, loc="best")
    axes[0].set_ylabel("FFNs' share as read (share of FFN + attention)")
    return figure
