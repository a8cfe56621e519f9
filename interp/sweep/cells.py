"""The cells of a sweep: which changes each makes, in a form that many of them can be made at once.

Values are handled in rows: one row is one token of one example in one cell. A site's dense value is turned so that the
axis of rows comes second, [batch row_axis …]: positions as they are, edges [batch head query key] as [batch query head key].
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.interventions import Intervention, Replace
from interp.model.inputs import Inputs
from interp.sites import Site


@dataclass(frozen=True)
class Rows:
    """Which token of which example of which cell each row is: int arrays [row]; `sequence` counts a chunk's (cell, example)."""

    sequence: np.ndarray
    cell: np.ndarray
    example: np.ndarray
    position: np.ndarray

    def __len__(self) -> int:
        return len(self.cell)

    def pick(self, chosen: np.ndarray) -> Rows:
        """Some of these rows."""
        return Rows(*(array[chosen] for array in vars(self).values()))

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
            site = write.sites[which[0]]
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
                    where, batch = at.positions[mine], np.arange(different.shape[1])  # [cell batch]
                    mask[mine[:, None], batch, where] |= different[np.arange(len(mine))[:, None], batch, where]
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
