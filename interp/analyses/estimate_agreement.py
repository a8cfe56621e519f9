"""How far estimated effects can be trusted: held against exact ones, and against what they must sum to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
from torch import Tensor

ERROR = 0.1  # above this relative error (of estimates, or of completeness) sizes are not to be read
RANKING = 0.8  # below this Spearman correlation not even the order is


@dataclass(frozen=True)
class Agreement:
    """Estimates against exact effects.

    pearson, spearman: over all validated cells and examples, NaN where either side is constant. largest: the largest difference,
    in the metric's unit. relative: Σ|estimate − exact| / Σ|exact|. n_cells: cells measured exactly; n: cell-example pairs that
    change anything. completeness: the worst site's Σ|error| / Σ|effect| over examples, None to first order.
    verdict: "effects" (relative error and completeness at most 0.1: sizes can be read), "ranking only" (either above 0.1, and
    Spearman at least 0.8), "unreliable" (Spearman below that, too), "not validated" (no cells measured).
    """

    pearson: float
    spearman: float
    largest: float
    relative: float
    n_cells: int
    n: int
    completeness: float | None
    verdict: str


def agreement_of(estimate: Tensor, exact: Tensor, sums: Sequence[tuple[Tensor, Tensor]] = ()) -> Agreement:
    """estimate, exact [n]: pairs; sums: per site and layer (Σ attributions [example], effect of the whole site [example])."""
    a, b = (one.double().numpy() for one in (estimate, exact))
    relative, worst = _ratio(np.abs(a - b).sum(), np.abs(b).sum()), None
    if sums:
        worst = max(_ratio(float((s - e).abs().sum()), float(e.abs().sum())) for s, e in sums)
    spearman = _correlation(*(pd.Series(one).rank().to_numpy() for one in (a, b)))
    verdict = _verdict(len(a), relative, worst, spearman)
    largest = float(np.abs(a - b).max()) if len(a) else math.nan
    return Agreement(_correlation(a, b), spearman, largest, relative if len(a) else math.nan, 0, len(a), worst, verdict)


def _verdict(n: int, relative: float, completeness: float | None, spearman: float) -> str:
    if n == 0:
        return "not validated"
    if relative <= ERROR and (completeness is None or completeness <= ERROR):
        return "effects"
    return "ranking only" if spearman >= RANKING else "unreliable"  # NaN, a constant side, ranks nothing


def _ratio(error: float, size: float) -> float:
    return 0.0 if error == 0 else math.inf if size == 0 else float(error / size)


def _correlation(a: np.ndarray, b: np.ndarray) -> float:
    if len(a) < 2 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))
