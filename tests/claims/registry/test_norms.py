"""The rules of N1b, N2 and N3 on made-up tables, and each measurement at a tiny size."""

import itertools
import math
import pickle

import numpy as np
import pandas as pd
import pytest
import torch

from interp.claims.registry import norms
from interp.model import Inputs

TINY = {"name": "facts", "n_subjects": 4}


def gradients(post, pre, seeds=4, spread=0.02):
    rows = []
    for seed, (arm, slope), depth in itertools.product(range(seeds), (("post", post), ("pre", pre)), (2, 4, 8)):
        value = depth ** (slope + spread * (seed - (seeds - 1) / 2))
        rows.append(
            {"seed": seed, "setting": "paper", "arm": arm, "depth": depth, "quantity": "gradient", "value": value}
        )
    return {"N2.gradients": pd.DataFrame(rows)}


@pytest.mark.parametrize(("post", "pre", "spread", "says"), [
    (0.0, -0.5, 0.02, "supported"), (0.4, -0.5, 0.02, "refuted"), (0.0, 0.0, 0.02, "refuted"), (0.1, -0.5, 0.1, "undecided"),
])  # fmt: skip
def test_slopes(post, pre, spread, says):
    reading = norms.h1(gradients(post, pre, spread=spread))
    assert reading.says == says
    assert reading.estimate == pytest.approx(pre)
    assert (reading.p < 0.05) == (says == "supported")


def test_slopes_of_two_seeds_and_of_a_gradient_that_is_gone():
    assert norms.h1(gradients(0.0, -0.5, seeds=2, spread=0.001)).says == "supported"
    lost = gradients(0.0, -0.5)
    lost["N2.gradients"].loc[0, "value"] = math.nan
    assert norms.h1(lost).says == "undecided"


def streams(pre, post):
    rows = [{"seed": seed, "setting": "paper", "arm": arm, "depth": 8, "layer": layer, "quantity": "stream",
             "value": (1 if arm == "pre" else 1.5) + growth * layer + 0.001 * seed * layer}
            for seed in range(3) for arm, growth in (("pre", pre), ("post", post)) for layer in range(9)]  # fmt: skip
    return {"N2.gradients": pd.DataFrame(rows)}


@pytest.mark.parametrize(
    ("pre", "post", "says"), [(1.0, 0.0, "supported"), (0.2, 0.0, "refuted"), (1.0, 0.4, "refuted")]
)
def test_growth(pre, post, says):
    assert norms.h2(streams(pre, post)).says == says


def cells(study, **shares):
    """Ten cells per arm and seed, of which so many reach the target."""
    rows = [{"seed": seed, "arm": arm, "depth": 6, "learning_rate": cell, "warmup": 0.0, "reached": cell < count, "note": "",
             "nats": 1.0}
            for arm, counts in shares.items() for seed, count in enumerate(counts) for cell in range(10)]  # fmt: skip
    return {study: pd.DataFrame(rows)}


@pytest.mark.parametrize(("pre", "post", "says"), [
    ([9, 9, 8, 9], [2, 1, 2, 2], "supported"), ([5, 5, 4, 5], [5, 4, 5, 5], "refuted"), ([7, 7, 7, 8], [5, 5, 5, 6], "refuted"),
    ([9, 5, 8, 9], [2, 4, 8, 6], "undecided"), ([9, 8, 8, 9], [4, 6, 4, 5], "undecided"),
])  # fmt: skip
def test_training_grid(pre, post, says):
    assert norms.h3(cells("N2.training", pre=pre, post=post)).says == says


def test_above_zero_outcomes():
    says = lambda none: norms.n1b(cells("N1b", layernorm=[8, 8, 9], none=none)).says  # noqa: E731
    assert [says([2, 3, 3]), says([9, 9, 10]), says([8, 2, 9]), says([8, 8, 9])] == [
        "supported",
        "refuted",
        "undecided",
        "refuted",
    ]
    tables = (
        cells("N2.training", pre=[9, 9, 9])["N2.training"],
        cells("x", **{"pre without final norm": [5, 5, 6]})["x"],
    )
    assert norms.h3b({"N2.training": pd.concat(tables)}).says == "supported"


def test_equivalence():
    assert norms.equivalent(np.array([0.001, -0.001, 0.002]), 0.02).says == "supported"
    assert norms.equivalent(np.array([0.1, 0.11, 0.09]), 0.02).says == "refuted"
    assert norms.equivalent(np.array([0.1, -0.1, 0.0]), 0.02).says == "undecided"
    assert norms.equivalent(np.array([0.001, -0.001, 0.002, math.nan]), 0.02).says == "undecided"
    assert norms.equivalent(np.array([math.nan, 0.0]), 0.02).says == "undecided"
    assert norms.equivalent(np.array([0.0, 0.0]), 0.02).says == "supported"  # units that are all equal


def norm_rows(study, quantity, differences):
    rows = [{"seed": seed, "arm": arm, "stage": stage, "learning_rate": 0.1, "accuracy": 0.9, "nats": 1.0,
             quantity: 0.9 + (one if arm == "rmsnorm" and stage == "test" else 0)}
            for seed, one in enumerate(differences)
            for arm in ("rmsnorm", "layernorm") for stage in ("choice", "test")]  # fmt: skip
    return {study: pd.DataFrame(rows)}


