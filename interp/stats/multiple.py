"""Several tests at once: Holm for the primaries written down before, Benjamini–Hochberg and max-|t| for maps of cells."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from interp.stats.check import StatsError, as_values, enough, finite, level

TIE = 1e-12  # of r² in [0, 1]: flips whose maxima differ by rounding only are equal
CHUNK = 8_000_000  # flips × cells held at once


def holm(p: Mapping[str, float | None]) -> dict[str, float]:
    """p values corrected by Holm (1979), by name: compared with α they keep the chance of any false one below α.

    None is a test that was written down and not run: it counts in m as p = 1, so that leaving out tests makes none easier.
    StatsError for no p values, or for one outside [0, 1].
    """
    found = _probabilities([1.0 if value is None else value for value in p.values()], f"p ({', '.join(map(str, p))})")
    return dict(zip(p, _adjusted(found, "holm").tolist(), strict=True))


def benjamini_hochberg(p: Any) -> np.ndarray:
    """p values adjusted by Benjamini & Hochberg (1995), of the same shape (any).

    Those at most q have a false discovery rate of at most q, where tests are independent or positively dependent.
    """
    found = _probabilities(p, "p", None)
    return _adjusted(found.ravel(), "fdr_bh").reshape(found.shape)


def _adjusted(p: np.ndarray, method: str) -> np.ndarray:
    from statsmodels.stats.multitest import multipletests  # half a second that `import interp` need not wait for

    return np.asarray(multipletests(p, method=method)[1])


def _probabilities(p: Any, name: str, dimensions: int | None = 1) -> np.ndarray:
    found = as_values(p, name, 1, dimensions)
    wrong = found[(found < 0) | (found > 1)]
    if not found.size or wrong.size:
        raise StatsError(f"{name} hold {list(wrong[:3])}; allowed: at least one number, each in [0, 1]")
    return found


@dataclass(frozen=True, eq=False)
class MaxT:
    """Arrays [cells…]: mean over units; t, (mean − null) / standard error; p, corrected for all cells; half_width, with which
    mean ± half_width hold all cells at once with `confidence` (inf where there are too few units for any interval).
    critical: the |t| that a cell must exceed; n: units."""

    mean: np.ndarray
    t: np.ndarray
    p: np.ndarray
    half_width: np.ndarray
    critical: float
    n: int
    confidence: float = 0.95


def max_t(values: Any, null: float = 0.0, draws: int = 10_000, seed: int = 0, confidence: float = 0.95) -> MaxT:
    """Which cells of a map differ from `null`, with the chance of any false one controlled (Westfall & Young 1993).

    values [unit, cells…], at least 2 units: one map per trained seed. A flip turns the sign of a unit's whole map minus null; the
    p of a cell is the share of flips whose largest |t| over cells reaches the cell's |t|. All 2^n flips where they are no more
    than `draws` (13 units for 10,000), else random ones with the observed one counted. Cells that equal null in all units have
    t = 0 and p = 1. An interval excludes null where the test rejects; fewer than 6 units cannot reject at .05.
    """
    found, null, confidence = as_values(values, dimensions=None), finite(null, "null"), level(confidence)
    n, shape = len(found), found.shape[1:]
    if found.ndim < 2 or not found[0].size:
        raise StatsError(f"values have shape {found.shape}; allowed: [unit, at least one cell]")
    draws, cells = enough(draws, 1 - confidence), found.reshape(n, -1) - null
    mean, std = cells.mean(0), cells.std(0, ddof=1)
    squares = (cells**2).sum(0)
    # |t| rises with r² = n mean² / Σ x², whose denominator no flip changes: t² = (n − 1) r² / (1 − r²)
    share = lambda m: np.divide(n * m**2, squares, out=np.zeros_like(m), where=squares > 0)  # noqa: E731
    observed = share(mean)
    exact = 2**n <= draws
    highest = np.sort(
        np.concatenate([share(signs @ cells / n).max(1) for signs in _signs(n, cells.shape[1], draws, exact, seed)])
    )
    reached = len(highest) - np.searchsorted(highest, observed - TIE) + (not exact)
    total = len(highest) + (not exact)
    critical = _critical(highest, total, n, confidence)
    se = std / math.sqrt(n)
    t = np.where(squares > 0, np.divide(mean, se, out=np.copysign(np.full_like(mean, np.inf), mean), where=se > 0), 0.0)
    half = np.full_like(se, np.inf) if math.isinf(critical) else critical * se
    p = reached / total
    mean, t, p, half = (part.reshape(shape) for part in (mean + null, t, p, half))
    return MaxT(mean, t, p, half, critical, n, confidence)


def _signs(n: int, cells: int, draws: int, exact: bool, seed: int) -> Iterator[np.ndarray]:
    """Chunks of flips [flip, unit] of ±1; exact: the half of all 2^n whose first sign is +: the other half has the same |t|."""
    step = max(1, CHUNK // max(cells, n))
    if exact:
        flips = np.array([(1.0, *rest) for rest in itertools.product((1.0, -1.0), repeat=n - 1)])
        yield from (flips[i : i + step] for i in range(0, len(flips), step))
        return
    rng = np.random.default_rng(seed)
    for first in range(0, draws, step):
        yield rng.choice([1.0, -1.0], size=(min(step, draws - first), n))


def _critical(highest: np.ndarray, total: int, n: int, confidence: float) -> float:
    """The |t| beyond which p ≤ 1 − confidence; inf where even a flip of all signs alike is too common."""
    allowed = math.floor((1 - confidence) * total + 1e-9) - (
        total - len(highest)
    )  # flips that may reach a rejected cell
    if allowed < 1:
        return math.inf
    r2 = (highest[len(highest) - allowed - 1] if allowed < len(highest) else 0.0) + TIE
    return math.inf if r2 >= 1 else math.sqrt((n - 1) * r2 / (1 - r2))
