"""Intervals against published examples, their definitions, and their coverage in simulations (± 4 Monte-Carlo errors)."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import special, stats

from interp.stats import (
    Interval,
    StatsError,
    bca_interval,
    clopper_pearson,
    ratio_interval,
    t_half_width,
    t_interval,
    two_level_bootstrap,
)

SLEEP = [1.2, 2.4, 1.3, 1.3, 0.0, 1.0, 1.8, 0.8, 4.6, 1.4]  # Student (1908): hours gained, drug 2 − drug 1
SPATIAL = [48, 36, 20, 29, 42, 42, 20, 42, 22, 41, 45, 14, 6, 0, 33, 28, 34, 4, 32, 24, 47, 41, 24, 26, 30, 41]


def covers(interval, truth):
    return interval.low <= truth <= interval.high


def error(rate, trials):
    return np.sqrt(rate * (1 - rate) / trials)


def test_words_and_regions():
    found = Interval(0.62, 0.60, 0.64, 10, how="t")
    assert str(found) == "0.62 [0.60, 0.64], n = 10 (t)"
    assert str(Interval(0.00123, 0.00119, 0.00127, 5)) == "0.00123 [0.00119, 0.00127], n = 5"
    assert str(Interval(2, 2, 2, 3, 0.9, "BCa")) == "2.00 [2.00, 2.00], n = 3 (BCa, 90%)"
    assert found.above(0.5) and not found.above(0.60) and not found.above(0.61)
    assert found.below(0.65) and not found.below(0.64)
    assert found.inside(0.5, 0.7) and not found.inside(0.60, 0.7) and not found.inside(0.5, 0.64)
    with pytest.raises(StatsError, match=r"low=0\.7, high=0\.5"):
        found.inside(0.7, 0.5)
    with pytest.raises(StatsError, match="low=nan"):
        Interval(0, float("nan"), 1, 3)


def test_t_interval_of_students_sleep_data():
    """R's t.test of `sleep`: mean 1.58, 95% from 0.7001142 to 2.4598858."""
    found = t_interval(SLEEP)
    assert (found.estimate, found.low, found.high) == pytest.approx((1.58, 0.7001142, 2.4598858), abs=5e-8)
    assert (found.n, found.confidence, found.how) == (10, 0.95, "t")
    wide = stats.ttest_1samp(SLEEP, 0).confidence_interval(0.99)
    assert (t_interval(SLEEP, 0.99).low, t_interval(SLEEP, 0.99).high) == pytest.approx(tuple(wide), abs=1e-12)
    assert t_interval([3, 3, 3]) == Interval(3, 3, 3, 3, how="t")


def test_half_widths_elementwise():
    std, n = np.array([1.0, 2.0, np.nan]), np.array([4, 9, 1])
    found = t_half_width(std, n)
    np.testing.assert_allclose(
        found[:2], [3.182446305 / 2, 2.306004135 * 2 / 3], atol=1e-8
    )  # t tables, 3 and 8 degrees
    assert np.isnan(found[2])


def test_t_covers_what_it_claims_and_percentiles_of_few_units_do_not():
    """2,000 samples: t 95%; percentile bootstrap, claiming 95%: 83–84% over 5 units, 90–91% over 10."""
    rng, trials = np.random.default_rng(0), 2000
    seen = {}
    for n in (5, 10):
        samples = rng.normal(3, 2, size=(trials, n))
        seen["t", n] = np.mean([covers(t_interval(one), 3) for one in samples])
        seen["percentile", n] = np.mean(
            [covers(two_level_bootstrap(one, np.arange(n), draws=1000, seed=i), 3) for i, one in enumerate(samples)]
        )
    assert abs(seen["t", 5] - 0.95) < 4 * error(0.95, trials) and abs(seen["t", 10] - 0.95) < 4 * error(0.95, trials)
    assert abs(seen["percentile", 5] - 0.835) < 4 * error(0.835, trials)
    assert abs(seen["percentile", 10] - 0.905) < 4 * error(0.905, trials)


def test_bca_of_a_published_example():
    """Efron & Tibshirani (1993), table 14.2: 90% of the variance 171.5 of the spatial data: BCa (115.8, 259.6), percentile
    (100.8, 233.9); their 2,000 draws leave about ±4."""
    found = bca_interval(SPATIAL, np.var, 0.9)
    assert found.estimate == pytest.approx(171.5, abs=0.05) and found.n == 26
    assert found.low == pytest.approx(115.8, abs=3) and found.high == pytest.approx(259.6, abs=6)
    other = bca_interval(SPATIAL, lambda x: np.var(x), 0.9, draws=2000)  # a statistic without `axis`
    assert other.low == pytest.approx(found.low, abs=4) and other.high == pytest.approx(found.high, abs=8)
    assert bca_interval(SPATIAL, np.var, 0.9) == found != bca_interval(SPATIAL, np.var, 0.9, seed=1)
    assert bca_interval([2.0, 2.0, 2.0]) == Interval(2, 2, 2, 3, how="BCa")
    with pytest.raises(StatsError, match="BCa gives"):
        bca_interval([0.0, 1.0, 2.0, 3.0], lambda x: 5.0)


