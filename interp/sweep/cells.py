"""The cells of a sweep: which changes each makes, in a form that many of them can be made at once.

Values are handled in rows: one row is one token of one example in one cell. A site's dense value is turned so that the
axis of rows comes second, [batch row_axis …]: positions as they are, edges [batch head query key] as [batch query head key].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import SimpleNamespace
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

# Changes that treat every example for itself (Resample does when it draws from a given run).
_ROWWISE = (Add, AddNoise, Freeze, KnockOut, Mean, Project, Replace, Scale, Zero)


@dataclass(frozen=True)
class Rows:
    """Which token of which example of which cell each row is: int arrays [row]; `sequence` counts a chunk's (cell, example)."""

    sequence: np.ndarray
    cell: np.ndarray
    example: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.cell)

    def then(self, other: Rows) -> Rows:
        """These rows, then the other's."""
        pairs = zip(vars(self).values(), vars(other).values(), strict=True)
        return Rows(*(np.concatenate(pair) for pair in pairs))


def in_rows(site: Site, value: Tensor) -> Tensor:
    """A dense value [batch …] with its row axis second; the same call turns it back."""
    return value.transpose(1, 2) if site.spec.axes[0] == "head" else value


class Cells(ABC):
    """Many variations of one run. `sites`: every site that any cell writes to, in the model's order."""

    sites: tuple[Site, ...]
    always: Sequence[Intervention] = ()  # what the base run itself was made with

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def interventions(self, cell: int, example: int | None = None) -> list[Intervention]:
        """What one cell changes, as `run(model, inputs, change=)` takes it: the definition that the rest must equal.

        example: for inputs that hold this one only, where `separable`.
        """

    @abstractmethod
    def identity(self) -> Any:
        """Everything that the cells' values depend on, to be hashed."""

    @abstractmethod
    def touched(self, cells: np.ndarray, base: Mapping[Site, Tensor], inputs: Inputs) -> dict[Site, np.ndarray]:
        """Per site the rows that a cell may give another value than the base run's: bool [cell batch row_axis].

        Rows whose new value equals the base's bit for bit are left out: such a patch has no effect.
        """

    @abstractmethod
    def write(
        self,
        site: Site,
        value: Tensor,
        rows: Rows,
        base: Mapping[Site, Tensor],
        inputs: Inputs,
        taken: np.ndarray | None = None,
    ) -> Tensor:
        """value [row …] with the changes that each row's cell makes at this site.

        taken [row] bool: values taken from the base run, which have its own changes already.
        """

    @property
    def rowwise(self) -> bool:
        """Whether no change lets one example read another's."""
        return True

    @property
    def separable(self) -> bool:
        """Whether a cell's examples can be run one by one."""
        return False


@dataclass(frozen=True)
class GridWrite:
    """One site name of a grid: `sites` by number, `which` [layer coordinate] picks one (−1: none, a clipped window)."""

    sites: tuple[Site, ...]
    which: np.ndarray


