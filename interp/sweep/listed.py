"""Cells given one by one, as lists of interventions of any kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.at import select
from interp.interventions import (
    Add,
    AddNoise,
    Freeze,
    Intervention,
    KnockOut,
    Mean,
    Project,
    Replace,
    Resample,
    Scale,
    Zero,
)
from interp.model.inputs import Inputs
from interp.sites import Site, resolve
from interp.sweep.cells import Cells, Rows, in_rows

# Changes that treat every example for itself (Resample does when it draws from a given run).
_ROWWISE = (Add, AddNoise, Freeze, KnockOut, Mean, Project, Replace, Scale, Zero)


class Listed(Cells):
    """Any changes, given cell by cell as interventions, after those that the base run itself was made with."""

    def __init__(
        self, changes: Sequence[Sequence[Intervention]], order: Sequence[Site], always: Sequence[Intervention] = ()
    ) -> None:
        order = tuple(order)
        self.changes = [[_placed(change, order) for change in cell] for cell in changes]
        self.always = [_placed(change, order) for change in always]
        named = {change.place for cell in self.changes for change in cell}
        self.sites = tuple(site for site in order if site in named)
        self._order = {site: i for i, site in enumerate(order)}

    def __len__(self) -> int:
        return len(self.changes)

    @cached_property
    def rowwise(self) -> bool:  # type: ignore[override]
        return all(
            type(change) in _ROWWISE or (type(change) is Resample and change.reference is not None)
            for cell in (*self.changes, self.always)
            for change in cell
        )

    def identity(self) -> Any:
        return (self.changes, self.always)

    def interventions(self, cell: int, example: int | None = None) -> list[Intervention]:
        return [*self.always, *self.changes[cell]]

    def touched(self, cells: np.ndarray, base: Mapping[Site, Tensor], inputs: Inputs) -> dict[Site, np.ndarray]:
        found: dict[Site, np.ndarray] = {}
        for i, cell in enumerate(cells):
            at: dict[Site, list[Intervention]] = {}
            for change in self.changes[cell]:
                at.setdefault(change.place, []).append(change)
            first = min(at, key=self._order.__getitem__) if at else None
            for site, changes in at.items():
                value = base[site]
                if site == first:  # nothing before it has moved, so what it writes is known
                    new = value
                    for change in changes:
                        new = change.apply(new, inputs)
                    unequal = in_rows(site, new != value)
                else:
                    unequal = torch.zeros_like(value, dtype=torch.bool)
                    for change in changes:
                        unequal[select(site, value.shape, getattr(change, "at", ()), inputs)] = True
                    unequal = in_rows(site, unequal)
                mask = unequal.flatten(2).any(-1).cpu().numpy()
                found.setdefault(site, np.zeros((len(cells), *mask.shape), dtype=bool))[i] = mask
        return found

    def write(
        self,
        site: Site,
        value: Tensor,
        rows: Rows,
        base: Mapping[Site, Tensor],
        inputs: Inputs,
        taken: np.ndarray | None = None,
    ) -> Tensor:
        taken = np.zeros(len(rows), dtype=bool) if taken is None else taken
        for cell in np.unique(rows.cell):
            for again in (True, False):
                made = self.changes[int(cell)] if again else self.interventions(int(cell))
                changes = [change for change in made if change.place == site]
                index = np.flatnonzero((rows.cell == cell) & (taken == again))
                if changes and len(index):
                    value = self._changed(site, value, index, rows, changes, base, inputs)
        return value

    def _changed(self, site, value: Tensor, index: np.ndarray, rows: Rows, changes, base, inputs: Inputs) -> Tensor:
        """value with some changes made in the rows that `index` picks, each in the whole of its cell's batch."""
        example, position = (torch.from_numpy(array[index]).to(value.device) for array in (rows.example, rows.position))
        chosen = torch.from_numpy(index).to(value.device)
        dense = base[site].clone().to(value.dtype)
        in_rows(site, dense)[example, position] = value[chosen]
        for change in changes:
            dense = change.apply(dense, inputs)
        value = value.clone()
        value[chosen] = in_rows(site, dense)[example, position]
        return value


def _placed(change: Any, order: tuple[Site, ...]) -> Intervention:
    """The change at a site of this model, its stack filled in."""
    if not isinstance(change, Intervention):
        raise TypeError(f"a cell holds interventions such as Zero('3.z'), got {change!r}")
    site = resolve(change.place, order)
    if site == change.place:
        return change
    return replace(change, site=site)
