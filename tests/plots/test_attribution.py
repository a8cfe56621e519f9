"""Figures of attribution, head scores and composition: what each cell and label shows."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from interp.plots.attribution import (
    attribution_bars,
    attribution_heatmap,
    composition_heatmap,
    head_score_heatmaps,
)
from interp.plots.style import PlotError


@pytest.fixture
def attribution():
    parts = [
        ("embed", None),
        *((f"{l}.{p}", l) for l in range(2) for p in ("head10", "head2", "b_O", "ffn")),
        ("b_U", None),
    ]
    rows = [
        {"example": e, "component": name, "layer": layer, "attribution": i + e - 3.5}
        for e in range(2)
        for i, (name, layer) in enumerate(parts)
    ]
    return pd.DataFrame(rows).astype({"layer": "Int64"})


def test_parts_stand_in_the_order_of_a_block_and_examples_are_averaged(attribution):
    figure = attribution_heatmap(attribution, "a − b")
    ax, bar = figure.axes
    assert [t.get_text() for t in ax.get_xticklabels()] == ["head2", "head10", "ffn", "b_O"]
    assert np.array_equal(ax.images[0].get_array(), [[-1, -2, 1, 0], [3, 2, 5, 4]])
    low, high = ax.images[0].get_clim()
    assert low == -high and ax.images[0].cmap.name == "RdBu_r"
    assert "logits" in bar.get_ylabel() and ax.get_title() == "a − b" and ax.get_ylabel() == "layer"


def test_a_head_split_by_source_is_one_cell(attribution):
    split = attribution.copy()
    chosen = split["component"] == "0.head2"
    halves = [split[chosen].assign(component=f"0.head2[{j}]", attribution=split["attribution"] / 2) for j in (0, 1)]
    grids = [
        attribution_heatmap(one).axes[0].images[0].get_array()
        for one in (attribution, pd.concat([split[~chosen], *halves]))
    ]
    assert np.array_equal(*grids)


def test_bars_show_every_component(attribution):
    ax = attribution_bars(attribution).axes[0]
    assert [t.get_text() for t in ax.get_xticklabels()] == list(dict.fromkeys(attribution["component"]))
    assert [bar.get_height() for bar in ax.patches] == [i - 3.0 for i in range(10)] and "logits" in ax.get_ylabel()


def test_scores_have_a_panel_each():
    rows = [
        {"score": s, "convention": c, "layer": l, "head": h, "value": v * (l + h)}
        for s, v in (("induction", 0.1), ("previous token", 0.2)) for c in ("mean", "mul") for l in (0, 1) for h in (0, 1)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    figure = head_score_heatmaps(table, "mul")
    assert [ax.get_title() for ax in figure.axes[:2]] == ["induction", "previous token"]
    assert np.allclose(figure.axes[1].images[0].get_array(), [[0, 0.2], [0.2, 0.4]])
    assert figure.axes[2].get_ylabel() == "share of attention (mul)"
    with pytest.raises(PlotError, match="it has"):
        head_score_heatmaps(table, "abs")


def test_composition_names_both_heads_and_leaves_out_what_cannot_compose():
    rows = [
        {"kind": k, "layer": l, "head": h, "earlier_layer": e, "earlier_head": g, "score": 0.1 * l + 0.01 * g, "null_mean": 0.1}
        for k in "qk" for l in (1, 2) for h in (0, 1) for e in range(l) for g in (0, 1)
    ]  # fmt: skip
    table = pd.DataFrame(rows)
    figure = composition_heatmap(table)
    first = figure.axes[0]
    assert [t.get_text() for t in first.get_yticklabels()] == ["1.0", "1.1", "2.0", "2.1"]
    assert [t.get_text() for t in first.get_xticklabels()] == ["0.0", "0.1", "1.0", "1.1"]
    grid = first.images[0].get_array()
    assert grid.mask[0].tolist() == [False, False, True, True] and np.allclose(grid[2], [0.1, 0.11, 0.1, 0.11])
    assert figure.axes[2].get_ylabel() == "score − null mean" and first.get_title() == "Q-composition"
    assert np.allclose(composition_heatmap(table, "score").axes[1].images[0].get_array()[2], [0.2, 0.21, 0.2, 0.21])


def test_tables_that_do_not_fit(attribution):
    with pytest.raises(PlotError, match="by neuron"):
        attribution_heatmap(attribution.assign(neuron=1))
    with pytest.raises(PlotError, match="lacks"):
        composition_heatmap(attribution)
