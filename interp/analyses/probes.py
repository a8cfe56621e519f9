"""Linear probes with control labels (Hewitt & Liang 2019): what can be read off a vector, less what a probe can memorise.

A high score says that the label can be read, not that the model reads it; selectivity says how much of it is not memory.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor

from interp.at import positions
from interp.run import Run
from interp.sites import Site, UnknownSiteError, expand

CONTROLS = ("by type", "none")
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0)


class ProbeError(ValueError):
    """Features, labels or choices that a probe cannot be fitted with."""


def probe(
    features: Any,
    labels: Any,
    types: Any = None,
    groups: Any = None,
    *,
    control: str = "by type",
    sites: str | Site | Sequence[str | Site] | None = None,
    position: Any = -1,
    split: tuple[float, float, float] = (0.6, 0.2, 0.2),
    strengths: Sequence[float] = STRENGTHS,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per site: a linear probe's score on held-out groups, its control's, and the difference (Hewitt & Liang 2019).

    features: [n d], a mapping site -> [n d], or a `Run`, whose `sites` (default: every recorded one that is a vector per
    position) are read at `position` of each example. labels [n]: ints, bools or strings are classes (logistic regression,
    accuracy); floats are numbers (ridge regression, R²). types [n]: what a probe could memorise, such as the token; the control
    gives every type one label, drawn at random from all labels, and fits the same probe. control: "by type", or "none" (NaN in
    its columns). groups [n]: rows that must not be divided between the parts, such as a sentence or a fact; default: rows with
    equal features. Parts: `split` shares of the groups for training, choosing C, and testing. Standardisation and weights come
    from the training part alone, C (the inverse of the penalty) is the best on the second part, for the control separately.

    Columns: site, layer, measure ("accuracy", "r2"), accuracy (under either measure), control_accuracy, selectivity, majority
    (accuracy of the training part's most frequent label; its mean's R²), C, control_C, n_train, n_validation, n_test, n_classes,
    d, seen_types (share of test rows whose type was trained on: where it is low, the control cannot memorise and selectivity says
    little), converged. Needs scikit-learn. Raises ProbeError; ImportError names the extra interp[probes].
    """
    found, y = _features(features, sites, position), _labels(labels)
    n = len(y)
    bad = [f"{site} has {len(x)}" for site, x in found.items() if len(x) != n]
    if bad:
        raise ProbeError(f"labels hold {n} rows, {bad[0]}; allowed: as many")
    if control not in CONTROLS:
        raise ProbeError(f"control={control!r} is not allowed; allowed: {', '.join(map(repr, CONTROLS))}")
    if control == "by type" and types is None:
        raise ProbeError(
            "control='by type' needs types= [n], what a probe could memorise; allowed: types, or control='none'"
        )
    if not strengths or min(strengths) <= 0:
        raise ProbeError(f"strengths={strengths!r} is not allowed; allowed: one or more numbers above 0")
    kind = None if types is None else _codes("types", types, n)
    draw = np.random.default_rng(seed)
    if groups is None:  # equal rows on both sides would be trained on and tested
        groups = np.unique(np.concatenate(list(found.values()), 1), axis=0, return_inverse=True)[1].reshape(-1)
    parts = split_groups(_codes("groups", groups, n), split, draw)
    if y.dtype.kind != "f" and len(np.unique(y[parts[0]])) < 2:
        raise ProbeError(
            f"the training part has the one label {y[parts[0]][0]!r}; allowed: two or more, so other groups or seed"
        )
    wrong = control_labels(y, kind, draw) if control == "by type" and kind is not None else None
    rows = [_row(site, x, y, wrong, kind, parts, strengths) for site, x in found.items()]
    return pd.DataFrame(rows).astype({"layer": "Int64", "n_classes": "Int64"})


def _row(
    site: str, x: np.ndarray, y: np.ndarray, wrong: Any, kind: Any, parts: Sequence[np.ndarray], strengths
) -> dict[str, Any]:
    """One site's probe and its control's (`wrong` labels, None for none); kind: the rows' types."""
    numbers, real = y.dtype.kind == "f", _fit(x, y, parts, strengths)
    fake = _fit(x, wrong, parts, strengths) if wrong is not None else _Fit(np.nan, np.nan, True, np.nan)
    return {
        "site": site or None, "layer": Site.parse(site).layer if site else None, "measure": "r2" if numbers else "accuracy",
        "accuracy": real.score, "control_accuracy": fake.score, "selectivity": real.score - fake.score,
        "majority": real.majority, "C": real.C, "control_C": fake.C, "n_train": len(parts[0]), "n_validation": len(parts[1]),
        "n_test": len(parts[2]), "n_classes": None if numbers else len(np.unique(y)), "d": x.shape[1],
        "seen_types": np.nan if kind is None else np.isin(kind[parts[2]], kind[parts[0]]).mean(),
        "converged": real.converged and fake.converged,
    }  # fmt: skip


