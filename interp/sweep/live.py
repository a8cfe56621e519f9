"""Values laid out in rows: the tokens that differ from the base run's, and the changes that are written into them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.sites import Site
from interp.sweep.cells import Rows


class RowTap:
    """Writes a chunk's changes into values laid out in rows, at the sites that its cells touch."""

    def __init__(
        self,
        walk: Any,
        sites: set[Site],
        rows: Rows,
        memory: Rows | None = None,
        taken: tuple[Site, np.ndarray] | None = None,
        fresh: tuple[Site, np.ndarray] | None = None,
    ) -> None:
        self.walk, self.sites, self.rows, self.memory = walk, sites, rows, memory
        self.fresh = fresh  # the site after which only these rows go on to queries, keys and values
        self.taken = taken  # the site at which some rows come from the base run, and which

    def wants(self, site: Site) -> bool:
        return site in self.sites

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        value = self._written(site, value) if site in self.sites else value
        if self.fresh is not None and site == self.fresh[0]:
            value = value.index_select(1, to_index(self.fresh[1], value))
        return value

    def _written(self, site: Site, value: Tensor) -> Tensor:
        rows = self.memory if site.name in ("cross_k", "cross_v") and self.memory is not None else self.rows
        if self.fresh is not None and site.name in ("q", "k", "v", "q_rot", "k_rot"):
            rows = rows.pick(self.fresh[1])
        base = self.walk.base
        taken = self.taken[1] if self.taken is not None and site == self.taken[0] else None
        return self.walk.cells.write(site, value[0], rows, base.cache, base.inputs, taken)[None]


@dataclass
class Live:
    """The tokens whose stream differs from the base run's: `stream` [row d_model] and where each lies, `slot`
    [sequence pos], −1 where the base run's holds."""

    stream: Tensor
    slot: np.ndarray

    @property
    def mask(self) -> np.ndarray:
        return self.slot >= 0

    def gather(self, rows: Rows, base: Tensor) -> Tensor:
        """The stream of the given tokens [row d_model], live or from the base run's [batch pos d_model]."""
        slot = self.slot[rows.sequence, rows.position]
        live = np.flatnonzero(slot >= 0)
        if len(live) == len(slot):
            same = len(slot) == len(self.stream) and bool((slot == np.arange(len(slot))).all())
            return self.stream if same else self.stream.index_select(0, to_index(slot, base))
        old = np.flatnonzero(slot < 0)
        found = base.new_empty(len(slot), base.shape[-1])
        if len(live):
            found.index_copy_(0, to_index(live, base), self.stream.index_select(0, to_index(slot[live], base)))
        place = rows.example[old] * base.shape[1] + rows.position[old]
        return found.index_copy_(0, to_index(old, base), base.flatten(0, 1).index_select(0, to_index(place, base)))

    def missing(self, rows: Rows) -> np.ndarray:
        """Which of the given tokens are not live [row] bool."""
        return self.slot[rows.sequence, rows.position] < 0

    @staticmethod
    def of(stream: Tensor, rows: Rows, shape: tuple[int, ...]) -> Live:
        slot = np.full(shape, -1, dtype=np.int64)
        slot[rows.sequence, rows.position] = np.arange(len(rows))
        return Live(stream, slot)


def to_index(array: np.ndarray, like: Tensor) -> Tensor:
    """Indices on the device of `like`."""
    return torch.from_numpy(array).to(like.device)
