"""The interval that tables of effects share."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from interp.analyses.joint_metric import TraceError
from interp.analyses.trace_effects import mean_interval, trace_tests


def test_mean_interval_per_group():
    """Against Student's table: t of 2 and 1 degrees of freedom is 4.302653 and 12.706205; one value has no interval."""
    table = pd.DataFrame({"layer": [0, 0, 0, 1, 1, 2], "ie": [1.0, 2.0, 6.0, 3.0, 5.0, 7.0]})
    found = mean_interval(table.groupby("layer")["ie"], 0.95)
    assert list(found.columns) == ["mean", "low", "high", "n"] and list(found["n"]) == [3, 2, 1]
    half = np.array([4.30265273 * np.sqrt(7 / 3), 12.70620474 * 1.0, np.nan])
    np.testing.assert_allclose(found["low"], np.array([3, 4, 7]) - half, atol=1e-7)
    np.testing.assert_allclose(found["high"], np.array([3, 4, 7]) + half, atol=1e-7)


def _table(effects):
    rows = [{"corruption": "noise", "metric": "logit_difference", "site": "ffn_out", "severed": "", "layer": layer,
             "role": "last", "fact": fact, "corrupted": 1.0, "value": 1.0 + value}
            for layer, values in effects.items() for fact, value in enumerate(values)]  # fmt: skip
    return pd.DataFrame(rows)


def test_cells_are_corrected_for_the_whole_map():
    rng = np.random.default_rng(0)
    effects = {layer: rng.normal(0, 1, 12) for layer in range(20)} | {20: rng.normal(4, 1, 12)}
    found = trace_tests(_table(effects)).set_index("layer")
    alone = trace_tests(_table({20: effects[20]}))
    assert found.loc[20, "p"] <= 0.01 and (found.drop(20)["p"] > 0.05).all()
    assert found.loc[20, "aie"] == pytest.approx(effects[20].mean())
    assert alone["p"].iloc[0] == pytest.approx(2 / 2**12)  # every sign the same: the least that 12 facts allow
    assert list(found["n"].unique()) == [12]


def test_cells_that_a_fact_lacks_are_left_out_and_counted():
    table = _table({0: [1.0, 2.0, 3.0], 1: [1.0, 2.0, 3.0]})
    found = trace_tests(table[~((table["layer"] == 1) & (table["fact"] == 2))])
    assert list(found["layer"]) == [0] and list(found["left_out"]) == [1]
    with pytest.raises(TraceError, match="no cell of the map"):
        trace_tests(table[(table["layer"] == 0) == (table["fact"] == 0)])
