"""What attribution patching returns: estimates beside the exact changes of the cells that were validated."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.analyses.estimate_agreement import Agreement
from interp.sites import Site
from interp.sweep import SweepResult
from interp.sweep.grid import SiteGrid


@dataclass(frozen=True, eq=False)
class AttributionResult:
    """Estimated changes of the metric, patched − base, in its unit.

    estimates: per site a tensor [*axes, example]. sweep: the same grid as `patch_sweep` gives, its `values` base + estimate.
    exact: per site the measured change, same shape, NaN where not validated. completeness: per site [layer, example], relative
    error of integrated gradients (None to first order). agreement: how well estimates met the exact patches.
    """

    estimates: Mapping[str, Tensor]
    exact: Mapping[str, Tensor]
    sweep: SweepResult
    completeness: Mapping[str, Tensor] | None
    agreement: Agreement

    def __repr__(self) -> str:
        return f"AttributionResult({self.sweep!r}, {self.agreement})"

    def table(self, max_rows: int | None = 5_000_000) -> pd.DataFrame:
        """One row per site × cell × example: site, layer, head, position, …, example, clean, corrupted, estimate, exact.

        exact is NaN for cells that were not validated; with integrated gradients completeness_error is that of the site's layer
        and example. `attrs` holds metric, unit, direction and verdict.
        """
        table = self.sweep.table(max_rows).drop(columns="patched")
        columns = {name: self._column(by) for name, by in (("estimate", self.estimates), ("exact", self.exact))}
        if self.completeness is not None:
            # One value per layer and example stands in every cell of that layer, whatever the order of the axes.
            spread = {site: _spread(self.completeness[site], self.sweep.axes[site], self.estimates[site].shape)
                      for site in self.estimates}  # fmt: skip
            columns["completeness_error"] = self._column(spread)
        table = table.assign(**columns)
        table.attrs |= {"metric": self.sweep.metric, "unit": self.sweep.unit, "direction": self.sweep.direction,
                        "verdict": self.agreement.verdict}  # fmt: skip
        return table

    def _column(self, by: Mapping[str, Tensor]) -> np.ndarray:
        return np.concatenate([by[site].reshape(-1).numpy() for site in self.sweep.values])


def as_sweep(
    grids: list[SiteGrid],
    estimates: Mapping[str, Tensor],
    base: Tensor,
    ends: tuple[Tensor, Tensor],
    direction: Any,
    metric: Any,
) -> SweepResult:
    """The estimates as a sweep would give them: the metric after each patch, on the sweep's own axes; ends: clean, corrupted."""
    return SweepResult(
        metric=getattr(metric, "name", getattr(metric, "__name__", "metric")),
        unit=getattr(metric, "unit", ""),
        direction=direction,
        values={grid.name: base + estimates[grid.name] for grid in grids},
        axes={grid.name: grid.axes for grid in grids},
        coordinates={grid.name: grid.coordinates for grid in grids},
        clean=ends[0].cpu(),
        corrupted=ends[1].cpu(),
        engine="attribution",
        exact="estimate",
    )


def relative_errors(grid: SiteGrid, errors: Mapping[Site, tuple[Tensor, Tensor]]) -> Tensor:
    """|Σ attributions − effect| / |effect| [layer, example]; 0 where both are 0."""
    rows = []
    for site in grid.sites:
        total, effect = errors[site]
        gap = (total - effect).abs()
        rows.append(torch.where(gap == 0, gap, gap / effect.abs()))
    return torch.stack(rows).cpu()


def _spread(error: Tensor, axes: tuple[str, ...], shape: torch.Size) -> Tensor:
    """[layer, example] in every cell: [*axes, example]."""
    lead = [len(error) if axis == "layer" else 1 for axis in axes]
    return error.reshape(*lead, error.shape[-1]).expand(shape)
