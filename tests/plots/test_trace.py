"""Figures of tracing and knock-out: roles and layers where they belong, colours centred at 0, units, intervals, refusals."""

from __future__ import annotations

import pandas as pd
import pytest

from interp.plots.style import PlotError
from interp.plots.trace import knock_out_curves, rate_curves, trace_heatmap, trace_lines


@pytest.fixture
def effects() -> pd.DataFrame:
    rows = []
    for corruption in ("replacement", "noise"):
        for site, severed in (("resid_post", "none"), ("ffn_out", "none"), ("resid_post", "ffn_out")):
            for layer in range(4):
                for i, role in enumerate(("subject_first", "subject_last", "last")):
                    if severed != "none" and role != "subject_last":
                        continue
                    wide = site == "ffn_out"
                    aie = (layer - 1) * (i + 1) / 10
                    rows.append({
                        "corruption": corruption, "metric": "probability", "site": site, "severed": severed, "layer": layer,
                        "first_layer": max(0, layer - wide), "last_layer": min(3, layer + wide),
                        "clipped": wide and layer in (0, 3),
                        "role": role, "aie": aie, "low": aie - 0.05, "high": aie + 0.05, "n": 9 - i, "ate": 0.5, "share": aie * 2,
                    })  # fmt: skip
    return pd.DataFrame(rows)


def test_heat_map(effects):
    figure = trace_heatmap(effects, "noise", title="toy")
    panels = [ax for ax in figure.axes if ax.images]
    assert [ax.get_title() for ax in panels] == ["state after the layer", "FFN output"]
    image = panels[0].images[0]
    assert image.get_clim() == (-0.6, 0.6) and image.get_array().shape == (3, 4)  # signed: centred at 0
    names = [label.get_text() for label in panels[0].get_yticklabels()]
    assert names == ["last token (7)", "last subject token (8)", "first subject token (9)"]
    assert image.get_array()[0, 3] == pytest.approx(0.6)  # bottom row: the last token, layer 3
    assert len(panels[1].patches) == 2 and not panels[0].patches  # cut windows are hatched
    assert panels[0].get_xlabel() == "restored layer" and panels[1].get_xlabel().startswith(
        "centre of 3 restored layers"
    )
    bars = [ax.get_ylabel() for ax in figure.axes if not ax.images]
    assert bars == ["average indirect effect\n(probability)"] * 2
    assert "share of the total effect" in trace_heatmap(effects, "noise", value="share").axes[-1].get_ylabel()


def test_lines_have_intervals_and_severed_ones_are_dashed(effects):
    figure = trace_lines(effects, "replacement")
    left, right = figure.axes
    assert left.get_title() == "last subject token (n = 8 facts)" and right.get_title().startswith("last token")
    assert left.get_ylabel() == "average indirect effect (probability)"
    state, severed, ffn = left.lines
    assert severed.get_linestyle() == "--" and state.get_linestyle() == ffn.get_linestyle() == "-"
    assert state.get_ydata().tolist() == pytest.approx([-0.2, 0, 0.2, 0.4])
    assert left.collections[0].get_paths()[0].vertices[:, 1].max() == pytest.approx(0.45)
    words = [text.get_text() for text in figure.legends[0].get_texts()]
    assert words == ["state after the layer", "state after the layer, FFNs severed", "FFN output"]


def test_knock_out_and_rates():
    table = pd.DataFrame([
        {"metric": "probability", "to": to, "layer": layer, "window": 5, "change": -0.1, "low": -0.2, "high": 0.0, "n": 7,
         "percent": -20.0 * layer, "percent_low": -60.0, "percent_high": 0.0}
        for to in ("subject", "non_subject") for layer in (1, 0)
    ])  # fmt: skip
    (ax,) = knock_out_curves(table).axes
    assert ax.get_ylabel() == "change of probability (%)" and ax.get_xlabel() == "centre of 5 layers"
    assert [line.get_label() for line in ax.lines[:2]] == ["final → subject", "final → non subject"]
    assert ax.lines[0].get_xydata().tolist() == [[0, 0], [1, -20]]
    assert knock_out_curves(table, value="change").axes[0].get_ylabel() == "change of probability (probability)"
    rate = pd.DataFrame(
        {"site": "ffn_out", "layer": [0, 1], "mean": [0.1, 0.2], "low": [0.0, 0.1], "high": [0.2, 0.3], "n": 4}
    )
    (ax,) = rate_curves(rate, label="share of facts").axes
    assert (
        ax.get_ylabel() == "share of facts" and ax.lines[0].get_label() == "FFN output" and ax.get_xlabel() == "layer"
    )


def test_refusals(effects):
    with pytest.raises(PlotError, match="several of corruption"):
        trace_heatmap(effects)
    with pytest.raises(PlotError, match="metric='loss' is not in the table"):
        trace_lines(effects, "noise", "loss")
    with pytest.raises(PlotError, match="none of the roles"):
        trace_lines(effects, "noise", roles=("verb",))
    with pytest.raises(PlotError, match="lacks column"):
        trace_heatmap(effects.drop(columns="clipped"), "noise")
    with pytest.raises(PlotError, match="value='x'"):
        knock_out_curves(pd.DataFrame(), value="x")