def test_bca_coverage_with_skewed_values():
    """400 samples of 30 exponentials: a 90% interval of the mean covers 85–92% (Monte-Carlo error 1.5 points)."""
    samples = np.random.default_rng(0).exponential(size=(400, 30))
    seen = np.mean([covers(bca_interval(one, confidence=0.9, draws=500, seed=i), 1) for i, one in enumerate(samples)])
    assert abs(seen - 0.885) < 4 * error(0.885, 400)


def nested(rng, units, items):
    """Values whose units differ (sd 1) as their items do (sd 2) around 0, and the label of each."""
    values = rng.normal(size=(units, 1)) + 2 * rng.normal(size=(units, items))
    return values.ravel(), np.repeat(np.arange(units), items)


def test_two_levels_have_the_variance_of_both():
    """The mean of a balanced table has a known variance over draws: (var of unit means + mean var within / items) / units."""
    values, units = nested(np.random.default_rng(1), 60, 7)
    table = values.reshape(60, 7)
    known = np.sqrt((table.mean(1).var() + table.var(1).mean() / 7) / 60)
    found = two_level_bootstrap(values, units)
    assert (found.high - found.low) / 2 == pytest.approx(special.ndtri(0.975) * known, rel=0.03)
    assert found.estimate == pytest.approx(values.mean(), abs=1e-12) and found.n == 60


def test_two_levels_with_unequal_units_and_other_statistics():
    """Against a loop over draws, in which labels are shuffled names and units have 2 to 9 items."""
    rng = np.random.default_rng(2)
    names = np.array(["c", "a", "d", "b", "e", "f"])
    units = rng.permutation(np.repeat(names, [2, 9, 4, 6, 3, 8]))
    values = rng.normal(size=len(units)) + 3 * (units == "a")

    def slow(statistic, draws=4000):
        found = []
        for _ in range(draws):
            parts = [values[units == name] for name in rng.choice(names, len(names))]
            found.append(statistic(np.concatenate([rng.choice(part, len(part)) for part in parts])))
        return np.quantile(found, [0.025, 0.975])

    for statistic in (np.mean, lambda x: np.quantile(x, 0.75)):
        found = two_level_bootstrap(values, units, statistic)
        assert (found.low, found.high) == pytest.approx(tuple(slow(statistic)), abs=0.12)
        assert found.estimate == pytest.approx(statistic(values))
    same = [two_level_bootstrap(values, units, s, draws=500) for s in (np.mean, lambda x: x.mean())]
    assert (same[0].low, same[0].high) == pytest.approx((same[1].low, same[1].high), abs=1e-12)
    balanced = np.repeat(np.arange(8), 4), rng.normal(size=32)
    axis, loop = (
        two_level_bootstrap(balanced[1], balanced[0], s, draws=500) for s in (np.median, lambda x: np.median(x))
    )
    assert (axis.low, axis.high) == (loop.low, loop.high)


def test_two_levels_cover_where_items_alone_do_not():
    """500 tables of 10 units × 30 items: two levels 92% ± 1.2; items taken for units (pseudo-replication) about half."""
    rng, trials, seen = np.random.default_rng(3), 500, np.zeros(2)
    for i in range(trials):
        values, units = nested(rng, 10, 30)
        seen += [covers(two_level_bootstrap(values, u, draws=500, seed=i), 0) for u in (units, np.arange(300))]
    assert abs(seen[0] / trials - 0.92) < 4 * error(0.92, trials)
    assert seen[1] / trials < 0.65


def test_clopper_pearson_of_published_numbers():
    """R's binom.test of Mendelian inheritance (Conover 1971): 682 of 925. No error of 20 bounds a rate only below 14%."""
    found = clopper_pearson(682, 925)
    assert (found.estimate, found.low, found.high) == pytest.approx((0.7372973, 0.7076683, 0.7654066), abs=5e-8)
    assert clopper_pearson(0, 20, 0.9).high == pytest.approx(1 - 0.05 ** (1 / 20)) and 1 - 0.05 ** (1 / 20) < 0.14
    assert clopper_pearson(0, 59, 0.9).below(0.05) and not clopper_pearson(0, 58, 0.9).below(0.05)
    assert clopper_pearson(0, 20).low == 0 and clopper_pearson(20, 20).high == 1


def test_clopper_pearson_never_covers_less():
    """Exact coverage, over all counts of 20, at 99 rates."""
    intervals = [clopper_pearson(k, 20) for k in range(21)]
    for rate in np.linspace(0.01, 0.99, 99):
        chance = stats.binom.pmf(np.arange(21), 20, rate)
        assert sum(c for c, one in zip(chance, intervals, strict=True) if covers(one, rate)) >= 0.95


