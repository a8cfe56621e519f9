"""Tests over units (trained seeds): exact sign flips, paired differences, equivalence, trends, counts against chance."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import scipy  # loads scipy.stats when it is first used: a second that `import interp` need not wait for

from interp.stats.check import StatsError, as_pair, as_values, finite, level, one_of, whole
from interp.stats.intervals import Interval, t_interval

ALTERNATIVES = ("two-sided", "greater", "less")
EXACT = 16  # units up to which all 2^n sign flips are taken
DRAWS = 100_000


def sign_flip(values: Any, null: float = 0.0, alternative: str = "two-sided", seed: int = 0) -> float:
    """p of a mean equal to `null`, by flipping the sign of each unit's value − null (Fisher 1935, section 21); values [unit].

    Exact for up to 16 units (all 2^n flips: the least two-sided p is 2 / 2^n, .0625 for 5 units and .002 for 10), else 100,000
    random flips from `seed` with the observed one counted (Phipson & Smyth 2010). Assumes values symmetric about the null.
    """
    found, null = as_values(values), finite(null, "null")
    one_of(alternative, "alternative", ALTERNATIVES)
    gaps = found - null
    gaps = gaps / (np.abs(gaps).max() or 1.0)
    mean = lambda x, axis: np.round(x.mean(axis), 12)  # noqa: E731  equal sums must stay ties whatever their rounding
    many = np.inf if len(gaps) <= EXACT else DRAWS
    found = scipy.stats.permutation_test((gaps,), mean, permutation_type="samples", n_resamples=many, vectorized=True,
                                   alternative=alternative, batch=max(1, 4_000_000 // len(gaps)),
                                   random_state=np.random.default_rng(seed))  # fmt: skip  # pyright: ignore
    return float(found.pvalue)


@dataclass(frozen=True)
class Paired:
    """interval: of the mean difference; p: two-sided sign-flip p; d_z: mean difference / its standard deviation over units (Cohen
    1988), ±inf where all differences are equal and NaN where all are 0."""

    interval: Interval
    p: float
    d_z: float

    def row(self) -> dict[str, Any]:
        """One flat row of a table: estimate, low, high, n, confidence, how, p, d_z."""
        return {**asdict(self.interval), "p": self.p, "d_z": self.d_z}


def paired_difference(a: Any, b: Any, confidence: float = 0.95, seed: int = 0) -> Paired:
    """How far a exceeds b over paired units: a, b [unit], entry i of both from seed i. Mean of a − b with its t interval, p of
    `sign_flip`, d_z. StatsError for unequal lengths, as of everything in `interp.stats`."""
    one, two = as_pair(a, b, ("a", "b"))
    gaps = one - two
    interval, std = t_interval(gaps, confidence), gaps.std(ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        d_z = float(np.divide(interval.estimate, std))
    return Paired(interval, sign_flip(gaps, seed=seed), d_z)


def tost(values: Any, low: float, high: float) -> float:
    """p of "the mean is not inside (low, high)": the larger of two one-sided t tests (Schuirmann 1987); values [unit].

    p below α exactly where the t interval of confidence 1 − 2α lies inside. The margins have to be written before the run. Units
    that are all equal give p = 0 inside the margins, else 1.
    """
    found, low, high = as_values(values), finite(low, "low"), finite(high, "high")
    if not low < high:
        raise StatsError(f"low={low!r}, high={high!r} are not allowed; allowed: low < high")
    if np.ptp(found) == 0:
        return 0.0 if low < found[0] < high else 1.0
    from statsmodels.stats.weightstats import DescrStatsW  # slow to import, and `import interp` need not wait for it

    return float(DescrStatsW(found).ttost_mean(low, high)[0])


@dataclass(frozen=True, eq=False)
class Trend:
    """rho: Spearman's ρ per unit (index: unit); positive: units with ρ > 0; n: units; p: exact two-sided sign test over the units
    with ρ ≠ 0; interval: t interval of the mean ρ, cut at ±1."""

    rho: pd.Series
    positive: int
    n: int
    p: float
    interval: Interval


def trend(table: pd.DataFrame, x: str, y: str, unit: str, confidence: float = 0.95) -> Trend:
    """Whether y rises with x (such as layers) within each unit: Spearman's ρ per unit, and a sign test over units.

    table: one row per unit and x (or several), columns x and y numbers. StatsError for a missing column, fewer than 2 units or 3
    rows in a unit, or a unit in which x or y is constant.
    """
    missing = [name for name in (x, y, unit) if name not in table.columns]
    if missing:
        raise StatsError(f"the table lacks column(s) {missing}; it has {list(table.columns)}")
    if table[unit].isna().any():
        raise StatsError(
            f"column {unit!r} has {int(table[unit].isna().sum())} missing labels; allowed: a unit for every row"
        )
    found = {name: _rho(part[x], part[y], f"of {unit} {name}") for name, part in table.groupby(unit, sort=False)}
    rho = as_values(list(found.values()), f"units ({unit})")
    interval = t_interval(rho, confidence)
    interval = Interval(
        interval.estimate, max(interval.low, -1.0), min(interval.high, 1.0), len(rho), interval.confidence, "t"
    )
    positive, untied = int((rho > 0).sum()), int((rho != 0).sum())
    p = float(scipy.stats.binomtest(positive, untied, 0.5).pvalue) if untied else 1.0
    return Trend(pd.Series(rho, index=pd.Index(list(found), name=unit), name="rho"), positive, len(rho), p, interval)


def _rho(x: Any, y: Any, of: str) -> float:
    one, two = as_values(x, f"{x.name} {of}", 3), as_values(y, f"{y.name} {of}", 3)
    for name, values in ((x.name, one), (y.name, two)):
        if np.ptp(values) == 0:
            raise StatsError(f"{name} {of} is {values[0]} in all {len(values)} rows; allowed: values that vary")
    return float(scipy.stats.spearmanr(one, two)[0])  # pyright: ignore[reportArgumentType]


def binomial_p(successes: int, n: int, chance: float, alternative: str = "greater") -> float:
    """Exact binomial p of `successes` of n independent trials with success rate `chance`, a number in (0, 1)."""
    n = whole(n, "n", 1)
    successes, chance = whole(successes, "successes", 0, n), level(chance, "chance")
    return float(scipy.stats.binomtest(successes, n, chance, one_of(alternative, "alternative", ALTERNATIVES)).pvalue)  # pyright: ignore