def test_norms_are_paired_and_in_their_unit():
    reading = norms.n3_facts(norm_rows("N3.facts", "accuracy", [0.01, 0.012, 0.011]))
    assert (reading.says, reading.n) == ("supported", 3)
    assert reading.estimate == pytest.approx(1.1)
    assert norms.n3(norm_rows("N3.language", "nats", [0.05, 0.06])).says in ("refuted", "undecided")


def test_tie_at_the_best_rate():
    rows = [{"seed": seed, "arm": arm, "depth": 2, "warmup": 0.05, "learning_rate": rate, "reached": True, "note": "",
             "nats": math.nan if rate == 3 else 1 + rate + 0.001 * seed * (arm == "pre")}
            for seed in range(3) for arm in ("pre", "post") for rate in (1, 2, 3)]  # fmt: skip
    assert norms.h3c({"N2.training": pd.DataFrame(rows)}).says == "supported"
    assert norms.h3c({"N2.training": pd.DataFrame(rows).assign(nats=math.nan)}).says == "undecided"


def test_start_is_measured(tmp_path):
    config = {"setting": "paper", "depths": [1, 2], "seeds": [1000]}
    rows = norms.measure_start(config, tmp_path)
    model, drawn = norms.starting_model("paper", "pre", 2, 1000), torch.Generator().manual_seed(1000)
    tokens, targets = (torch.randint(64, (16, 16), generator=drawn) for _ in range(2))
    torch.nn.functional.cross_entropy(model(Inputs(tokens)).flatten(0, 1), targets.flatten()).backward()
    found = rows[(rows["quantity"] == "batch gradient") & (rows["arm"] == "pre") & (rows["depth"] == 2)]["value"].item()
    assert found == pytest.approx(model.blocks[-1].ffn.down.weight.grad.norm().item(), rel=1e-4)
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(Inputs(tokens))[0, :1], targets[0, :1]).backward()  # one token's loss
    one = model.blocks[-1].ffn.down.weight.grad.norm().item()
    mean = rows[(rows["quantity"] == "gradient") & (rows["arm"] == "pre") & (rows["depth"] == 2)]["value"].item()
    assert 0.4 < mean / one < 2.5
    layers = rows[(rows["quantity"] == "stream") & (rows["arm"] == "post")]["layer"].tolist()
    assert layers == [0, 1, 2]


def test_cells_are_trained(tmp_path):
    config = {"arm": "post", "task": TINY, "model": {"norm": "layernorm", "norm_position": "post", "n_layers": 1, "d_model": 16},
              "rates": [1e-2, 1e6], "warmups": [0.0], "seeds": [1000, 1001],
              "train": {"steps": 200, "batch_size": 12, "evaluate_every": 50, "clip": 1e9}}  # fmt: skip
    rows = norms.measure_cells(config, tmp_path)
    assert len(rows) == 4
    assert rows["depth"].tolist() == [1] * 4
    sane = rows[rows["learning_rate"] == 1e-2]
    assert sane["reached"].all()
    assert sane["accuracy"].notna().all()
    assert not rows.loc[rows["learning_rate"] == 1e6, "reached"].any()


def test_norm_is_trained_at_a_chosen_rate(tmp_path):
    config = {"arm": "layernorm", "task": TINY, "rates": [1e-2, 1e-9], "choice_seeds": [1000], "seeds": [1001, 1002],
              "train": {"steps": 30, "batch_size": 12, "evaluate_every": 30}, "better": "nats"}  # fmt: skip
    rows = norms.measure_norm(config, tmp_path)
    assert rows["stage"].tolist() == ["choice", "choice", "test", "test"]
    means = rows[rows["stage"] == "choice"].set_index("learning_rate")["nats"]
    assert set(rows.loc[rows["stage"] == "test", "learning_rate"]) == {means.idxmin()}


def test_post_norm_starts_unscaled():
    sizes = norms.restore(TINY).model_config(norm="layernorm", norm_position="post", n_layers=8)
    scaled, usual = norms.Transformer(sizes, seed=3), norms.usual_start(sizes, 3)
    ratio = usual.blocks[0].ffn.down.weight / scaled.blocks[0].ffn.down.weight
    assert torch.allclose(ratio, torch.full_like(ratio, 4.0))


def test_what_is_registered():
    for study in norms.STUDIES:
        pickle.dumps(study.measure)
        assert set(study.minutes) == set(study.units)
        for units in study.units.values():
            assert all(set(unit["seeds"]) <= set(range(10)) for unit in units.values())
    assert [one.id for claim in norms.CLAIMS for one in claim.hypotheses if one.primary] == [
        "N2.h1",
        "N2.h3",
        "N3.language",
    ]
    assert all(
        set(one.studies) <= {study.name for study in norms.STUDIES}
        for claim in norms.CLAIMS
        for one in claim.hypotheses
    )


def test_figures(tmp_path):
    start = norms.measure_start({"setting": "paper", "depths": [1, 2], "seeds": [1000]}, tmp_path)
    assert len(norms.figure_gradients({"N2.gradients": start}).axes) == 1
    tables = cells("N1b", layernorm=[8, 8], none=[1, 2])
    assert [ax.get_title() for ax in norms.figure_cells("N1b", tables).axes][:2] == ["layernorm", "none"]
    assert not norms.shown_cells("N1b", tables).empty
    assert not norms.shown_gradients({"N2.gradients": start}).empty
    assert not norms.shown_stream({"N2.gradients": start}).empty
