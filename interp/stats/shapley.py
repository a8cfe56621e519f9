"""Exact Shapley values (Shapley 1953) and pairwise interactions (Grabisch & Roubens 1999) of up to ten players.

Effects of parts of a network do not add up: single effects can sum to three times the whole. The Shapley value of a player is
what it adds to a coalition, averaged over all orders in which the coalition can be built, so the values do add up to the
whole."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

MOST = 10


class ShapleyError(ValueError):
    """Players or coalitions that do not make a game; the message says what is allowed."""


@dataclass(frozen=True, eq=False)
class Shapley:
    """values [player …]: what each player adds; interactions [player player …]: what two add together beyond their own (0 on the
    diagonal); alone [player …]: v({i}) − v(∅); total […]: v(all) − v(∅). The trailing axes are those of the game's values."""

    players: tuple[str, ...]
    values: np.ndarray
    interactions: np.ndarray
    alone: np.ndarray
    total: np.ndarray

    def share(self) -> np.ndarray:
        """Values over the total, both averaged over the trailing axes: a ratio of means [player]."""
        mean = self.values.reshape(len(self.players), -1).mean(1)
        total = float(self.total.mean())
        if abs(total) < 1e-12:
            raise ShapleyError(f"the whole adds {total:.3g} on average: shares of nothing are not defined")
        return mean / total

    def table(self) -> pd.DataFrame:
        """One row per player, and one per pair: player, other (empty for a player's own row), value, alone (nan for a pair),
        share (of the total; pairs: interaction over the total), all means over the trailing axes."""
        total = float(self.total.mean())
        ratio = (lambda x: x / total) if abs(total) > 1e-12 else (lambda x: float("nan"))
        rows = [{"player": name, "other": "", "value": float(self.values[i].mean()), "alone": float(self.alone[i].mean()),
                 "share": ratio(float(self.values[i].mean()))} for i, name in enumerate(self.players)]  # fmt: skip
        for i, j in itertools.combinations(range(len(self.players)), 2):
            value = float(self.interactions[i, j].mean())
            rows.append({"player": self.players[i], "other": self.players[j], "value": value, "alone": float("nan"),
                         "share": ratio(value)})  # fmt: skip
        return pd.DataFrame(rows)


def coalitions(players: Sequence[str]) -> list[frozenset[str]]:
    """All 2^n sets of players, the smallest first. ShapleyError for more than ten, for none, or for a name twice."""
    if not 1 <= len(players) <= MOST or len(set(players)) != len(players):
        raise ShapleyError(f"players={list(players)!r} are not allowed; allowed: 1 to {MOST} different names")
    return [frozenset(one) for size in range(len(players) + 1) for one in itertools.combinations(players, size)]


def shapley(players: Sequence[str], values: Mapping[Any, Any]) -> Shapley:
    """Exact values of a game: `values` maps every coalition (any iterable of names) to a number or to an array of one shape.

    By Harsanyi's dividends d(S) = Σ over T ⊆ S of (−1)^|S∖T| v(T): value of i = Σ over S ∋ i of d(S)/|S|; interaction of i, j =
    Σ over S ⊇ {i, j} of d(S)/(|S| − 1). Raises ShapleyError for a coalition that is missing or unknown.
    """
    players, given = tuple(players), {frozenset(key): np.asarray(value, dtype=float) for key, value in values.items()}
    sets, n = coalitions(players), len(players)
    missing, unknown = [s for s in sets if s not in given], [s for s in given if s not in sets]
    if missing or unknown:
        one = sorted((missing + unknown)[0])
        raise ShapleyError(f"{len(missing)} of {len(sets)} coalitions are missing and {len(unknown)} unknown, such as {one}; "
                           f"allowed: each of the 2^{n} sets of {list(players)}")  # fmt: skip
    shapes = {value.shape for value in given.values()}
    if len(shapes) > 1:
        raise ShapleyError(f"values have shapes {sorted(shapes)}; allowed: one shape for all coalitions")
    shape = shapes.pop()
    bit = {name: 1 << i for i, name in enumerate(players)}
    dividends = np.empty((1 << n, *shape))
    for one in sets:
        dividends[sum(bit[name] for name in one)] = given[one]
    whole, empty = dividends[-1].copy(), dividends[0].copy()
    alone = np.stack([dividends[1 << i] - empty for i in range(n)])
    index = np.arange(1 << n)
    for i in range(n):  # v -> dividends, one player at a time
        having = index[(index >> i) & 1 == 1]
        dividends[having] -= dividends[having ^ (1 << i)]
    size = np.array([int(s).bit_count() for s in index], dtype=float)
    weigh = lambda which, by: np.tensordot(1 / by[which], dividends[which], 1)  # noqa: E731
    value = np.stack([weigh(index[(index >> i) & 1 == 1], size) for i in range(n)])
    pairs = np.zeros((n, n, *shape))
    for i, j in itertools.combinations(range(n), 2):
        both = index[((index >> i) & 1 == 1) & ((index >> j) & 1 == 1)]
        pairs[i, j] = pairs[j, i] = weigh(both, size - 1)
    return Shapley(players, value, pairs, alone, whole - empty)
