"""What a sweep returns: a dense tensor with named axes, its baselines, and a tidy table on request."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class SweepResult:
    """The metric of every patched run.

    values: per site a tensor [*axes, example]; axes names them (e.g. ("layer", "position")), coordinates their values.
    clean, corrupted: the metric of the unpatched runs [example]. direction: "denoising" (clean values into the
    corrupted run) or "noising". work: counters (forwards, token-layers). labels: position -> what to print, per axis.
    """

    metric: str
    unit: str
    direction: str
    values: Mapping[str, Tensor]
    axes: Mapping[str, tuple[str, ...]]
    coordinates: Mapping[str, tuple[list[Any], ...]]
    clean: Tensor
    corrupted: Tensor
    engine: str = "reference"
    work: Mapping[str, int] = field(default_factory=dict)

    def __repr__(self) -> str:
        sites = ", ".join(
            f"{site} {'×'.join(self.axes[site])} {tuple(values.shape[:-1])}" for site, values in self.values.items()
        )
        return f"SweepResult({self.metric}, {self.direction}, {len(self.clean)} examples: {sites})"

    def table(self) -> pd.DataFrame:
        """One row per site × cell × example: columns site, layer, head, position, role, example, clean, corrupted,
        patched. Axes that a site was not swept over are missing values."""
        clean, corrupted = self.clean.tolist(), self.corrupted.tolist()
        rows = []
        for site, values in self.values.items():
            names, flat = self.axes[site], values.flatten(0, -2).tolist()
            for cell, patched in zip(itertools.product(*self.coordinates[site]), flat, strict=True):
                where = dict(zip(names, cell, strict=True))
                rows += [
                    {
                        "site": site,
                        **where,
                        "example": i,
                        "clean": clean[i],
                        "corrupted": corrupted[i],
                        "patched": value,
                    }
                    for i, value in enumerate(patched)
                ]
        table = pd.DataFrame(rows)
        order = ["site", "layer", "head", "position", "role", "example", "clean", "corrupted", "patched"]
        extra = [name for name in table.columns if name not in order]
        keep = [name for name in order if name in table.columns or name in ("layer", "head", "position")]
        table = table.reindex(columns=[*keep[: keep.index("example")], *extra, *keep[keep.index("example") :]])
        whole = [name for name in ("layer", "head", "position") if name in table.columns]
        return table.assign(**{name: table[name].astype("Int64") for name in whole})

    def effect(self) -> Mapping[str, Tensor]:
        """Per site the normalised effect [*axes]: a ratio of means over examples, never a mean of ratios.

        Denoising: (patched − corrupted)/(clean − corrupted): 0 = nothing restored, 1 = all. Noising:
        (patched − clean)/(corrupted − clean): 0 = nothing broken, 1 = all. ValueError when the baselines coincide.
        """
        start, end = (self.corrupted, self.clean) if self.direction == "denoising" else (self.clean, self.corrupted)
        span = (end - start).mean()
        if not bool(span.abs() > torch.finfo(span.dtype).eps * end.abs().max().clamp(min=1)):
            raise ValueError(f"clean and corrupted runs have the same mean {self.metric}, {float(start.mean()):.4g}: "
                             "no effect can be normalised by their difference")  # fmt: skip
        return {site: (values - start).mean(-1) / span for site, values in self.values.items()}

    def effect_table(self) -> pd.DataFrame:
        """`effect()` as a tidy table: site, the swept axes, effect."""
        rows = []
        for site, effect in self.effect().items():
            cells = itertools.product(*self.coordinates[site])
            rows += [
                {"site": site, **dict(zip(self.axes[site], cell, strict=True)), "effect": value}
                for cell, value in zip(cells, effect.flatten().tolist(), strict=True)
            ]
        return pd.DataFrame(rows)
