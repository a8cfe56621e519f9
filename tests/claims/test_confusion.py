"""The verdicts on planted truth: errors and power of a few draws, and an outcome that depends on the correction."""

import numpy as np
import pytest

from interp.claims import confusion
from interp.claims.claim import Reading


@pytest.mark.parametrize("truth", confusion.TRUTHS, ids=lambda one: f"{one.hypothesis}: {one.effect}")
def test_each_truth_makes_tables_that_its_rule_reads(truth):
    if truth.how == "models" and truth.hypothesis == "A3.mass":
        pytest.skip("seconds per draw; in the slow test below")
    table = confusion.confusion([truth], draws=3)
    row = table.iloc[0]
    assert row["supported"] + row["refuted"] + row["undecided"] == 3
    assert row["wrong"] <= 1
    assert row["wrong_high"] >= row["wrong"] / 3


def test_a_planted_effect_is_found():
    table = confusion.confusion(confusion.chosen(["F2.special", "F2.necessary"]), draws=10)
    by = table.set_index("planted")
    assert by.loc["FFNs hold more: +.4 logits", "supported"] == 10
    assert by.loc["FFNs hold less: -.4 logits", "refuted"] == 10
    assert by.loc["no gap", "refuted"] == 10
    assert by.loc["a gap of 6 points", "supported"] >= 8


def test_the_correction_can_take_a_verdict_away():
    reading = Reading("supported", 1.0, 0.5, 1.5, 10, 0.01)
    assert confusion.outcome(reading, 4) == "supported"
    assert confusion.outcome(reading, 12) == "undecided"
    assert confusion.outcome(Reading("refuted", 1.0, 0.5, 1.5, 10, 0.5), 12) == "refuted"


def test_bounds_are_clopper_pearsons():
    row = confusion.confusion(confusion.chosen(["F2.necessary"])[1:2], draws=59).iloc[0]
    assert row["wrong"] == 0
    assert row["wrong_high"] == pytest.approx(1 - 0.05 ** (1 / 59))  # 59 draws without an error bound it at 5%
    assert np.isfinite(row["power"])


@pytest.mark.slow
def test_untrained_models_align_nothing():
    table = confusion.confusion(
        [one for one in confusion.TRUTHS if one.hypothesis == "A3.mass" and one.how == "models"], draws=1
    )
    assert table.iloc[0]["refuted"] == 1
