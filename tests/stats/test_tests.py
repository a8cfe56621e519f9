"""Tests over units against published examples, brute force, and their size in simulations (± 4 Monte-Carlo errors)."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from interp.stats import StatsError, binomial_p, paired_difference, sign_flip, t_interval, tost, trend

DARWIN = [
    49,
    -67,
    8,
    16,
    6,
    23,
    28,
    41,
    14,
    29,
    56,
    24,
    75,
    60,
    -48,
]  # eighths of an inch, crossed − self-fertilised maize
DRUG1 = [0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0]  # Student (1908), hours of sleep gained
DRUG2 = [1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4]


def flips(values):
    return np.array([np.dot(signs, values) for signs in itertools.product((1, -1), repeat=len(values))])


def test_sign_flip_of_darwins_maize():
    """Fisher (1935), section 21: 1,726 of the 32,768 sums are as far from 0 as the observed 314."""
    assert sign_flip(DARWIN) == pytest.approx(1726 / 32768, abs=1e-12)
    assert sign_flip(DARWIN, alternative="greater") == pytest.approx(863 / 32768, abs=1e-12)
    assert sign_flip([-x for x in DARWIN], alternative="less") == pytest.approx(863 / 32768, abs=1e-12)
    assert sign_flip([x + 3 for x in DARWIN], null=3) == pytest.approx(1726 / 32768, abs=1e-12)


def test_sign_flip_by_hand():
    """Of one sign: 2 / 2^n, which 5 units leave above .05; a unit at the null halves the number of different flips."""
    assert sign_flip([1, 2, 3, 4, 5]) == 2 / 32
    assert sign_flip(np.arange(1, 11) / 7) == 2 / 1024
    assert sign_flip(np.subtract(DRUG2, DRUG1)) == pytest.approx(4 / 1024)
    assert sign_flip([0, 0, 0]) == 1 and sign_flip([2.0, 2.0], null=2.0) == 1
    assert sign_flip([1, 1], alternative="less") == 1


def test_equal_sums_are_ties_whatever_their_rounding():
    values = np.array([0.1, 0.2, -0.3, 0.4, -0.7, 0.6])
    sums = flips(np.round(values * 10).astype(int))  # in tenths, without rounding
    for alternative, count in (("greater", (sums >= 3).sum()), ("less", (sums <= 3).sum())):
        assert sign_flip(values, alternative=alternative) == pytest.approx(count / 64, abs=1e-12)
    # without the rounding of sums this one gives 32 / 64
    assert sign_flip([-0.3, 0.6, -0.4, -0.4, 0.3, 0.2], alternative="less") == pytest.approx(34 / 64)
    assert sign_flip([0.1, 0.2, -0.3], alternative="greater") == pytest.approx(5 / 8)


def test_more_than_sixteen_units_are_drawn():
    values = np.random.default_rng(0).normal(0.45, 1, 17)
    exact = (np.abs(flips(values)) >= abs(values.sum()) - 1e-12).mean()
    found = sign_flip(values)
    assert found == pytest.approx(exact, abs=5 * np.sqrt(exact / 100_000)) and found != exact
    assert sign_flip(values) == found != sign_flip(values, seed=1)
    assert sign_flip(np.ones(40)) == pytest.approx(2 / 100_001)


def test_size_of_sign_flips():
    """1,500 samples of 8 skewless units: 12 of 256 flips lie within .05, so 4.7% ± 0.5."""
    samples = np.random.default_rng(1).laplace(size=(1500, 8))
    seen = np.mean([sign_flip(one) <= 0.05 for one in samples])
    assert abs(seen - 12 / 256) < 4 * np.sqrt(12 / 256 / 1500)


def test_paired_difference_of_students_sleep_data():
    """R: t.test(paired = TRUE) gives 1.58 [0.7001142, 2.4598858]; d_z = 1.58 / 1.229995."""
    found = paired_difference(DRUG2, DRUG1)
    assert (found.interval.low, found.interval.high) == pytest.approx((0.7001142, 2.4598858), abs=5e-8)
    assert found.p == pytest.approx(4 / 1024) and found.d_z == pytest.approx(1.58 / 1.229995, abs=1e-5)
    turned = paired_difference(DRUG1, DRUG2, 0.9)
    assert turned.d_z == -found.d_z and turned.interval.confidence == 0.9 and turned.p == found.p
    assert list(found.row()) == ["estimate", "low", "high", "n", "confidence", "how", "p", "d_z"]
    assert paired_difference([2, 3], [1, 2]).d_z == np.inf and np.isnan(paired_difference([1, 2], [1, 2]).d_z)


def test_tost_is_the_larger_of_two_t_tests():
    values = np.subtract(DRUG2, DRUG1)
    for low, high in ((0, 3), (1, 2), (-1, 1), (1.5, 9)):
        known = max(stats.ttest_1samp(values, low, alternative="greater").pvalue,
                    stats.ttest_1samp(values, high, alternative="less").pvalue)  # fmt: skip
        assert tost(values, low, high) == pytest.approx(known, abs=1e-12)
    inner = t_interval(values, 0.9)
    assert tost(values, inner.low, 99) == pytest.approx(0.05) and tost(values, -99, inner.high) == pytest.approx(0.05)
    assert tost([1, 1, 1], 0, 2) == 0 and tost([1, 1, 1], 1, 2) == 1


def test_size_of_tost():
    """4,000 samples of 10 whose mean lies on the margin: 5% ± 0.35; inside wide margins nearly all."""
    samples = np.random.default_rng(2).normal(1, 0.5, size=(4000, 10))
    seen = np.mean([tost(one, -1, 1) <= 0.05 for one in samples])
    assert abs(seen - 0.05) < 4 * np.sqrt(0.05 * 0.95 / 4000)
    assert np.mean([tost(one, 0, 2) <= 0.05 for one in samples[:500]]) > 0.99


def layers(values):
    """values [unit][layer] -> table of seed, layer, share, its rows in an order of their own."""
    rows = [{"seed": f"s{u}", "layer": l, "share": y} for u, one in enumerate(values) for l, y in enumerate(one)]
    return pd.DataFrame(rows).sort_values("share", kind="stable").reset_index(drop=True)


def test_trend_by_hand():
    """ρ = 1 − 6 Σd² / (n (n² − 1)) without ties: orders 1234, 2134, 4321 and 2413 give 1, .8, −1 and 0."""
    found = trend(layers([[1, 2, 3, 4], [2, 1, 3, 4], [4, 3, 2, 1], [2, 4, 1, 3]]), "layer", "share", "seed")
    assert dict(found.rho) == pytest.approx({"s0": 1, "s1": 0.8, "s2": -1, "s3": 0}, abs=1e-12)
    assert (found.rho.name, found.rho.index.name) == ("rho", "seed")
    assert (found.positive, found.n, found.p) == (2, 4, 1.0)  # 2 of the 3 untied
    assert found.interval.estimate == pytest.approx(0.2) and found.interval.low == -1 and found.interval.high == 1
    rising = trend(layers([[1, 2, 3, 4]] * 9 + [[1, 2, 4, 3]]), "layer", "share", "seed")
    assert rising.p == 2 / 1024 and rising.positive == 10
    assert rising.interval.low == pytest.approx(t_interval([1.0] * 9 + [0.8]).low) and rising.interval.high == 1
    assert trend(layers([[2, 4, 1, 3]] * 3), "layer", "share", "seed").p == 1


def test_trend_of_a_published_example():
    """IQ against hours of television: ρ = −29/165."""
    iq, hours = [106, 100, 86, 101, 99, 103, 97, 113, 112, 110], [7, 27, 2, 50, 28, 29, 20, 12, 6, 17]
    table = pd.DataFrame({"iq": iq * 2, "hours": hours * 2, "seed": [0] * 10 + [1] * 10})
    np.testing.assert_allclose(trend(table, "iq", "hours", "seed").rho, -29 / 165, atol=1e-12)


def test_size_of_a_trends_sign_test():
    """200 tables of 10 units × 6 layers without a trend: p ≤ .05 for 0, 1, 9 or 10 positive units, 22/1024 = 2.1% ± 1.0."""
    rng = np.random.default_rng(3)
    seen = np.mean([trend(layers(rng.random((10, 6))), "layer", "share", "seed").p <= 0.05 for _ in range(200)])
    assert abs(seen - 22 / 1024) < 4 * np.sqrt(22 / 1024 / 200)


def test_binomial_p_of_published_numbers():
    """R's binom.test(682, 925, p = 3/4): .3825. The lady tasting tea eight times by coin: 1/256."""
    assert binomial_p(682, 925, 0.75, "two-sided") == pytest.approx(0.3825, abs=5e-5)
    assert binomial_p(8, 8, 0.5) == 1 / 256
    assert binomial_p(1, 10, 0.1) == pytest.approx(1 - 0.9**10) and binomial_p(0, 10, 0.1, "less") == pytest.approx(
        0.9**10
    )


