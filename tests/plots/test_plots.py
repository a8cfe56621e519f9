"""Figures: labelled axes with units, colour centred at 0, token labels, and tables in."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from interp.plots import effect_heatmaps, head_heatmap, lens_curves, training_curves
from interp.plots.style import PlotError, printable


@pytest.fixture
def effects():
    cells = itertools.product(["resid_pre", "ffn_out"], range(3), range(4))
    return pd.DataFrame([{"site": s, "layer": l, "position": p, "effect": l - p / 2} for s, l, p in cells])


def test_effects_are_centred_at_zero_with_token_labels(effects):
    figure = effect_heatmaps(effects, labels=["a", " b", "$c$", "\n"])
    panels = figure.axes[:2]
    for ax, site in zip(panels, ["resid_pre", "ffn_out"], strict=True):
        low, high = ax.images[0].get_clim()
        assert low == -high == -2.0 and ax.get_title() == site and ax.get_xlabel() == "token position"
        assert [t.get_text() for t in ax.get_xticklabels()] == ["a", "·b", r"\$c\$", "⏎"]
        assert ax.images[0].cmap.name == "RdBu_r"
    assert panels[0].get_ylabel() == "layer" and "logit difference" in figure.axes[2].get_ylabel()
    assert np.array_equal(panels[0].images[0].get_array(), [[l - p / 2 for p in range(4)] for l in range(3)])


def test_several_rows_of_a_cell_are_averaged_and_missing_cells_stay_missing(effects):
    doubled = pd.concat([effects, effects.assign(effect=effects["effect"] + 2)])
    assert effect_heatmaps(doubled).axes[0].images[0].get_array()[1, 0] == 2.0
    partial = effects[(effects["layer"] != 1) | (effects["position"] != 2)]
    assert effect_heatmaps(partial).axes[0].images[0].get_array().mask[1, 2]


def test_heads(effects):
    table = effects[effects["site"] == "ffn_out"].rename(columns={"position": "head"})
    ax = head_heatmap(table).axes[0]
    assert ax.get_xlabel() == "head" and ax.get_ylabel() == "layer"


def test_curves_have_units():
    curves = pd.DataFrame(
        {"step": [1, 1, 2, 2], "split": ["a", "b"] * 2, "loss": [1.0, 1.0, 0.5, 0.5], "accuracy": [0.1] * 4}
    )
    left, right = training_curves(curves).axes
    assert "nats" in left.get_ylabel() and "%" in right.get_ylabel() and left.get_xlabel() == "training step"
    lens = pd.DataFrame({"layer": [0, 1] * 2, "name": ["x"] * 4, "probability": [0.1, 0.9] * 2, "rank": [5, 0] * 2,
                         "kl_to_final": [2.0, 0.0] * 2})  # fmt: skip
    labels = [ax.get_ylabel() for ax in lens_curves(lens).axes]
    assert "probability" in labels[0] and "nats" in labels[2]


def test_bad_tables_are_refused(effects):
    with pytest.raises(PlotError, match=r"lacks column\(s\) \['effect'\]"):
        effect_heatmaps(effects.drop(columns="effect"))
    with pytest.raises(PlotError, match="no rows"):
        effect_heatmaps(effects.iloc[:0])
    with pytest.raises(PlotError, match="3 labels for 4 values"):
        effect_heatmaps(effects, labels=["a", "b", "c"])


def test_printable_labels():
    assert (
        printable(" the") == "·the"
        and printable("") == "∅"
        and printable("\x00") == "�"
        and len(printable("a" * 40)) == 16
    )


def test_a_figure_shows_itself_in_a_notebook_and_leaves_pyplot_alone(effects):
    import matplotlib.pyplot as plt

    before = dict(plt.rcParams)
    figure = effect_heatmaps(effects)
    assert figure._repr_png_().startswith(b"\x89PNG") and not plt.get_fignums()
    assert dict(plt.rcParams) == before, "the caller's settings are the caller's"
