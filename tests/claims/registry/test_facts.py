"""F2's rules on made-up tables: every outcome, and the numbers by hand; its measurements once, tiny."""

import math

import numpy as np
import pandas as pd
import pytest

from interp.claims import confusion
from interp.claims.registry import facts

TINY = {"subjects": 12, "seeds": [1000, 1001]}


def test_the_excess_is_the_mean_difference_of_logits():
    table = pd.DataFrame({"optimizer": "adamw", "seed": [0, 0, 1], "rho": [0.5, 0.75, 0.5], "phi": [0.75, 0.5, 1.2]})
    found = facts.excess(table).set_index("seed")
    assert found.loc[0, "excess"] == pytest.approx((math.log(3) - math.log(3)) / 2)
    assert list(found["dropped"]) == [1]


@pytest.mark.parametrize("excess, says", [(0.4, "supported"), (-0.4, "refuted"), (0.0, "refuted")])
def test_special(excess, says):
    reading = facts.special(confusion.special_tables(excess, 0))
    assert reading.says == says  # at 0 by equivalence
    assert reading.estimate == pytest.approx(excess, abs=0.1)
    assert reading.n == 10


def test_special_is_undecided_where_nothing_is_sure():
    assert facts.special(confusion.special_tables(0.1, 1, spread=0.6)).says == "undecided"


def test_one_optimizer_is_enough_to_refute():
    tables = confusion.special_tables(0.4, 0)["F2.curve"]
    other = confusion.special_tables(-0.4, 0)["F2.curve"]
    mixed = pd.concat([tables[tables["optimizer"] == "adamw"], other[other["optimizer"] == "sgd"]])
    assert facts.special({"F2.curve": mixed}).says == "refuted"


@pytest.mark.parametrize("share, says", [(2 / 3, "supported"), (1 / 3, "refuted")])
def test_most_reads_the_share_through_the_planted_line(share, says):
    reading = facts.most(confusion.most_tables(share, 0))
    assert reading.says == says
    assert reading.estimate == pytest.approx(share, abs=0.03)
    assert reading.low < reading.estimate < reading.high


def test_an_uncalibrated_localiser_decides_nothing():
    reading = facts.most(confusion.most_tables(2 / 3, 0, slope=0.1))
    assert (reading.says, reading.p) == ("undecided", 1.0)
    assert "not calibrated: " in reading.note


@pytest.mark.parametrize("gap, says", [(6, "supported"), (0, "refuted"), (3, "undecided")])
def test_necessary(gap, says):
    reading = facts.necessary(confusion.necessary_tables(gap, 2))
    assert reading.says == says
    assert reading.estimate == pytest.approx(gap, abs=1)


def test_early_recall_is_compared_where_the_gated_model_passes_half():
    rows = [{"arm": arm, "seed": seed, "step": step, "exposures": step / 10, "split": "train", "accuracy": accuracy + seed / 1000}
            for arm, curve in {"swiglu": (0.4, 0.6, 1.0), "attention": (0.1, 0.2, 1.0), "relu": (0.4, 0.7, 1.0)}.items()
            for step, accuracy in zip((100, 200, 300), curve, strict=True) for seed in range(3)]  # fmt: skip
    table = {"F2.twins": pd.DataFrame(rows)}
    reading = facts.faster(table)
    assert reading.estimate == pytest.approx(40)
    assert "after 200 steps, 20 exposures" in reading.note
    assert facts.gating(table).estimate == pytest.approx(-10)


def test_arms_have_the_same_number_of_parameters():
    from interp import Transformer
    from interp.tasks import ToyFacts

    task, totals = ToyFacts(16), {}
    for arm, sizes in facts.ARMS.items():
        weights = Transformer(task.model_config(**sizes)).weights
        counts = {group: weights.count(group) for group in ("ffn", "attention")}
        totals[arm] = sum(counts.values())
        assert counts["ffn"] / totals[arm] == pytest.approx(float(arm), abs=0.005)
    for name, options in facts.TWINS.items():
        sizes = {key: value for key, value in options.items() if key != "learning_rate"}
        model = Transformer(task.model_config(**{"d_head": 16, **sizes}))
        groups = ("attention",) if sizes.get("ffn") == "none" else ("ffn", "attention")
        totals[name] = sum(model.weights.count(group) for group in groups)
    assert max(totals.values()) / min(totals.values()) < 1.005


def test_a_tiny_arm_and_tiny_twins_are_measured(tmp_path):
    unit = facts.CURVE.units["standard"]["rho_0.67"]
    tuning = {name: {**options, "steps": 30} for name, options in unit["tuning"].items()}
    curve = facts.allocation(
        {**unit, **TINY, "training": {"steps": 60, "batch_size": 32}, "tuning": tuning}, tmp_path / "a"
    )
    assert len(curve) == 4
    assert curve["rho"].iloc[0] == pytest.approx(0.667, abs=0.001)
    assert np.isfinite(curve["phi"]).all()
    for name, unit in facts.TWIN.units["standard"].items():
        training = {**unit["training"], "steps": 4, "batch_size": 16}
        table = facts.twins({**unit, **TINY, "training": training}, tmp_path / name)
        assert set(table["split"]) == {"train", "held_out"}
        assert table["parameters"].iloc[0] == pytest.approx(98_304, rel=0.005)