def control_labels(labels: np.ndarray, types: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    """One label per type, drawn from the labels as often as they occur [n] (Hewitt & Liang 2019).

    types: ints from 0. At least two different labels, where there are two types and two labels.
    """
    count = int(types.max()) + 1
    while True:
        given = draw.choice(labels, size=count)
        if count < 2 or len(np.unique(given)) > 1 or len(np.unique(labels)) < 2:
            return given[types]


def split_groups(groups: np.ndarray, split: Sequence[float], draw: np.random.Generator) -> list[np.ndarray]:
    """Row numbers of the training, choosing and testing part; no group is in two. Raises ProbeError.

    groups: ints from 0 [n]. Groups in random order fill the parts until each has its share of the rows.
    """
    shares = np.asarray(split, dtype=float)
    if shares.shape != (3,) or (shares <= 0).any() or abs(shares.sum() - 1) > 1e-9:
        raise ProbeError(f"split={tuple(split)!r} is not allowed; allowed: three shares above 0 whose sum is 1")
    order = draw.permutation(int(groups.max()) + 1)
    if len(order) < 3:
        raise ProbeError(f"there are {len(order)} different groups; allowed: at least 3, one for each part")
    ends = np.cumsum(np.bincount(groups)[order]) / len(groups)
    first = int(np.clip(np.searchsorted(ends, shares[0] + 1e-12, "right"), 1, len(order) - 2))
    second = int(np.clip(np.searchsorted(ends, shares[0] + shares[1] + 1e-12, "right"), first + 1, len(order) - 1))
    return [np.flatnonzero(np.isin(groups, some)) for some in np.split(order, [first, second])]


@dataclass(frozen=True)
class _Fit:
    score: float
    C: float
    converged: bool
    majority: float


def _fit(x: np.ndarray, y: np.ndarray, parts: Sequence[np.ndarray], strengths: Sequence[float]) -> _Fit:
    """The probe of the strength that does best on the second part, scored on the third."""
    linear, numbers = _sklearn("linear_model"), y.dtype.kind == "f"
    train, choose, test = parts
    mean, spread = x[train].mean(0), x[train].std(0)
    z = (x - mean) / np.where(spread > 0, spread, 1.0)
    best, converged, chosen, fitted = -np.inf, True, np.nan, None
    for C in sorted(strengths):
        if len(np.unique(y[train])) < 2 and not numbers:  # a control can give all types of the training part one label
            break
        model = linear.Ridge(alpha=1 / C) if numbers else linear.LogisticRegression(C=C, max_iter=2000)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            model.fit(z[train], y[train])
        good = model.score(z[choose], y[choose])
        if good > best + 1e-12:  # of equal ones the stronger penalty
            best, chosen, fitted = good, C, model
            converged = not any("onverge" in str(one.message) for one in told)
    values, counts = np.unique(y[train], return_counts=True)
    if numbers:
        majority = 1 - np.square(y[test] - y[train].mean()).sum() / max(
            np.square(y[test] - y[test].mean()).sum(), 1e-300
        )
    else:
        majority = float((y[test] == values[counts.argmax()]).mean())
    score = majority if fitted is None else float(fitted.score(z[test], y[test]))
    return _Fit(score, float(chosen), converged, float(majority))


def _features(features: Any, sites: Any, position: Any) -> dict[str, np.ndarray]:
    """Arrays [n d] by site's name, "" for a single nameless one."""
    if isinstance(features, Run):
        have = [site for site in features.cache if site.spec.axes in (("position", "d_model"), ("position", "d_ff"))]
        asked = [sites] if isinstance(sites, str | Site) else sites
        chosen = have if asked is None else [site for one in asked for site in expand(one, tuple(features.cache))]
        if not chosen:
            raise ProbeError(
                "the run recorded no vector per position; allowed: run(…, record='resid_post'), for example"
            )
        index = positions(features.inputs, position)
        features = {str(site): features.cache[site][range(len(index)), index] for site in chosen}
    elif sites is not None:
        raise ProbeError(f"sites={sites!r} go with a Run; allowed: a Run, or a mapping site -> features without sites=")
    given = features if isinstance(features, Mapping) else {"": features}
    found = {str(site): _matrix(str(site), value) for site, value in given.items()}
    if not found:
        raise ProbeError("features is empty; allowed: [n d], a mapping site -> [n d], or a Run")
    for site in filter(None, found):
        try:
            Site.parse(site)
        except UnknownSiteError as error:
            raise ProbeError(f"features of {site!r}: {error}") from error
    return found


def _matrix(site: str, value: Any) -> np.ndarray:
    array = value.detach().cpu().double().numpy() if isinstance(value, Tensor) else np.asarray(value)
    if array.ndim != 2 or 0 in array.shape or array.dtype.kind not in "fiub":
        raise ProbeError(
            f"features{f' of {site}' if site else ''} must be numbers [n d], got {array.dtype} {array.shape}"
        )
    array = array.astype(float)
    if not np.isfinite(array).all():
        raise ProbeError(
            f"features{f' of {site}' if site else ''} hold NaN or infinite values; allowed: finite numbers"
        )
    return array


def _labels(labels: Any) -> np.ndarray:
    array = labels.detach().cpu().numpy() if isinstance(labels, Tensor) else np.asarray(labels)
    if array.ndim != 1 or array.dtype.kind not in "fiubUO" or not len(array):
        raise ProbeError(f"labels must be [n], numbers or strings, got {array.dtype} {array.shape}")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ProbeError("labels hold NaN or infinite values; allowed: finite numbers")
    return array.astype(str) if array.dtype.kind == "O" else array


def _codes(name: str, values: Any, n: int) -> np.ndarray:
    """What is equal has the same int from 0 [n]."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if array.shape != (n,):
        raise ProbeError(f"{name} must be [n] = ({n},), got shape {array.shape}")
    return np.unique(array, return_inverse=True)[1].reshape(-1)


def _sklearn(module: str) -> Any:
    """A module of scikit-learn, imported when a probe is fitted."""
    try:
        return importlib.import_module(f"sklearn.{module}")
    except ImportError as error:
        raise ImportError("probes need scikit-learn, which is not installed: pip install 'interp[probes]'") from error
