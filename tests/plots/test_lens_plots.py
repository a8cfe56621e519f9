"""Lens and attribution figures: units on the axes, the identity line, what is worse is marked."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from interp.plots.lens import estimate_scatter, lens_comparison
from interp.plots.style import PlotError


@pytest.fixture
def lenses():
    rows = [
        {"layer": layer, "name": "resid_pre", "lens": lens, "kl_to_final": kl, "cross_entropy": kl + 1, "bias": kl / 2,
         "worse": lens == "tuned" and layer == 1}
        for layer in (1, 0) for lens, kl in (("logit", 3.0 - layer), ("tuned", 1.0 + layer))
    ]  # fmt: skip
    return pd.DataFrame(rows)


@pytest.fixture
def estimates():
    table = pd.DataFrame({
        "site": ["z"] * 3 + ["ffn_out"] * 2, "layer": [0, 1, 1, 0, 1], "estimate": [1.0, 2.0, -1.0, 0.5, 9.0],
        "exact": [1.5, 2.0, -2.0, 0.5, math.nan],
    })  # fmt: skip
    table.attrs = {"metric": "logit_difference", "unit": "logits", "verdict": "ranking only"}
    return table


def test_plain_and_tuned_lie_beside_each_other_in_nats(lenses):
    figure = lens_comparison(lenses)
    labels = [ax.get_ylabel() for ax in figure.axes]
    assert all("nats" in label for label in labels)
    assert [label.split()[0].strip(",") for label in labels] == ["KL", "cross-entropy", "bias"]
    plain, tuned, cross = figure.axes[0].lines
    assert plain.get_xydata().tolist() == [[0, 3], [1, 2]] and tuned.get_xydata().tolist() == [[0, 1], [1, 2]]
    assert cross.get_marker() == "x" and cross.get_xydata().tolist() == [[1, 2]] and "worse" in cross.get_label()
    assert plain.get_linestyle() != tuned.get_linestyle() and len(figure.axes[1].lines) == 2
    assert [text.get_text() for text in figure.legends[0].get_texts()][:2] == ["logit lens", "tuned lens"]
    assert figure.axes[0].get_xlabel() == "layer read" and figure.axes[0].get_ylim()[0] == 0


def test_estimates_are_held_against_exact_effects_on_one_scale(estimates):
    figure = estimate_scatter(estimates, title="toy")
    left, right = figure.axes
    assert left.get_xlim() == left.get_ylim() == right.get_xlim() and left.get_title() == "z"
    identity, *points = left.lines[:3]
    assert all(x == y for x, y in identity.get_xydata().tolist()) and identity.get_label() == "estimate = exact"
    assert [one.get_xydata().tolist() for one in points] == [[[1.5, 1.0]], [[2.0, 2.0], [-2.0, -1.0]]]
    assert left.get_xlabel() == "exact change of logit difference (logits)"
    assert left.get_ylabel() == "estimated change of logit difference (logits)"
    assert "n = 1" in right.texts[0].get_text(), "what was not validated is not shown"
    assert figure.get_suptitle() == "toy – verdict: ranking only"
    assert "(nats)" in estimate_scatter(estimates, unit="nats").axes[0].get_xlabel()


def test_bad_tables_are_refused(lenses, estimates):
    with pytest.raises(PlotError, match="bias"):
        lens_comparison(lenses.drop(columns="bias"))
    with pytest.raises(PlotError, match="check > 0"):
        estimate_scatter(estimates.iloc[4:])
    with pytest.raises(PlotError, match="exact"):
        estimate_scatter(estimates.drop(columns="exact"))
