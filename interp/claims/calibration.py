"""Is a localiser calibrated: does its reading follow what was planted?"""

from __future__ import annotations

import numpy as np
import pandas as pd
from scipy import stats

LEAST = 0.25  # the slope's interval must lie above it


def calibrate(readings: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """One row per localiser: a line of reading on planted share for every seed, and t intervals of its slope and intercept
    over seeds.

    readings: columns localiser, kind, seed, share, reading. Columns: localiser, kind, n (seeds), slope, slope_low, slope_high,
    intercept, intercept_low, intercept_high, inner_slope, inner_low, inner_high (without the shares 0 and 1, where a reading of
    what has changed is forced; nan for fewer than 3 others), monotone (mean reading rises with every share), calibrated
    (monotone, and slope_low above .25), why (what is missing). ValueError for fewer than 2 seeds or 3 shares."""
    seeds, shares = readings["seed"].nunique(), np.sort(readings["share"].unique())
    if seeds < 2 or len(shares) < 3:
        raise ValueError(
            f"{seeds} seeds and {len(shares)} shares are not allowed; allowed: 2 seeds or more and 3 shares or more"
        )
    rows = []
    for (name, kind), part in readings.groupby(["localiser", "kind"], sort=False):  # type: ignore[misc]
        center, half = _over_seeds(part, confidence)
        within = part[(part["share"] > 0) & (part["share"] < 1)]
        some = within["share"].nunique() >= 3
        inner, around = _over_seeds(within, confidence) if some else (np.full(2, np.nan), np.full(2, np.nan))
        monotone = bool((np.diff(part.groupby("share")["reading"].mean().to_numpy()) > 0).all())
        steep = bool(center[0] - half[0] > LEAST)
        missing = [*([] if monotone else ["not monotone"]), *([] if steep else [f"slope not above {LEAST}"])]
        rows.append({
            "localiser": name, "kind": kind, "n": part["seed"].nunique(),
            "slope": center[0], "slope_low": center[0] - half[0], "slope_high": center[0] + half[0],
            "intercept": center[1], "intercept_low": center[1] - half[1], "intercept_high": center[1] + half[1],
            "inner_slope": inner[0], "inner_low": inner[0] - around[0], "inner_high": inner[0] + around[0],
            "monotone": monotone, "calibrated": not missing, "why": ", ".join(missing),
        })  # fmt: skip
    return pd.DataFrame(rows)


def _over_seeds(part: pd.DataFrame, confidence: float) -> tuple[np.ndarray, np.ndarray]:
    """Slope and intercept of each seed's line: their means and the half widths of their t intervals."""
    lines = np.array([np.polyfit(one["share"], one["reading"], 1) for _, one in part.groupby("seed")])
    half = stats.t.ppf((1 + confidence) / 2, len(lines) - 1) * lines.std(0, ddof=1) / np.sqrt(len(lines))
    return lines.mean(0), half
