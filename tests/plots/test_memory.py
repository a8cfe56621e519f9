"""Figures of FFN memories and probes show the tables' numbers, with units, one legend and both nulls."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_rgba

from interp.plots.memory import agreement_curves, probe_curves, subupdate_curves
from interp.plots.style import PlotError


def agreement(signs=(1, -1), permutations=1000) -> pd.DataFrame:
    rows = [
        {"layer": layer, "sign": sign, "n": 40 + layer, "agreement": 0.01 * layer, "null_mean": 0.002, "frequency_null": 0.003,
         "null_999": 0.008 if permutations >= 10_000 else np.nan, "p": 1e-4 if layer == 3 else 0.5, "permutations": permutations}
        for layer in (2, 0, 3, 1) for sign in signs
    ]  # fmt: skip
    return pd.DataFrame(rows)


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_agreement_is_drawn_in_percent_beside_both_nulls():
    figure = agreement_curves(agreement(), title="tiny")
    plus, minus = figure.axes
    line = plus.lines[0]
    assert list(line.get_xdata()) == [0, 1, 2, 3] and np.allclose(line.get_ydata(), [0, 1, 2, 3])
    assert np.allclose([one.get_ydata()[0] for one in plus.lines[3:5]], [0.2, 0.3]) and len(plus.lines) == 5
    filled = [one for one in plus.lines[1:3] if to_rgba(one.get_markerfacecolor()) != to_rgba("white")]
    assert [list(one.get_xdata()) for one in filled] == [[3]], "filled where p survives Bonferroni"
    assert "40–43" in plus.get_title() and "+" in plus.get_title() and "−" in minus.get_title()
    assert "%" in plus.get_ylabel() and minus.get_xlabel() == "layer" and figure.get_suptitle() == "tiny"
    assert len(legend(figure)) == 3 == len(set(legend(figure)))


def test_the_high_percentile_is_drawn_only_where_it_is_known_and_relu_has_one_panel():
    figure = agreement_curves(agreement((1,), 10_000))
    assert len(figure.axes) == 1 and any("99.9" in label for label in legend(figure))
    assert not any("99.9" in label for label in legend(agreement_curves(agreement())))


def test_shares_are_medians_with_the_middle_half():
    table = pd.DataFrame({
        "layer": np.repeat([0, 1], 4), "k": 10, "of_memories": 0.01, "size_share": [0.1, 0.2, 0.3, 0.4] * 2,
        "output_share": [-0.2, 0.0, 0.4, 0.6] * 2, "composed": [True, False, True, True, False, False, False, True],
    })  # fmt: skip
    left, right = subupdate_curves(table).axes
    assert np.allclose(left.lines[0].get_ydata(), 25) and np.allclose(left.lines[1].get_ydata(), 20)
    assert np.allclose(left.lines[2].get_ydata(), 1.0) and np.allclose(right.lines[0].get_ydata(), [75, 25])
    assert left.get_ylim()[0] <= 0 and "%" in left.get_ylabel() and "%" in right.get_ylabel()


def probes(measure="accuracy") -> pd.DataFrame:
    return pd.DataFrame({
        "site": ["0.resid_post", "1.resid_post", "0.attn_out", "1.attn_out"], "layer": [0, 1, 0, 1], "measure": measure,
        "accuracy": [0.8, 0.9, 0.7, 0.6], "control_accuracy": [0.5, 0.4, 0.5, np.nan], "selectivity": [0.3, 0.5, 0.2, np.nan],
        "majority": 0.55,
    })  # fmt: skip


def test_probes_have_control_and_majority_and_selectivity_beside_them():
    left, right = probe_curves(probes()).axes
    assert np.allclose(left.lines[0].get_ydata(), [80, 90]) and np.allclose(left.lines[1].get_ydata(), [50, 40])
    assert np.allclose(right.lines[0].get_ydata(), [30, 50]) and np.allclose(left.lines[2].get_ydata(), 55)
    assert left.get_ylabel() == "accuracy on the test part (%)" and "points" in right.get_ylabel()
    assert "probe, attn_out" in legend(probe_curves(probes())) and "most frequent label" in legend(
        probe_curves(probes())
    )
    left, right = probe_curves(probes("r2").head(2)).axes
    assert (
        np.allclose(left.lines[0].get_ydata(), [0.8, 0.9]) and "R²" in left.get_ylabel() and "R²" in right.get_ylabel()
    )


@pytest.mark.parametrize(
    ("plot", "table", "message"),
    [
        (agreement_curves, agreement().drop(columns="frequency_null"), "frequency_null"),
        (subupdate_curves, pd.DataFrame({"layer": [0]}), "size_share"),
        (probe_curves, probes().assign(layer=None), "no rows"),
        (agreement_curves, agreement().head(0), "no rows"),
    ],
)
def test_a_table_that_lacks_something_is_refused(plot, table, message):
    with pytest.raises(PlotError, match=message):
        plot(table)
