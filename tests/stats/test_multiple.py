"""Corrections for several tests against published examples, brute force, and error rates in simulations (± 4 errors)."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from interp.stats import StatsError, benjamini_hochberg, holm, max_t

BH_1995 = [.0001, .0004, .0019, .0095, .0201, .0278, .0298, .0344, .0459, .3240, .4262, .5719, .6528, .7590, 1.0]  # fmt: skip


def test_holm_by_hand():
    """p .005, .01, .03, .04 times 4, 3, 2, 1, made to rise: .02, .03, .06, .06."""
    found = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert found == pytest.approx({"a": 0.03, "b": 0.06, "c": 0.06, "d": 0.02})
    assert list(found) == ["a", "b", "c", "d"]
    assert holm({"a": 0.4, "b": 0.6}) == pytest.approx({"a": 0.8, "b": 0.8}) and holm({"a": 0.7, "b": 0.9})["a"] == 1


def test_tests_that_were_not_run_count():
    found = holm({"a": 0.01, "not run": None, "b": 0.04, "also": None})
    assert found == pytest.approx({"a": 0.04, "not run": 1, "b": 0.12, "also": 1})
    assert holm({"a": None}) == {"a": 1}


def test_benjamini_and_hochbergs_own_example():
    """Their 15 p values of myocardial infarction (1995, section 4): 4 rejected at .05, where Bonferroni and Holm reject 3."""
    found = benjamini_hochberg(BH_1995)
    r_says = [.0015, .003, .0095, .035625, .0603, .06385714, .06385714, .0645, .0765, .486, .58118182, .714875, .75323077,
              .81321429, 1]  # fmt: skip
    np.testing.assert_allclose(found, r_says, atol=5e-8)
    assert (found <= 0.05).sum() == 4
    assert sum(p <= 0.05 for p in holm({str(i): p for i, p in enumerate(BH_1995)}).values()) == 3
    turned = benjamini_hochberg(np.reshape(BH_1995[::-1], (3, 5)))
    np.testing.assert_allclose(turned, np.reshape(r_says[::-1], (3, 5)), atol=5e-8)


def test_error_rates_of_holm_and_benjamini_hochberg(monkeypatch):
    """2,000 sets of 12 independent tests. All null: Holm's chance of any false one is 1 − (1 − .05/12)^12 = 4.9% ± 0.5. With 6
    true effects: BH's mean share of false ones among the rejected is .05 · 6/12 = 2.5%."""
    monkeypatch.setattr("gc.collect", lambda *_: 0)  # statsmodels collects garbage at each call, .1 s here
    rng, trials = np.random.default_rng(0), 2000
    p = rng.random((trials, 12))
    false = np.mean([min(holm(dict(zip(range(12), one, strict=True))).values()) <= 0.05 for one in p])
    assert abs(false - 0.0489) < 4 * np.sqrt(0.0489 * 0.9511 / trials)
    p[:, :6] = stats.norm.sf(rng.normal(3, 1, (trials, 6)))
    rejected = np.array([benjamini_hochberg(one) <= 0.05 for one in p])
    shares = rejected[:, 6:].sum(1) / np.maximum(rejected.sum(1), 1)
    assert abs(shares.mean() - 0.025) < 4 * shares.std() / np.sqrt(trials)
    assert rejected[:, :6].mean() > 0.7


def brute_force(values, null):
    """p and |t| from the plain formula of t, over all 2^n flips."""
    t = lambda x: np.abs(x.mean(0)) / (x.std(0, ddof=1) / np.sqrt(len(x)))  # noqa: E731
    gaps = values - null
    highest = [t(gaps * np.array(signs)[:, None]).max() for signs in itertools.product((1, -1), repeat=len(values))]
    return np.array([np.mean([h >= one - 1e-9 for h in highest]) for one in t(gaps)]), np.sort(highest)


def test_max_t_against_brute_force():
    values = np.random.default_rng(1).normal([0.2, 1.5, 0.9, 2.0], 1, size=(7, 4))
    found = max_t(values, 0.2)
    p, highest = brute_force(values, 0.2)
    np.testing.assert_allclose(found.p, p, atol=1e-12)
    np.testing.assert_allclose(found.t, stats.ttest_1samp(values, 0.2).statistic, atol=1e-12)
    np.testing.assert_allclose(found.mean, values.mean(0), atol=1e-12)
    assert found.critical == pytest.approx(highest[-(int(0.05 * 128) + 1)]) and found.n == 7
    np.testing.assert_allclose(found.half_width, found.critical * values.std(0, ddof=1) / np.sqrt(7), atol=1e-12)