class Grid(Cells):
    """Every combination of swept coordinates, each writing the source's values over the base's.

    shape: how many coordinates each axis has, in order. axes: names; "layer" (or "window") picks a site of every write,
    "position" (or "role") one row of every example from `positions` [coordinate batch], "head" or "neuron" one entry of the
    axis after the row's from `entries` [coordinate]. source: the values, dense, by site (a run's cache).
    """

    def __init__(
        self,
        axes: Sequence[str],
        shape: Sequence[int],
        writes: Sequence[GridWrite],
        source: Mapping[Site, Tensor],
        positions: np.ndarray | None = None,
        entries: np.ndarray | None = None,
        order: Sequence[Site] = (),
        always: Sequence[Intervention] = (),
    ) -> None:
        self.axes, self.shape, self.writes, self.source = tuple(axes), tuple(shape), tuple(writes), source
        self.positions, self.entries, self.always = positions, entries, tuple(always)
        named = {site for write in writes for site in np.array(write.sites, dtype=object)[_used(write)]}
        self.sites = tuple(site for site in order if site in named)
        self._different: dict[Site, np.ndarray] = {}

    def __len__(self) -> int:
        return int(np.prod(self.shape))

    def _coordinate(self, cells: np.ndarray, *names: str) -> np.ndarray:
        """The coordinate of each cell on the axis that has one of these names; zeros without such an axis."""
        for name in names:
            if name in self.axes:
                return np.unravel_index(cells, self.shape)[self.axes.index(name)]
        return np.zeros(len(cells), dtype=np.int64)

    def _places(self, cells: np.ndarray) -> SimpleNamespace:
        layer = self._coordinate(cells, "layer", "window")
        return SimpleNamespace(
            which=[write.which[layer] for write in self.writes],
            positions=None if self.positions is None else self.positions[self._coordinate(cells, "position", "role")],
            entry=None if self.entries is None else self.entries[self._coordinate(cells, "head", "neuron")],
        )

    @property
    def separable(self) -> bool:
        return not self.always

    def identity(self) -> Any:
        sources = [(str(site), self.source[site]) for site in self.sites]
        return (
            self.axes,
            self.shape,
            [write.which for write in self.writes],
            sources,
            self.positions,
            self.entries,
            self.always,
        )

    def interventions(self, cell: int, example: int | None = None) -> list[Intervention]:
        at, changes = self._places(np.array([cell])), list(self.always)
        source = (
            self.source if example is None else {site: self.source[site][example : example + 1] for site in self.sites}
        )
        chosen = slice(None) if example is None else slice(example, example + 1)
        for write, which in zip(self.writes, at.which, strict=True):
            if which[0] < 0:
                continue
            site, index = write.sites[which[0]], []
            edges = site.spec.axes[0] == "head"
            rows = slice(None) if at.positions is None else torch.from_numpy(at.positions[0][chosen])
            entry = slice(None) if at.entry is None else int(at.entry[0])
            index = (entry, rows) if edges else (rows,) if at.entry is None else (rows, entry)
            changes.append(Replace(site, SimpleNamespace(cache=source), at=index))
        return changes

    def touched(self, cells: np.ndarray, base: Mapping[Site, Tensor], inputs: Inputs) -> dict[Site, np.ndarray]:
        at, found = self._places(cells), {}
        for write, which in zip(self.writes, at.which, strict=True):
            for number in np.unique(which[which >= 0]):
                site, mine = write.sites[number], np.flatnonzero(which == number)
                different = self._differs(site, base)  # [batch row] or [batch row entry]
                if at.entry is not None:
                    different = np.moveaxis(different[:, :, at.entry[mine]], -1, 0)
                else:
                    different = np.broadcast_to(different, (len(mine), *different.shape))
                mask = found.setdefault(site, np.zeros((len(cells), *different.shape[1:]), dtype=bool))
                if at.positions is None:
                    mask[mine] |= different
                else:
                    where = at.positions[mine][..., None]  # [cell batch 1]
                    chosen = np.take_along_axis(different, where, 2) | np.take_along_axis(mask[mine], where, 2)
                    part = mask[mine]
                    np.put_along_axis(part, where, chosen, 2)
                    mask[mine] = part
        return found

    def _differs(self, site: Site, base: Mapping[Site, Tensor]) -> np.ndarray:
        """Where source and base differ at all: [batch row] or, with entries swept, [batch row entry]."""
        if site not in self._different:
            unequal = in_rows(site, self.source[site] != base[site])
            keep = 2 if self.entries is None else 3
            self._different[site] = (unequal.flatten(keep).any(-1) if unequal.ndim > keep else unequal).cpu().numpy()
        return self._different[site]

    def write(
        self,
        site: Site,
        value: Tensor,
        rows: Rows,
        base: Mapping[Site, Tensor],
        inputs: Inputs,
        taken: np.ndarray | None = None,
    ) -> Tensor:
        at = self._places(rows.cell)
        for write, which in zip(self.writes, at.which, strict=True):
            if site not in write.sites:
                continue
            mine = which == write.sites.index(site)
            if at.positions is not None:
                mine &= at.positions[np.arange(len(rows)), rows.example] == rows.position
            chosen = np.flatnonzero(mine)
            if not len(chosen):
                continue
            index, example, position = (
                torch.from_numpy(array).to(value.device)
                for array in (chosen, rows.example[chosen], rows.position[chosen])
            )
            source = in_rows(site, self.source[site]).to(value.dtype)
            value = value.clone()
            if at.entry is None:
                value[index] = source[example, position]
            else:
                entry = torch.from_numpy(at.entry[chosen]).to(value.device)
                value[index, entry] = source[example, position, entry]
        return value


def _used(write: GridWrite) -> np.ndarray:
    return np.unique(write.which[write.which >= 0])


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
