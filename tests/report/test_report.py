"""The page: self-contained, escaped, numbers from the tables, parts reused only when their settings are the same."""

from __future__ import annotations

import re

import numpy as np
import pandas as pd
import pytest
import torch

from interp import logit_difference, patch_sweep
from interp.plots import training_curves
from interp.report import measure
from interp.report.page import Section, render, show, show_token
from interp.report.parts import fingerprint, part
from interp.tasks import replacement_pairs


def test_every_token_string_is_escaped_and_the_page_needs_no_network(tmp_path):
    evil = "<script>alert(1)</script>"
    section = Section(evil)
    section.text(evil)
    section.finding(evil)
    section.code(evil)
    section.heading(evil)
    section.bullets([evil])
    section.table(pd.DataFrame({evil: [evil, " a\n"], "n": [1.0, 2.5]}), evil, tokens=[evil])
    curves = pd.DataFrame({"step": [1], "split": ["a"], "loss": [1.0], "accuracy": [0.5]})
    section.figure(training_curves(curves), tmp_path / "figures" / "f.png", evil)
    html = render(tmp_path / "index.html", evil, evil, [section]).read_text()
    assert "<script" not in html and "&lt;script&gt;" in html
    assert "http" not in html and 'src="data:image/png;base64,' in html and "viewport" in html
    assert "·a⏎" in html and (tmp_path / "figures" / "f.png").stat().st_size > 1000
    assert not re.search(r"<(link|script|iframe)", html)


def test_numbers_are_readable():
    values = [1234567, 0.123456, 1.0, 12345.6, float("nan"), None, True, "x"]
    assert [show(value) for value in values] == ["1,234,567", "0.123", "1", "12,346", "–", "–", "True", "x"]
    assert show_token(" a | b") == "·a | b"


def test_a_part_is_reused_only_with_the_same_settings_and_when_finished(tmp_path):
    calls = []

    def measured():
        calls.append(1)
        return {"t": pd.DataFrame({"n": [len(calls)]})}

    first = part(tmp_path, "x", {"seed": 0}, measured)
    assert part(tmp_path, "x", {"seed": 0}, measured)["t"].equals(first["t"]) and len(calls) == 1
    assert part(tmp_path, "x", {"seed": 1}, measured)["t"]["n"][0] == 2
    (first.folder / "provenance.json").unlink()  # as if killed before the end
    assert part(tmp_path, "x", {"seed": 0}, measured)["t"]["n"][0] == 3


def test_a_fingerprint_changes_with_any_weight(shipped):
    import copy

    model = copy.deepcopy(shipped[0])
    before = fingerprint(model)
    assert before == fingerprint(shipped[0])
    with torch.no_grad():
        model.blocks[1].ffn.down.weight[3, 3] += 1e-6
    assert fingerprint(model) != before


@pytest.fixture(scope="module")
def pairs(shipped):
    _, task = shipped
    held_out = task.splits["held_out"]
    return replacement_pairs(held_out.select(range(60)))


def test_effects_agree_with_the_sweeps_own(shipped, pairs):
    model, _ = shipped
    metric = logit_difference(pairs.correct, pairs.wrong)
    table = measure.by_role(model, pairs)
    for direction in ("denoising", "noising"):
        sweep = patch_sweep(model, pairs.clean, pairs.corrupted, metric, by=("layer", "role"), direction=direction)
        expected = sweep.effect_table().set_index(["site", "layer", "role"])["effect"]
        got = measure.effects(table[table["direction"] == direction], ["site", "layer", "role"])
        got = got.set_index(["site", "layer", "role"])["effect"].loc[expected.index]
        assert np.allclose(got, expected, atol=1e-5)


def test_a_peak_is_estimated_on_pairs_that_did_not_choose_it():
    """Pure noise: the chosen half shows an inflated effect, the other half does not."""
    rng = np.random.default_rng(0)
    rows = [
        {"site": "a", "layer": layer, "example": e, "clean": 1.0, "corrupted": 0.0, "patched": value}
        for layer in range(200)
        for e, value in enumerate(rng.normal(0, 1, 40))
    ]
    [peak] = measure.peaks(pd.DataFrame(rows), ["layer"]).to_dict("records")
    assert abs(peak["chosen_at"]) > 0.4 and peak["n"] == 20
    assert peak["low"] < peak["effect"] < peak["high"]
    odd = [row["patched"] for row in rows if row["layer"] == peak["layer"] and row["example"] % 2]
    assert np.isclose(peak["effect"], np.mean(odd))


def test_the_largest_group_has_one_shape_and_no_padding(shipped):
    _, task = shipped
    group = measure.largest_group(task.splits["held_out"])
    assert group.table["relation"].nunique() == 1 and group.table["template"].nunique() == 1
    pairs = replacement_pairs(group)
    assert pairs.clean.mask is None and measure.identical_before(pairs) == int(pairs.clean.roles["subject"][0])


@pytest.mark.slow
def test_the_toy_report_end_to_end(tmp_path):
    from interp.report import build

    page = build(tmp_path, real=False, progress=False)
    html = page.read_text()
    assert html.count("data:image/png") == 6 and "nan" not in html.lower().split("base64")[0]
    accuracy = float(re.search(r"and ([\d.]+)% of [\d,]+ held-out-template prompts", html)[1])  # type: ignore[index]
    assert accuracy >= 99.0
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}
    build(tmp_path, real=False, progress=False)
    assert before == {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.parquet")}, "parts are reused"
