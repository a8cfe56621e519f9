"""The figures of grokking show their tables' numbers, with units."""

from __future__ import annotations

import pandas as pd
import pytest

from interp.plots.progress import fourier_power, progress_curves
from interp.plots.style import PlotError


@pytest.fixture
def measures():
    losses = [("loss", "train", [4.0, 0.1, 0.0]), ("loss", "held_out", [4.0, 9.0, 0.2]),
              ("restricted_loss", "all", [4.0, 2.0, 0.1]), ("excluded_loss", "train", [4.0, 1.0, 5.0])]  # fmt: skip
    rows = [{"step": step, "measure": measure, "frequency": pd.NA, "split": split, "value": value}
            for measure, split, values in losses for step, value in zip((0, 50, 400), values, strict=True)]  # fmt: skip
    one = {"step": 50, "measure": "excluded_loss", "frequency": 3, "split": "train", "value": 77.0}
    weights = {"step": 50, "measure": "squared_weights", "frequency": pd.NA, "split": None, "value": 88.0}
    return pd.DataFrame([*rows, one, weights]).sample(frac=1, random_state=0)


def test_four_losses_on_a_log_axis(measures):
    figure = progress_curves(measures, "title")
    [ax] = figure.axes
    assert ax.get_yscale() == "log" and ax.get_xlabel() == "training step" and "nats" in ax.get_ylabel()
    lines = {line.get_label(): line for line in ax.get_lines()}
    assert list(lines) == ["train loss", "test loss", "restricted loss (all inputs)", "excluded loss (train)"]
    assert lines["test loss"].get_xdata().tolist() == [0, 50, 400]
    assert lines["test loss"].get_ydata().tolist() == [4.0, 9.0, 0.2]
    assert lines["excluded loss (train)"].get_ydata().tolist() == [4.0, 1.0, 5.0]
    assert lines["train loss"].get_ydata().tolist() == [4.0, 0.1, 1e-9]  # a loss of 0 is drawn, at the floor
    assert [text.get_text() for text in figure.legends[0].get_texts()] == list(lines)
    assert len({line.get_color() for line in lines.values()}) == 4


def test_a_spectrum_of_each_kind_with_key_frequencies_apart():
    table = pd.DataFrame({"frequency": [1, 2, 3], "embedding_share": [0.2, 0.7, 0.1], "logit_share": [0.0, 1.0, 0.0],
                          "key": [False, True, False]})  # fmt: skip
    figure = fourier_power(table)
    for ax, shares, title in zip(figure.axes, ([20, 70, 10], [0, 100, 0]), ("embedding", "logits"), strict=True):
        assert ax.get_title() == title and ax.get_ylabel() == "share of power (%)" and "cycles" in ax.get_xlabel()
        bars = {round(bar.get_x() + bar.get_width() / 2): bar for bar in ax.patches}
        assert [bars[k].get_height() for k in (1, 2, 3)] == pytest.approx(shares)
        assert bars[1].get_facecolor() == bars[3].get_facecolor() != bars[2].get_facecolor()
        assert ax.get_lines()[0].get_ydata()[0] == pytest.approx(100 / 3)
    fourier_power(table.assign(key=False)).canvas.draw()


def test_other_tables_are_refused(measures):
    with pytest.raises(PlotError, match=r"lacks column\(s\) \['step'\]"):
        progress_curves(measures.drop(columns="step"))
    with pytest.raises(PlotError, match="none of the losses shown"):
        progress_curves(measures[measures["measure"] == "squared_weights"])
    twice = pd.DataFrame({"frequency": [1, 1], "embedding_share": 0.5, "logit_share": 0.5, "key": True})
    with pytest.raises(PlotError, match="several rows of one frequency"):
        fourier_power(twice)
