"""Probes on planted labels: what can be read has selectivity, what can only be memorised has none, and nothing leaks."""

from __future__ import annotations

import sys

import numpy as np
import pandas as pd
import pytest
import torch

from interp import run
from interp.analyses import probes
from interp.analyses.probes import ProbeError, control_labels, probe, split_groups

pytest.importorskip("sklearn")


@pytest.fixture
def draw() -> np.random.Generator:
    return np.random.default_rng(7)


def noise(draw, n: int, d: int) -> np.ndarray:
    return draw.normal(size=(n, d))


def test_a_label_that_can_be_read_has_accuracy_1_and_high_selectivity(draw):
    n = 400
    label, types = draw.integers(0, 2, n), draw.integers(0, 25, n)
    x = noise(draw, n, 6)
    x[:, 2] = 4 * label - 2
    row = probe(x, label, types).iloc[0]
    assert row["accuracy"] == 1.0 and row["selectivity"] > 0.35 and row["control_accuracy"] < 0.65
    assert (row["n_train"], row["n_validation"], row["n_test"], row["n_classes"], row["d"]) == (240, 80, 80, 2, 6)
    assert row["seen_types"] == 1.0 and row["converged"] and row["measure"] == "accuracy"


def test_a_label_that_is_only_a_property_of_its_type_has_no_selectivity(draw):
    types = draw.integers(0, 25, 500)
    x = np.eye(25)[types] + 0.01 * noise(draw, 500, 25)
    row = probe(x, draw.integers(0, 2, 25)[types], types).iloc[0]
    assert row["accuracy"] > 0.95 and abs(row["selectivity"]) < 0.05


def test_types_kept_apart_cannot_be_memorised_and_the_table_says_so(draw):
    types = draw.integers(0, 40, 600)
    x = np.eye(40)[types] + 0.01 * noise(draw, 600, 40)
    row = probe(x, draw.integers(0, 2, 40)[types], types, groups=types).iloc[0]
    assert row["seen_types"] == 0.0 and row["accuracy"] < 0.85 and row["control_accuracy"] < 0.85


def test_noise_is_at_the_majority(draw):
    label = (draw.random(600) < 0.7).astype(int)
    row = probe(noise(draw, 600, 10), label, control="none").iloc[0]
    assert abs(row["accuracy"] - row["majority"]) < 0.06 and 0.6 < row["majority"] < 0.8
    assert np.isnan(row["selectivity"]) and np.isnan(row["control_accuracy"]) and np.isnan(row["seen_types"])


def test_equal_rows_are_never_on_both_sides(draw):
    """Random labels, every row twice: a split of rows would let a probe recall the second copy."""
    x = noise(draw, 60, 100)
    label = draw.integers(0, 2, 60)
    twice = probe(np.concatenate([x, x]), np.concatenate([label, label]), control="none", strengths=[100.0]).iloc[0]
    leaking = probe(
        np.concatenate([x, x]), np.concatenate([label, label]), control="none", groups=range(120), strengths=[100.0]
    )
    assert twice["accuracy"] < 0.75 and leaking.iloc[0]["accuracy"] > twice["accuracy"] + 0.1


def test_the_parts_hold_every_row_once_and_every_group_in_one(draw):
    groups = np.repeat(np.arange(50), draw.integers(1, 30, 50))
    parts = split_groups(groups, (0.5, 0.2, 0.3), draw)
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(len(groups)))
    held = [set(groups[part]) for part in parts]
    assert not held[0] & held[1] and not held[0] & held[2] and not held[1] & held[2]
    assert np.allclose([len(part) / len(groups) for part in parts], (0.5, 0.2, 0.3), atol=0.05)
    three = split_groups(np.array([0, 1, 2, 2]), (0.9, 0.05, 0.05), draw)
    assert all(len(part) for part in three)


def test_standardisation_and_weights_see_the_training_part_alone(draw, monkeypatch):
    """Other values in the other parts change neither what is fitted nor how it is scaled."""
    n, fitted = 90, []
    linear = probes._sklearn("linear_model")

    class Seen(linear.LogisticRegression):
        def fit(self, x, y):
            fitted.append((np.array(x), np.array(y)))
            return super().fit(x, y)

    monkeypatch.setattr(probes, "_sklearn", lambda module: type("linear", (), {"LogisticRegression": Seen}))
    x, label = noise(draw, n, 3) * [1, 5, 100] + [0, 3, -50], draw.integers(0, 2, n)
    parts = split_groups(np.arange(n), (0.6, 0.2, 0.2), np.random.default_rng(0))
    probe(x, label, control="none", groups=range(n), strengths=[1.0])
    other = x.copy()
    other[np.concatenate(parts[1:])] *= 1e6
    probe(other, label, control="none", groups=range(n), strengths=[1.0])
    (first, labels), (second, _) = fitted
    assert first.shape == (54, 3) and np.array_equal(first, second) and np.array_equal(labels, label[parts[0]])
    assert np.allclose(first, (x[parts[0]] - x[parts[0]].mean(0)) / x[parts[0]].std(0))


