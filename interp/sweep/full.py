"""Batched full forwards: for models whose blocks cannot be entered, and for results equal bit for bit to single runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.hookable import Hookable
from interp.interventions import Intervention
from interp.model.transformer import Transformer
from interp.sites import Site
from interp.sweep.base import Recorded
from interp.sweep.cells import Cells


class ManyTap:
    """Applies each cell's changes to its own part of a batch; inputs: of each cell, or the same for all."""

    def __init__(self, cells: Sequence[Sequence[Intervention]], inputs: Any, wanted: set[Site]) -> None:
        self.cells, self.wanted = cells, wanted
        self.inputs = inputs if isinstance(inputs, list) else [inputs] * len(cells)
        self.sites = {change.place for cell in cells for change in cell}

    def wants(self, site: Site) -> bool:
        return site in self.wanted or site in self.sites

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        if site not in self.sites:
            return value
        parts = list(value.unflatten(0, (len(self.cells), -1)))
        for i, cell in enumerate(self.cells):
            for change in cell:
                if change.place == site:
                    parts[i] = change.apply(parts[i], self.inputs[i])
        return torch.cat(parts)


class Full:
    """Runs cells as one batch of full forwards, from the first layer that they change where the model can resume.

    bitwise: batches only as large as a canary allows: the unchanged inputs, run at that batch size, must give the bits of the
    single run. Equal to `interp.run` bit for bit then; otherwise up to rounding.
    """

    def __init__(self, model: Hookable, cells: Cells, base: Recorded, wanted: Sequence[Site], bitwise: bool) -> None:
        self.model, self.cells, self.base, self.reading, self.bitwise = model, cells, base, base.reading, bitwise
        self.wanted = set(wanted)
        self.work: Counter[str] = Counter()
        # A recorded stream has the base run's own changes already; a run that resumes there would make them twice.
        self.resumes = isinstance(model, Transformer) and model.encoder is None and not _inside(cells.always)
        self._sizes: dict[tuple[int, int], int] = {}

    @torch.no_grad()
    def __call__(self, cells: np.ndarray, touched: Mapping[Site, np.ndarray]) -> Tensor:
        """cells [cell]; touched: per site bool [cell batch row_axis] -> the metric [cell batch]."""
        values = self.base.metric.expand(len(cells), -1).clone()
        active = np.zeros(len(cells), dtype=bool)
        start = np.full(len(cells), self.model.config.n_layers)
        for site, mask in touched.items():
            hit = mask.any((1, 2))
            active |= hit
            start[hit] = np.minimum(start[hit], self._entry(site))
        for first in np.unique(start[active]):
            mine = np.flatnonzero(active & (start == first))
            size = self._batch(int(first), len(mine))
            for i in range(0, len(mine), size):
                part = mine[i : i + size]
                # A short rest is filled up: another shape could take another numerical route.
                filled = np.resize(part, size) if self.bitwise else part
                changes = [self.cells.interventions(int(cell)) for cell in cells[filled]]
                logits = self._forward(int(first), changes).unflatten(0, (len(filled), -1))
                for j, cell in enumerate(part):
                    values[int(cell)] = self.reading.of_full(logits[j])
        return values

    def _entry(self, site: Site) -> int:
        if not self.resumes or site.name in ("embed", "pos_embed"):
            return -1  # from the tokens
        return self.model.config.n_layers if site.layer is None else site.layer

    def _forward(self, start: int, changes: Sequence[Sequence[Intervention]]) -> Tensor:
        """Logits [cell·batch pos vocab] of cells that share a first layer (−1: run everything)."""
        base, model, n = self.base, self.model, len(changes)
        tap = ManyTap(changes, base.inputs, self.wanted)
        inputs = (
            base.inputs if n == 1 else base.inputs.select(torch.arange(base.inputs.batch).repeat(n).to(_device(base)))
        )
        layers = model.config.n_layers
        self.work["token_layers"] += inputs.tokens.numel() * (layers - max(start, 0))
        self.work["unembedded rows"] += inputs.tokens.numel()
        if start < 0:
            return model(inputs, tap)
        assert isinstance(model, Transformer)
        name = ("resid_pre", start) if start < layers else ("resid_post", layers - 1)
        stream = base.cache[Site(*name)].repeat(n, 1, 1)
        return model.unembed(model.blocks(stream, start, layers, tap, inputs), tap)

    def _batch(self, start: int, count: int) -> int:
        """How many cells to run at once: all, or in bitwise mode as many as give the single run's bits."""
        if not self.bitwise:
            return count
        size = 1 << (count.bit_length() - 1)  # a chunk holds as many cells as the budget allows, so never more
        if (start, size) not in self._sizes:
            single, found = self._forward(start, [[]]), size
            while found > 1:
                many = self._forward(start, [[]] * found).unflatten(0, (found, -1))
                if all(torch.equal(one, single) for one in many):
                    break
                found //= 2
            self._sizes[start, size] = found
        return self._sizes[start, size]


def _inside(changes: Sequence[Intervention]) -> bool:
    """Whether any change lies behind the embeddings."""
    return any(change.place.name not in ("embed", "pos_embed") for change in changes)


def _device(base: Recorded) -> torch.device:
    return base.inputs.tokens.device
