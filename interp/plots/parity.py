"""How far two libraries' numbers lie apart, site by site, on a logarithmic scale."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from interp.plots.style import need, new_figure


def parity_map(table: pd.DataFrame, title: str = "") -> Figure:
    """Sites downward, cases to the right, colour = power of ten of the largest relative difference; grey = not shared.

    table: columns site, case, relative (one row per cell; the largest of several is shown).
    """
    need(table, ["site", "case", "relative"])
    sites, cases = (list(dict.fromkeys(table[name])) for name in ("site", "case"))
    grid = table.pivot_table(index="site", columns="case", values="relative", aggfunc="max")
    shown = np.log10(np.maximum(grid.reindex(index=sites, columns=cases).to_numpy(dtype=float), 1e-17))
    width, height = max(3.4, 0.5 * len(cases) + 2.2), max(2.4, 0.19 * len(sites) + 1.6)
    figure, [ax] = new_figure(1, width, height)
    ax.set_facecolor("#dddddd")
    image = ax.imshow(np.ma.masked_invalid(shown), aspect="auto", cmap="viridis", vmin=-17, vmax=-3)
    ax.set_xticks(range(len(cases)), cases, rotation=50, ha="right", rotation_mode="anchor")
    ax.set_yticks(range(len(sites)), sites)
    ax.set(xlabel="family and floating-point type", ylabel="site")
    figure.colorbar(image, ax=ax, label="log10 of largest difference / largest value", shrink=0.9)
    if title:
        ax.set_title(title)
    return figure
