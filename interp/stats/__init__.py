"""Intervals and tests over units (trained seeds), corrections for several tests, and exact Shapley values.

Numbers in, numbers out: nothing here knows models or tables of this package.
"""

from interp.stats.check import StatsError
from interp.stats.intervals import (
    Interval,
    bca_interval,
    clopper_pearson,
    ratio_interval,
    t_half_width,
    t_interval,
    two_level_bootstrap,
)
from interp.stats.multiple import MaxT, benjamini_hochberg, holm, max_t
from interp.stats.shapley import Shapley, ShapleyError, coalitions, shapley
from interp.stats.tests import Paired, Trend, binomial_p, paired_difference, sign_flip, tost, trend

__all__ = [
    "Interval",
    "MaxT",
    "Paired",
    "Shapley",
    "ShapleyError",
    "StatsError",
    "Trend",
    "bca_interval",
    "benjamini_hochberg",
    "binomial_p",
    "clopper_pearson",
    "coalitions",
    "holm",
    "max_t",
    "paired_difference",
    "ratio_interval",
    "shapley",
    "sign_flip",
    "t_half_width",
    "t_interval",
    "tost",
    "trend",
    "two_level_bootstrap",
]
