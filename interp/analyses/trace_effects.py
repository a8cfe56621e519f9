"""What a table of causal tracing says: average indirect effects per role and layer, how far two maps agree, held-out peaks.

The unit is the fact: draws of noise and tokens of one role are averaged within it first, so that more draws make no more facts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from interp.analyses.joint_metric import TraceError
from interp.stats import max_t, t_half_width

CELL = ("layer", "role")
MAP = ("corruption", "metric", "site", "severed")


def trace_effects(table: pd.DataFrame, confidence: float = 0.95, by: str = "role") -> pd.DataFrame:
    """Average indirect effect (Meng et al. 2022) per corruption × metric × site × severed × layer × role over facts.

    table: of `TraceResult.table()`, or several of them joined; rows of a fact that the model gets wrong belong to it unless they
    were left out (`table[table.right]`; n says how many facts stayed). by: "role" or "position".
    Columns: those, first_layer, last_layer, clipped, aie (mean over facts of value − corrupted, in the metric's unit), low, high
    (t interval over facts), n (facts), ate (mean of clean − corrupted over the same facts), share (aie / ate, a ratio of means).
    """
    _need(table, [*MAP, "layer", by, "fact", "clean", "corrupted", "value"])
    _fraction(confidence)
    keys = [*MAP, "layer", "first_layer", "last_layer", "clipped", by]
    gaps = table.assign(
        ie=_wide(table, "value") - _wide(table, "corrupted"), te=_wide(table, "clean") - _wide(table, "corrupted")
    )
    facts = gaps.groupby([*keys, "fact"], sort=False, observed=True)[["ie", "te"]].mean()
    grouped = facts.groupby(keys, sort=False, observed=True)
    found = mean_interval(grouped["ie"], confidence).rename(columns={"mean": "aie"})
    found["ate"] = grouped["te"].mean()
    found["share"] = found["aie"] / found["ate"].where(found["ate"].abs() > 0)
    return found.reset_index().sort_values([*MAP, "layer"], kind="stable").reset_index(drop=True)


def trace_tests(table: pd.DataFrame, draws: int = 10_000, seed: int = 0, by: str = "role") -> pd.DataFrame:
    """Which cells of each map differ from no effect, corrected for all cells of that map by max-|t| over facts (sign flips).

    table: as for `trace_effects`. Cells that some fact lacks (a subject of one token has no middle) are left out, with how many.
    Columns: corruption, metric, site, severed, layer, role, aie, t, p (corrected within the map), n (facts), left_out (cells of
    the map). StatsError for fewer than 2 facts. The unit is the fact of one model: p says nothing about other models.
    """
    _need(table, [*MAP, "layer", by, "fact", "corrupted", "value"])
    gaps = table.assign(ie=_wide(table, "value") - _wide(table, "corrupted"))
    tables = []
    for key, part in gaps.groupby(list(MAP), sort=False, observed=True):
        cells = part.pivot_table(index="fact", columns=["layer", by], values="ie", aggfunc="mean", observed=True)
        whole = cells.dropna(axis=1)
        if whole.empty:
            raise TraceError(f"no cell of the map {key} is there for every fact; allowed: facts that share a role")
        found = max_t(whole.to_numpy(), draws=draws, seed=seed)
        rows = whole.columns.to_frame(index=False).assign(aie=found.mean, t=found.t, p=found.p, n=found.n)
        tables.append(rows.assign(left_out=cells.shape[1] - whole.shape[1], **dict(zip(MAP, key, strict=True))))  # type: ignore[arg-type]
    return pd.concat(tables, ignore_index=True)[[*MAP, "layer", by, "aie", "t", "p", "n", "left_out"]]


def mean_interval(groups: Any, confidence: float) -> pd.DataFrame:
    """Mean, t interval (NaN for one value) and n of a grouped column: columns mean, low, high, n."""
    found = groups.agg(["mean", "std", "count"]).rename(columns={"count": "n"})
    half = t_half_width(found["std"], found["n"].to_numpy(), confidence)
    found["low"], found["high"] = found["mean"] - half, found["mean"] + half
    return found[["mean", "low", "high", "n"]]


def trace_agreement(effects: pd.DataFrame, between: str = "corruption", value: str = "aie") -> pd.DataFrame:
    """How far the mean maps (layer × role) of two corruptions, or of two metrics, agree; of `trace_effects`.

    between: "corruption" or "metric". value: "aie", or "share" where units differ. One row per remaining combination of
    corruption or metric, site and severed, and per pair (first, second in order of appearance). Columns: first, second, cells,
    spearman (over the cells that both have), first_peak, first_layer, first_role and the same of second (the cell of the largest
    effect), ratio (first_peak / second_peak). Compare maps of the same facts: n is each map's number of facts.
    """
    _need(effects, [*MAP, *CELL, value, "n"])
    if between not in ("corruption", "metric"):
        raise TraceError(f"between={between!r} is not allowed; allowed: 'corruption', 'metric'")
    names = list(dict.fromkeys(effects[between]))
    if len(names) < 2:
        raise TraceError(f"the effects hold one {between}, {names}; allowed: at least two to compare")
    rest, rows = [name for name in MAP if name != between], []
    for key, part in effects.groupby(rest, sort=False):
        maps = {name: one.set_index(list(CELL)) for name, one in part.groupby(between, sort=False)}
        present = [name for name in names if name in maps]
        for i, first in enumerate(present):
            for second in present[i + 1 :]:
                about = dict(zip(rest, key, strict=True))
                rows.append({**about, "first": first, "second": second, **_compare(maps[first], maps[second], value)})
    return pd.DataFrame(rows)


def _compare(one: pd.DataFrame, two: pd.DataFrame, value: str) -> dict[str, Any]:
    both = pd.concat([one[value], two[value]], axis=1, join="inner").dropna()
    a, b = both.iloc[:, 0], both.iloc[:, 1]
    varies = len(both) > 2 and a.nunique() > 1 and b.nunique() > 1
    found: dict[str, Any] = {
        "cells": len(both),
        "spearman": a.rank().corr(b.rank()) if varies else np.nan,
    }
    for name, part in (("first", one), ("second", two)):
        layer, role = part[value].idxmax()  # type: ignore[misc]
        found |= {f"{name}_peak": float(part[value].max()), f"{name}_layer": int(layer), f"{name}_role": role,
                  f"{name}_n": int(part["n"].max())}  # fmt: skip
    return {**found, "ratio": found["first_peak"] / found["second_peak"] if found["second_peak"] else np.nan}


def held_out_peaks(table: pd.DataFrame, seed: int = 0, confidence: float = 0.95) -> pd.DataFrame:
    """The cell with the largest effect, chosen on half of the facts and estimated on the other half, one row per map.

    A peak read off the facts that chose it is too high. Columns: corruption, metric, site, severed, layer, role, chosen (its
    effect where it was chosen), aie, low, high, n (on the other facts). Facts are halved at random from `seed`.
    """
    facts = pd.unique(table["fact"])
    if len(facts) < 4:
        raise TraceError(f"halves of {len(facts)} facts are too small; allowed: at least 4")
    half = set(np.random.default_rng(seed).permutation(np.asarray(facts))[: len(facts) // 2])
    inside = table["fact"].isin(half)
    choose, estimate = (trace_effects(table[part], confidence).set_index([*MAP, *CELL]) for part in (inside, ~inside))
    best = choose.groupby(list(MAP), sort=False)["aie"].idxmax()
    found = estimate.reindex(pd.MultiIndex.from_tuples(best.tolist(), names=[*MAP, *CELL]))[["aie", "low", "high", "n"]]
    return found.assign(chosen=choose.loc[best.tolist(), "aie"].to_numpy()).reset_index()


def _wide(table: pd.DataFrame, name: str) -> pd.Series:
    return table[name].astype(float)


def _need(table: pd.DataFrame, names: Sequence[str]) -> None:
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise TraceError(f"the table lacks column(s) {missing}; it has {list(table.columns)}")
    if not len(table):
        raise TraceError("the table has no rows")


def _fraction(confidence: float) -> None:
    if not isinstance(confidence, float) or not 0 < confidence < 1:
        raise TraceError(f"confidence={confidence!r} is not allowed; allowed: a number between 0 and 1")
