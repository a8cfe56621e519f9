"""Calibration: lines and intervals by hand, planted readings of each kind, and the rule's size when nothing is there."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from interp.claims.calibration import calibrate
from interp.plots import calibration_curves

SHARES = np.array([0, 0.25, 0.5, 0.75, 1.0])


def readings(line, noise=0.02, seeds=5, name="x", kind="storage", seed=0):
    rng = np.random.default_rng(seed)
    rows = [(name, kind, s, share, line(share) + rng.normal(0, noise)) for s in range(seeds) for share in SHARES]
    return pd.DataFrame(rows, columns=["localiser", "kind", "seed", "share", "reading"])


def test_slopes_and_intervals_by_hand():
    table = readings(lambda s: 0.3 + 0.6 * s)
    row = calibrate(table).iloc[0]
    slopes = [stats.linregress(part["share"], part["reading"]).slope for _, part in table.groupby("seed")]
    low, high = stats.t.interval(0.95, 4, np.mean(slopes), stats.sem(slopes))
    assert row["slope"] == pytest.approx(np.mean(slopes)) and (row["slope_low"], row["slope_high"]) == pytest.approx(
        (low, high)
    )
    inner = table[table["share"].between(0.1, 0.9)]
    slopes = [stats.linregress(part["share"], part["reading"]).slope for _, part in inner.groupby("seed")]
    assert (
        row["inner_slope"] == pytest.approx(np.mean(slopes))
        and row["inner_low"] < row["inner_slope"] < row["inner_high"]
    )
    assert row["calibrated"] and row["monotone"] and row["n"] == 5 and row["why"] == ""


def test_what_is_not_calibrated_says_why():
    flat = calibrate(readings(lambda s: 0.7 + 0.1 * s, 0.001)).iloc[0]
    assert flat["monotone"] and not flat["calibrated"] and flat["why"] == "slope not above 0.25"
    bent = calibrate(readings(lambda s: abs(s - 0.25), 0.001)).iloc[0]
    assert not bent["monotone"] and not bent["calibrated"] and "not monotone" in bent["why"]
    falling = calibrate(readings(lambda s: 1 - s)).iloc[0]
    assert falling["why"] == "not monotone, slope not above 0.25"
    with pytest.raises(ValueError, match="1 seeds and 5 shares are not allowed"):
        calibrate(readings(lambda s: s, seeds=1))


def test_readings_without_truth_are_not_called_calibrated():
    """400 localisers that read noise: the rule accepts none (a slope above .25 and a rise at every share, by chance)."""
    tables = [readings(lambda s: 0.5, 0.1, name=str(i), seed=i) for i in range(400)]
    assert calibrate(pd.concat(tables))["calibrated"].sum() <= 1


def test_the_figure_marks_what_is_not_calibrated():
    table = pd.concat([readings(lambda s: s), readings(lambda s: 0.5, name="flat", kind="mediation")])
    figure = calibration_curves(table, calibrate(table))
    labels = [text.get_text() for ax in figure.axes for text in ax.get_legend().get_texts()]
    assert "flat (not calibrated)" in labels and "x" in labels
    assert "planted" in figure.axes[0].get_xlabel() and "FFNs' share" in figure.axes[0].get_ylabel()