def test_intervals_exclude_null_where_the_test_rejects():
    rng, decided = np.random.default_rng(2), 0
    for n in (6, 9, 15):  # all flips; all; drawn
        for _ in range(20):
            found = max_t(rng.normal(rng.choice([0, 1, 2], size=(3, 4)), 1, size=(n, 3, 4)), draws=1000)
            assert ((np.abs(found.mean) > found.half_width) == (found.p <= 0.05)).all()
            decided += (found.p <= 0.05).sum()
    assert 50 < decided < 650


def test_drawn_flips_agree_with_all():
    values = np.random.default_rng(3).normal(0.4, 1, size=(12, 5))
    every, drawn = max_t(values), max_t(values, draws=4000)
    np.testing.assert_allclose(drawn.p, every.p, atol=0.035)
    assert not np.array_equal(drawn.p, every.p)
    np.testing.assert_array_equal(max_t(values, draws=4000).p, drawn.p)
    assert not np.array_equal(max_t(values, draws=4000, seed=1).p, drawn.p)
    assert max_t(np.ones((30, 2)), draws=999).p.min() == 1 / 1000


def test_shapes_and_cells_that_do_not_vary():
    """A cell at null has t 0 and p 1; one that is the same off null everywhere p 2 / 2^n; 5 units allow no interval at 95%."""
    values = np.random.default_rng(4).normal(size=(8, 2, 3))
    values[:, 0, 0], values[:, 1, 2] = 0, -3
    found = max_t(values)
    assert found.t.shape == found.p.shape == found.half_width.shape == found.mean.shape == (2, 3)
    assert (found.t[0, 0], found.p[0, 0]) == (0, 1) and (found.t[1, 2], found.p[1, 2]) == (-np.inf, 2 / 256)
    few = max_t(np.random.default_rng(5).normal(9, 1, size=(5, 4)))
    assert (few.p == 2 / 32).all() and np.isinf(few.half_width).all()
    assert np.isfinite(max_t(np.random.default_rng(5).normal(9, 1, size=(5, 4)), confidence=0.9).half_width).all()


def test_error_rate_and_coverage_of_maps():
    """1,000 maps of 20 correlated cells over 9 units. No effect: any false cell in 4.7% ± 0.7 (the 12 largest of 256 maxima
    lie within .05). With effects in half of the cells: intervals hold all 20 cells at once in 95% ± 0.7."""
    rng, trials = np.random.default_rng(6), 1000
    noise = rng.normal(size=(trials, 9, 20)) + rng.normal(size=(trials, 9, 1))
    false = np.mean([(max_t(one).p <= 0.05).any() for one in noise])
    known = 12 / 256
    assert abs(false - known) < 4 * np.sqrt(known / trials)
    truth = np.repeat([0.0, 1.0], 10)
    found = [max_t(one + truth) for one in noise]
    held = np.mean([(np.abs(one.mean - truth) <= one.half_width).all() for one in found])
    assert abs(held - 0.95) < 4 * 0.007
    # without the correction for cells the first kind of error would be frequent
    assert np.mean((stats.ttest_1samp(noise, 0, axis=1).pvalue <= 0.05).any(1)) > 0.3


def test_refuses_bad_input():
    for p, says in (
        ({"a": 1.2}, r"hold \[.*1.2"),
        ({"a": -0.1}, "-0.1"),
        ({"a": float("nan")}, "NaN or inf"),
        ({}, "0 entries"),
    ):
        with pytest.raises(StatsError, match=says):
            holm(p)
    for p, says in (([0.1, 2], "2.0"), ([], "0 entries"), ([0.1, np.nan], "such as nan"), (0.1, r"shape \(\)"),
                    (np.ones((2, 0)), "at least one number")):  # fmt: skip
        with pytest.raises(StatsError, match=says):
            benjamini_hochberg(p)
    good = np.random.default_rng(0).normal(size=(6, 3))
    for values, says in ((np.ones((1, 3)), "1 entries"), (np.ones(4), r"shape \(4,\)"), (np.ones((4, 0)), "at least one cell"),
                         (np.where(good > 1, np.nan, good), "such as nan")):  # fmt: skip
        with pytest.raises(StatsError, match=says):
            max_t(values)
    with pytest.raises(StatsError, match="null=None"):
        max_t(good, None)
    with pytest.raises(StatsError, match="at least 200"):
        max_t(good, draws=100)
    with pytest.raises(StatsError, match="confidence=1"):
        max_t(good, confidence=1)