@pytest.mark.parametrize("test", [sign_flip, lambda v: tost(v, -1, 1), lambda v: paired_difference(v, v)])
def test_refuses_bad_values(test):
    for values, says in (([1.0, np.nan], "NaN or inf"), ([1.0, -np.inf], "-inf at"), ([1.0], "at least 2"),
                         (np.ones((2, 3)), r"shape \(2, 3\)")):  # fmt: skip
        with pytest.raises(StatsError, match=says):
            test(values)


def test_refuses_bad_choices():
    for given, says in (({"alternative": "larger"}, "'larger' is not allowed; allowed: 'two-sided', 'greater', 'less'"),
                        ({"null": np.nan}, "null=nan"), ({"null": "0"}, "null='0'")):  # fmt: skip
        with pytest.raises(StatsError, match=says):
            sign_flip(DARWIN, **given)
    with pytest.raises(StatsError, match="a have 10 units and b 9"):
        paired_difference(DRUG1, DRUG2[:9])
    with pytest.raises(StatsError, match=r"low=1\.0, high=1\.0"):
        tost(DRUG1, 1, 1)
    with pytest.raises(StatsError, match="confidence=95"):
        paired_difference(DRUG1, DRUG2, 95)
    for n, k, chance, says in ((10, 11, 0.5, "successes=11"), (10, 2.0, 0.5, "successes=2.0"), (10, 2, 0, "chance=0"),
                               (10, 2, 1.5, "chance=1.5"), (0, 0, 0.5, "n=0")):  # fmt: skip
        with pytest.raises(StatsError, match=says):
            binomial_p(k, n, chance)


def test_refuses_tables_without_a_trend_to_find():
    table = layers([[1, 2, 3], [3, 1, 2]])
    with pytest.raises(StatsError, match=r"lacks column\(s\) \['depth'\]"):
        trend(table, "depth", "share", "seed")
    with pytest.raises(StatsError, match=r"share of seed s1 is 2\.0 in all 3 rows"):
        trend(layers([[1, 2, 3], [2, 2, 2]]), "layer", "share", "seed")
    with pytest.raises(StatsError, match="1 entries; allowed: at least 2"):
        trend(layers([[1, 2, 3]]), "layer", "share", "seed")
    with pytest.raises(StatsError, match="2 entries; allowed: at least 3"):
        trend(layers([[1, 2], [1, 2]]), "layer", "share", "seed")
    with pytest.raises(StatsError, match="such as nan"):
        trend(layers([[1, np.nan, 3], [3, 1, 2]]), "layer", "share", "seed")
    with pytest.raises(StatsError, match="1 missing labels"):
        trend(table.assign(seed=[None, *table["seed"][1:]]), "layer", "share", "seed")