def test_ratio_of_a_published_example():
    """DCSTATS' example of Fieller: 14 ± 3 over 7 ± 2 (standard errors), independent, 10 degrees of freedom, 90%: 1.051413 to
    4.414296. Eleven pairs are built that have exactly these moments."""
    q = np.linalg.qr(np.column_stack([np.ones(11), np.random.default_rng(0).normal(size=(11, 2))]))[0]
    top, bottom = 14 + 3 * np.sqrt(110) * q[:, 1], 7 + 2 * np.sqrt(110) * q[:, 2]
    found = ratio_interval(top, bottom, 0.9)
    assert (found.estimate, found.low, found.high) == pytest.approx((2, 1.051413, 4.414296), abs=1e-6)
    with pytest.raises(StatsError, match=r"denominator's mean is .* unbounded"):
        ratio_interval(top, bottom, 0.995)


def test_ratio_holds_what_a_t_test_does_not_reject():
    """The definition, on correlated pairs (statpsych's example; its log-based interval is 1.0942 to 1.1756)."""
    top, bottom = np.array([3.3, 3.6, 3.0, 3.1, 3.9, 4.2, 3.5, 3.3]), np.array([3.0, 3.1, 2.7, 2.6, 3.2, 3.8, 3.2, 3.0])
    found = ratio_interval(top, bottom)
    for end in (found.low, found.high):
        assert stats.ttest_1samp(top - end * bottom, 0).pvalue == pytest.approx(0.05, abs=1e-9)
    assert (found.estimate, found.low, found.high) == pytest.approx((1.134146, 1.09417, 1.175583), abs=2e-3)
    turned = ratio_interval(top, -bottom)
    assert (turned.low, turned.high) == pytest.approx((-found.high, -found.low))
    same = ratio_interval(2 * bottom, bottom)
    assert (same.low, same.high) == pytest.approx((2, 2), abs=1e-12)
    np.testing.assert_allclose(ratio_interval(top, np.full(8, 2.0)).low, t_interval(top).low / 2, atol=1e-12)


def test_ratio_coverage():
    """2,000 samples of 10 correlated pairs, ratio 0.6: 95% ± 0.5."""
    rng, trials = np.random.default_rng(4), 2000
    pairs = rng.multivariate_normal([1.2, 2.0], [[1.0, 0.5], [0.5, 1.0]], size=(trials, 10))
    seen = []
    for one in pairs:
        try:
            seen.append(covers(ratio_interval(one[:, 0], one[:, 1]), 0.6))
        except StatsError:  # unbounded, about 1 of 1,000
            continue
    assert len(seen) > 0.99 * trials
    assert abs(np.mean(seen) - 0.95) < 4 * error(0.95, trials)


@pytest.mark.parametrize("make", [
    t_interval, bca_interval, lambda v: two_level_bootstrap(v, np.arange(np.size(v))), lambda v: ratio_interval(v, v),
])  # fmt: skip
def test_refuses_bad_values(make):
    for values, says in (([1.0, float("nan"), 2.0], "NaN or inf, such as nan at \\(1,\\)"), ([1.0, float("inf")], "such as inf"),
                         ([1.0], "1 entries; allowed: at least 2"), ([], "0 entries"), ([[1.0, 2.0]], r"shape \(1, 2\)"),
                         (3.0, r"shape \(\)"), (["a", "b"], "allowed: numbers")):  # fmt: skip
        with pytest.raises(StatsError, match=says):
            make(values)


def test_refuses_bad_choices():
    for confidence in (0, 1, 95, -0.1, float("nan"), "0.95", True, None, 1j):
        with pytest.raises(StatsError, match="confidence="):
            t_interval(SLEEP, confidence)
    with pytest.raises(StatsError, match="allowed: at least 400"):
        bca_interval(SLEEP, draws=399)
    with pytest.raises(StatsError, match=r"draws=10000 leave 5 .* at least 20000"):
        two_level_bootstrap(SLEEP, np.arange(10), confidence=0.999)
    with pytest.raises(StatsError, match=r"draws=2\.5"):
        bca_interval(SLEEP, draws=2.5)
    with pytest.raises(StatsError, match=r"units have shape \(9,\)"):
        two_level_bootstrap(SLEEP, np.arange(9))
    with pytest.raises(StatsError, match="1 missing"):
        two_level_bootstrap(SLEEP, [*range(9), None])
    with pytest.raises(StatsError, match="at least 2 different"):
        two_level_bootstrap(SLEEP, ["a"] * 10)
    with pytest.raises(StatsError, match="NaN or inf in"):
        two_level_bootstrap(SLEEP, np.arange(10), lambda x: np.nan if len(set(x)) < 6 else 1.0)
    with pytest.raises(StatsError, match=r"successes=21 .* from 0 to 20"):
        clopper_pearson(21, 20)
    with pytest.raises(StatsError, match="n=0"):
        clopper_pearson(0, 0)
    with pytest.raises(StatsError, match="numerator have 10 units and denominator 9"):
        ratio_interval(SLEEP, SLEEP[:9])
