"""What every function of `interp.stats` refuses: values that are no finite numbers, too few units, levels outside (0, 1)."""

from __future__ import annotations

import math
import numbers
from typing import Any

import numpy as np

BEYOND = 10  # draws that must lie beyond a percentile: 10,000 for the 99.9th


class StatsError(ValueError):
    """Numbers that no interval or test can be made of; the message names what came and what is allowed."""


def as_values(values: Any, name: str = "values", least: int = 2, dimensions: int | None = 1) -> np.ndarray:
    """float64 array of finite numbers with at least `least` entries along its first axis (the unit); dimensions None: any."""
    try:
        found = np.asarray(values, dtype=float)
    except (TypeError, ValueError):
        raise StatsError(f"{name}={values!r} are not allowed; allowed: numbers") from None
    if found.ndim == 0 or (dimensions is not None and found.ndim != dimensions):
        allowed = f"{dimensions} axis, one value per unit" if dimensions else "at least one axis, the unit"
        raise StatsError(f"{name} have shape {found.shape}; allowed: {allowed}")
    if len(found) < least:
        raise StatsError(f"{name} have {len(found)} entries; allowed: at least {least}")
    wrong = ~np.isfinite(found)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        raise StatsError(
            f"{name} hold {int(wrong.sum())} of NaN or inf, such as {found[where]} at {where}; allowed: finite numbers"
        )
    return found


def as_pair(a: Any, b: Any, names: tuple[str, str]) -> tuple[np.ndarray, np.ndarray]:
    """Two checked arrays of one length, entry i of both from unit i."""
    one, two = as_values(a, names[0]), as_values(b, names[1])
    if len(one) != len(two):
        raise StatsError(f"{names[0]} have {len(one)} units and {names[1]} {len(two)}; allowed: the same units in both")
    return one, two


def _real(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def finite(value: Any, name: str) -> float:
    """`value` as a float, if it is one finite number."""
    if not _real(value) or not math.isfinite(value):
        raise StatsError(f"{name}={value!r} is not allowed; allowed: a finite number")
    return float(value)


def level(value: Any, name: str = "confidence") -> float:
    """`value` as a float, if it lies strictly between 0 and 1."""
    if not _real(value) or not 0 < value < 1:
        raise StatsError(f"{name}={value!r} is not allowed; allowed: a number between 0 and 1, both excluded")
    return float(value)


def whole(value: Any, name: str, low: int, high: int | None = None) -> int:
    """`value` as an int, if it is a whole number in [low, high]."""
    right = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not right or value < low or (high is not None and value > high):
        raise StatsError(
            f"{name}={value!r} is not allowed; allowed: a whole number from {low} to {high if high is not None else '∞'}"
        )
    return int(value)


def enough(draws: Any, tail: float) -> int:
    """`draws` as an int, if at least ten of them lie beyond a percentile whose tail is `tail`: fewer leave it to chance."""
    least = math.ceil(BEYOND / tail - 1e-6)
    if whole(draws, "draws", 1) < least:
        raise StatsError(
            f"draws={draws} leave {draws * tail:.3g} beyond the percentile; allowed: at least {least} ({BEYOND} beyond)"
        )
    return int(draws)


def one_of(value: Any, name: str, allowed: tuple[str, ...]) -> str:
    """`value`, if it is one of `allowed`."""
    if value not in allowed:
        raise StatsError(f"{name}={value!r} is not allowed; allowed: {', '.join(map(repr, allowed))}")
    return value
