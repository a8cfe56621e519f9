"""The interval that tables of effects share."""

from __future__ import annotations

import numpy as np
import pandas as pd

from interp.analyses.trace_effects import mean_interval


def test_mean_interval_per_group():
    """Against Student's table: t of 2 and 1 degrees of freedom is 4.302653 and 12.706205; one value has no interval."""
    table = pd.DataFrame({"layer": [0, 0, 0, 1, 1, 2], "ie": [1.0, 2.0, 6.0, 3.0, 5.0, 7.0]})
    found = mean_interval(table.groupby("layer")["ie"], 0.95)
    assert list(found.columns) == ["mean", "low", "high", "n"] and list(found["n"]) == [3, 2, 1]
    half = np.array([4.30265273 * np.sqrt(7 / 3), 12.70620474 * 1.0, np.nan])
    np.testing.assert_allclose(found["low"], np.array([3, 4, 7]) - half, atol=1e-7)
    np.testing.assert_allclose(found["high"], np.array([3, 4, 7]) + half, atol=1e-7)
