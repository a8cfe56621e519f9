"""Figures: labelled axes with units, colour centred at 0, token labels, and tables in."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest

from interp.plots import (
    effect_bars,
    effect_heatmaps,
    effect_histogram,
    head_heatmap,
    lens_curves,
    training_curves,
)
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


@pytest.fixture
def windows(effects):
    """Windows of 3 in a model of 3 layers: the outer two are cut off."""
    first, last = (effects["layer"] - 1).clip(lower=0), (effects["layer"] + 1).clip(upper=2)
    table = effects.rename(columns={"layer": "window"})
    return table.assign(first_layer=first, last_layer=last, clipped=last - first < 2)


def test_windows_that_are_cut_off_are_hatched_and_the_axis_says_so(windows):
    heads = windows[windows["site"] == "ffn_out"].rename(columns={"position": "head"})
    for ax in (effect_heatmaps(windows).axes[0], head_heatmap(heads).axes[0]):
        assert [(patch.get_y(), patch.get_hatch()) for patch in ax.patches] == [(-0.5, "//"), (1.5, "//")]
        assert ax.get_ylabel() == "centre of 3 layers\n(hatched: cut off at an end)"
    bars = effect_bars(windows, "window").axes[0]
    assert [bool(bar.get_hatch()) for bar in bars.patches] == [True, False, True] and "3 layers" in bars.get_xlabel()
    whole = windows[~windows["clipped"]]
    assert (
        effect_heatmaps(whole).axes[0].get_ylabel() == "centre of 3 layers"
        and not effect_heatmaps(whole).axes[0].patches
    )
    both_cut = windows[windows["window"] < 2].assign(last_layer=lambda t: t["last_layer"].clip(upper=1), clipped=True)
    assert "centre of 3 layers" in effect_heatmaps(both_cut).axes[0].get_ylabel()


def test_panels_by_role_and_heads_upward(effects):
    table = effects.assign(role=effects["site"] + "_at", head=effects["position"])
    panels = effect_heatmaps(table, "head", panel="role").axes[:2]
    assert [ax.get_title() for ax in panels] == ["resid pre at", "ffn out at"] and panels[0].get_xlabel() == "head"
    ax = effect_heatmaps(table, "position", y="head").axes[0]
    assert ax.get_ylabel() == "head" and np.array_equal(
        ax.images[0].get_array().diagonal(), [1 - p / 2 for p in range(4)]
    )


def test_bars_and_histograms(effects):
    figure = effect_bars(effects, "position", labels=["a", " b", "c", "d"])
    heights = [bar.get_height() for bar in figure.axes[0].patches]
    assert heights == [1 - p / 2 for p in range(4)] and "logit difference" in figure.axes[0].get_ylabel()
    ax = effect_histogram(effects).axes[0]
    assert sum(bar.get_height() for bar in ax.patches) == 12 and ax.get_xlim()[0] == -ax.get_xlim()[1]
    assert ax.get_ylabel() == "number of entries" and "logit difference" in ax.get_xlabel()
    with pytest.raises(PlotError, match="1 labels for 4 values"):
        effect_bars(effects, "position", labels=["a"])


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