def test_the_strength_is_chosen_on_the_second_part_not_the_third(draw, monkeypatch):
    scored = []

    class Fixed:
        def __init__(self, C, max_iter):
            self.C = C

        def fit(self, x, y):
            return self

        def score(self, x, y):
            scored.append((self.C, len(x)))
            return (
                {0.1: 0.5, 1.0: 0.9, 10.0: 0.9}[self.C] if len(x) == 20 else {0.1: 1.0, 1.0: 0.25, 10.0: 0.75}[self.C]
            )

    monkeypatch.setattr(probes, "_sklearn", lambda module: type("linear", (), {"LogisticRegression": Fixed}))
    row = probe(
        noise(draw, 100, 2), np.arange(100) % 2, control="none", split=(0.5, 0.2, 0.3), strengths=[10.0, 0.1, 1.0]
    ).iloc[0]
    assert row["C"] == 1.0 and row["accuracy"] == 0.25, "of equal ones the stronger penalty"
    assert [size for _, size in scored] == [20, 20, 20, 30], "the test part is looked at once"


def test_control_labels_are_one_per_type_and_as_frequent_as_the_labels(draw):
    labels, types = (draw.random(4000) < 0.2).astype(int), draw.integers(0, 1000, 4000)
    control = control_labels(labels, types, draw)
    assert all(len(set(control[types == kind])) == 1 for kind in set(types))
    assert abs(control.mean() - 0.2) < 0.05 and not np.array_equal(control, labels)
    for seed in range(20):
        assert (
            len(set(control_labels(np.array([0, 0, 0, 1]), np.array([0, 1, 1, 0]), np.random.default_rng(seed)))) == 2
        )


def test_numbers_are_regressed_and_measured_by_r2(draw):
    n, types = 300, draw.integers(0, 20, 300)
    x = noise(draw, n, 5)
    row = probe(x, x @ [1.0, -2, 0, 0, 3] + 7, types).iloc[0]
    assert (
        row["measure"] == "r2" and row["accuracy"] > 0.999 and row["selectivity"] > 0.8 and abs(row["majority"]) < 0.1
    )
    assert row["n_classes"] is pd.NA


def test_sites_of_a_run_have_rows_with_their_layers(model):
    tokens = torch.randint(0, 13, (90, 5), generator=torch.Generator().manual_seed(1))
    got = run(model, tokens, record=["resid_pre", "resid_post", "pattern"])
    label = tokens[:, -1] % 2
    table = probe(got, label, tokens[:, -1], groups=range(90), strengths=[1.0], position=-1)
    assert table["site"].tolist() == ["0.resid_pre", "0.resid_post", "1.resid_pre", "1.resid_post"]
    assert table["layer"].tolist() == [0, 0, 1, 1] and table.iloc[0]["accuracy"] > 0.9
    one = probe(got, label, tokens[:, -1], groups=range(90), strengths=[1.0], sites="1.resid_post")
    by_hand = probe(
        {"1.resid_post": got.cache["1.resid_post"][:, -1]}, label, tokens[:, -1], groups=range(90), strengths=[1.0]
    )
    assert one.equals(by_hand) and one.equals(table.iloc[[3]].reset_index(drop=True))
    assert table.equals(probe(got, label, tokens[:, -1], groups=range(90), strengths=[1.0])), (
        "the same seed, the same table"
    )


def test_words_are_labels(draw):
    x = noise(draw, 300, 2)
    row = probe(x, np.where(x[:, 0] > 0, "noun", "verb"), control="none").iloc[0]
    assert row["accuracy"] > 0.9


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"labels": [0] * 30}, "one label"),
        ({"labels": [0, 1]}, "labels hold 2 rows"),
        ({"labels": np.full(30, np.nan)}, "NaN"),
        ({"features": np.full((30, 2), np.inf)}, "infinite"),
        ({"features": np.zeros(30)}, r"\[n d\]"),
        ({"features": {}}, "empty"),
        ({"features": {"9.nonsense": np.zeros((30, 2))}}, "nonsense"),
        ({"control": "shuffle"}, "'by type', 'none'"),
        ({"control": "by type"}, "types="),
        ({"types": [1, 2]}, r"types must be \[n\]"),
        ({"groups": [0] * 30}, "1 different groups"),
        ({"split": (0.5, 0.5, 0)}, "split="),
        ({"strengths": []}, "strengths="),
        ({"sites": "resid_post"}, "go with a Run"),
    ],
)
def test_bad_input_is_refused_by_name(draw, words, message):
    given = {"features": noise(draw, 30, 2), "labels": np.arange(30) % 2, "control": "none", **words}
    with pytest.raises(ProbeError, match=message):
        probe(given.pop("features"), given.pop("labels"), **given)


def test_without_scikit_learn_the_error_names_the_extra(draw, monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.linear_model", None)
    with pytest.raises(ImportError, match=r"interp\[probes\]"):
        probe(noise(draw, 30, 2), np.arange(30) % 2, control="none")
