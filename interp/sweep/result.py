"""What a sweep returns: a dense tensor with named axes, its baselines, and a tidy table on request."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

_ORDER = [
    "site",
    "layer",
    "head",
    "position",
    "role",
    "window",
    "first_layer",
    "last_layer",
    "clipped",
    "neuron",
    "example",
]
_WHOLE = ("layer", "head", "position", "neuron", "window", "first_layer", "last_layer")


@dataclass(frozen=True, eq=False)
class SweepResult:
    """The metric of every changed run.

    values: per site a tensor [*axes, example]; axes names them (e.g. ("layer", "position")), coordinates their values.
    clean, corrupted: the metric of the unpatched runs [example]; corrupted is None where cells were changed without a second
    run. direction: "denoising" (clean values into the corrupted run), "noising" or "ablation". engine, exact: how it was
    computed. work: counters (token_layers: tokens times blocks computed, unembedded rows, …). checked: the largest difference
    between `checks` cells and full runs of them. spans: with windows, per site centre -> first layer, last layer, cut off.
    """

    metric: str
    unit: str
    direction: str
    values: Mapping[str, Tensor]
    axes: Mapping[str, tuple[str, ...]]
    coordinates: Mapping[str, tuple[list[Any], ...]]
    clean: Tensor
    corrupted: Tensor | None
    engine: str = "reference"
    exact: str = "rounding"
    work: Mapping[str, int] = field(default_factory=dict)
    checked: float = 0.0
    checks: int = 0
    spans: Mapping[str, Mapping[Any, tuple[int, int, bool]]] = field(default_factory=dict)

    def __repr__(self) -> str:
        sites = ", ".join(
            f"{site} {'×'.join(self.axes[site])} {tuple(values.shape[:-1])}" for site, values in self.values.items()
        )
        return f"SweepResult({self.metric}, {self.direction}, {len(self.clean)} examples: {sites})"

    def table(self, max_rows: int | None = 5_000_000) -> pd.DataFrame:
        """One row per site × cell × example: columns site, layer, head, position, role, …, example, clean, corrupted, patched.

        Axes that a site was not swept over are missing values. ValueError above max_rows (None: no limit): `values` holds
        the same numbers in a hundredth of the memory.
        """
        rows = sum(values.numel() for values in self.values.values())
        if max_rows is not None and rows > max_rows:
            raise ValueError(f"this table would have {rows:,} rows, more than max_rows={max_rows:,}; allowed: .values, "
                             ".effect(), or .table(max_rows=None)")  # fmt: skip
        table = pd.concat([self._one(site) for site in self.values], ignore_index=True)
        keep = [name for name in _ORDER if name in table.columns or name in ("layer", "head", "position")]
        extra = [name for name in table.columns if name not in (*_ORDER, "clean", "corrupted", "patched")]
        ends = [name for name in ("clean", "corrupted", "patched") if name in table.columns]
        table = table.reindex(columns=[*keep[:-1], *extra, keep[-1], *ends])
        return _whole(table)

    def _one(self, site: str) -> pd.DataFrame:
        """One site's rows."""
        n = len(self.clean)
        cells = math.prod(self.values[site].shape[:-1])
        columns: dict[str, Any] = {"site": np.repeat(site, cells * n)}
        columns |= {name: np.repeat(values, n) for name, values in self._columns(site).items()}
        columns["example"] = np.tile(np.arange(n), cells)
        for name in ("clean", "corrupted"):
            baseline = getattr(self, name)
            if baseline is not None:
                columns[name] = np.tile(_numpy(baseline), cells)
        return pd.DataFrame({**columns, "patched": _numpy(self.values[site]).reshape(-1)})

    def _columns(self, site: str) -> dict[str, np.ndarray]:
        """The coordinates of one site's cells, one entry per cell."""
        shape, columns = self.values[site].shape[:-1], {}
        for i, (name, coordinates) in enumerate(zip(self.axes[site], self.coordinates[site], strict=True)):
            index = np.arange(shape[i]).reshape([-1 if j == i else 1 for j in range(len(shape))])
            index = np.broadcast_to(index, shape).reshape(-1)
            if all(isinstance(one, int) for one in coordinates):
                columns[name] = np.array(coordinates)[index]
            else:  # names of any kind, tuples too, each as one thing
                columns[name] = np.fromiter(coordinates, dtype=object, count=len(coordinates))[index]
            if name == "window":
                for k, part in enumerate(("first_layer", "last_layer", "clipped")):
                    columns[part] = np.array([self.spans[site][one][k] for one in coordinates])[index]
        return columns

    def effect(self) -> Mapping[str, Tensor]:
        """Per site the normalised effect [*axes]: a ratio of means over examples, never a mean of ratios.

        Denoising: (patched − corrupted)/(clean − corrupted): 0 = nothing restored, 1 = all. Noising:
        (patched − clean)/(corrupted − clean): 0 = nothing broken, 1 = all. ValueError when the baselines coincide.
        Ablation has no second run to normalise by: the mean of patched − clean, in the metric's unit.
        """
        if self.corrupted is None:
            return {site: (values - self.clean).mean(-1) for site, values in self.values.items()}
        start, end = (self.corrupted, self.clean) if self.direction == "denoising" else (self.clean, self.corrupted)
        span = (end - start).mean()
        if not bool(span.abs() > torch.finfo(span.dtype).eps * end.abs().max().clamp(min=1)):
            raise ValueError(f"clean and corrupted runs have the same mean {self.metric}, {float(start.mean()):.4g}: "
                             "no effect can be normalised by their difference")  # fmt: skip
        return {site: (values - start).mean(-1) / span for site, values in self.values.items()}

    def effect_table(self) -> pd.DataFrame:
        """`effect()` as a tidy table: site, the swept axes, effect. `attrs` holds metric, direction and unit; plots read it."""
        parts = []
        for site, effect in self.effect().items():
            cells = effect.numel()
            columns = {"site": np.repeat(site, cells), **self._columns(site), "effect": _numpy(effect).reshape(-1)}
            parts.append(pd.DataFrame(columns))
        table = _whole(pd.concat(parts, ignore_index=True))
        table.attrs |= {"metric": self.metric, "direction": self.direction, "unit": self._effect_unit}
        return table

    @property
    def _effect_unit(self) -> str:
        """What `effect()` is counted in, for an axis or a colour bar."""
        if self.corrupted is None:
            return f"{self.metric.replace('_', ' ')}, changed − unchanged ({self.unit or 'its own unit'})"
        return f"normalised effect\n(share of {self.metric.replace('_', ' ')}, {self.direction})"


def _numpy(values: Tensor) -> np.ndarray:
    return (values.float() if values.dtype == torch.bfloat16 else values).numpy()


def _whole(table: pd.DataFrame) -> pd.DataFrame:
    """Counting columns as integers that may be missing."""
    return table.assign(**{name: table[name].astype("Int64") for name in _WHOLE if name in table.columns})
