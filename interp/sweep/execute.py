"""Carrying a sweep out: chunks under a memory budget, an estimate before, a sampled check after, nothing lost when stopped."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from interp.hookable import Hookable
from interp.metrics import Metric
from interp.model.transformer import Transformer
from interp.run import run
from interp.sites import Site
from interp.sweep.base import Recorded
from interp.sweep.cells import Cells
from interp.sweep.checkpoint import Checkpoint, mark_of
from interp.sweep.cost import Cost, matmul_rate
from interp.sweep.errors import SweepCheckError, SweepError, SweepInterrupted
from interp.sweep.full import Full, ManyTap
from interp.sweep.reading import Reading
from interp.sweep.walk import Walk

Exact = Literal["rounding", "bitwise"]
_BLOCK = 1 << 24  # entries of a mask [cell batch pos] that are laid out at a time
_SAMPLE = 128  # cells that an estimate looks at
_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 2e-1}


@dataclass(frozen=True)
class Estimate:
    """What a sweep will cost, before it runs: cells, floating-point operations, bytes at the peak, seconds."""

    cells: int
    flops: float
    memory: float
    seconds: float
    cells_at_once: int

    def __str__(self) -> str:
        return (f"{self.cells:,} cells, {self.flops:.3g} FLOPs, at most {self.memory / 2**20:,.0f} MiB "
                f"(about {self.cells_at_once:,} cells at once), about {self.seconds:,.1f} s")  # fmt: skip


@dataclass(frozen=True)
class Computed:
    """values [cell batch]; work: counters; checked: the largest difference of `checks` cells from full runs."""

    values: Tensor
    work: dict[str, int]
    checked: float
    checks: int


@dataclass
class Job:
    """Cells of one kind on one base run, with the way in which they are to be computed.

    engine: "fast" (the walk where the model allows it), "full" (batched full forwards) or "reference" (one `run` per cell).
    """

    model: Hookable
    cells: Cells
    base: Recorded
    exact: Exact = "rounding"
    engine: str = "fast"
    budget: float | None = None
    name: str = "sweep"
    label: Any = None  # cell -> text, for messages
    wanted: Sequence[Site] = ()  # sites that every run of the sweep computes, so that all take the same numerical route
    work: Counter[str] = field(default_factory=Counter)

    @property
    def reading(self) -> Reading:
        """What the metric reads of the base run and of every cell."""
        return self.base.reading

    @cached_property
    def executor(self) -> Any:
        """The walk, or full forwards where it cannot be used."""
        if self.engine == "fast" and self.exact == "rounding":
            assert isinstance(self.model, Transformer)
            return Walk(self.model, self.cells, self.base)
        return Full(self.model, self.cells, self.base, self.wanted, self.exact == "bitwise")

    @cached_property
    def cost(self) -> Cost:
        """Sizes and work of this model, inputs and metric."""
        return Cost.of(self.model, self.base.inputs, self.reading, self.cells.sites, isinstance(self.executor, Walk))

    @cached_property
    def allowed(self) -> float:
        """Bytes that a chunk may take."""
        return free_memory(self.base.inputs.tokens.device) / 2 if self.budget is None else self.budget

    def estimate(self) -> Estimate:
        """Cost from the layout of a sample of cells, without computing any."""
        n = len(self.cells)
        chosen = np.sort(np.random.default_rng(0).choice(n, min(n, _SAMPLE), replace=False))
        touched = self._touched(chosen)
        rows = self.cost.rows(touched, len(chosen))
        flops = self.cost.flops(self.executor, chosen, touched) * n / len(chosen)
        at_once = max(1, int(self._rows_at_once() / max(rows.mean(), 1)))
        memory = min(at_once, n) * rows.mean() * self.cost.bytes_per_row
        return Estimate(n, flops, memory, 1.3 * flops / matmul_rate(self.model), min(at_once, n))

    def compute(self, check: int, checkpoint: Checkpoint | None = None, bar: Any = None, seed: int = 0) -> Computed:
        """Every cell; `check` of them run again in full and compared. Raises SweepError, SweepCheckError, SweepInterrupted."""
        checkpoint = Checkpoint() if checkpoint is None else checkpoint
        empty = self.base.metric.new_zeros(len(self.cells), self.base.inputs.batch).cpu()
        mark = mark_of(
            self.reading.metric,
            self.base.slice,
            self.base.metric,
            self.base.inputs.tokens,
            self.exact,
            self.engine,
            self.cells.identity(),
            # Only for a file, which another process may find: reading every weight takes a second per gigabyte.
            [] if checkpoint.path is None else list(getattr(self.model, "state_dict", dict)().values()),
        )
        values, done = checkpoint.part(self.name, mark, empty)
        bar = tqdm(disable=True) if bar is None else bar
        bar.update(int(done.sum()))
        self.counters.clear()
        checkpoint.save(now=True)  # a path that cannot be written is found now
        try:
            for cells, touched in self._chunks(torch.nonzero(~done)[:, 0].numpy()):
                values[cells] = self._run(cells, touched).to("cpu", empty.dtype)
                done[cells] = True
                checkpoint.save()
                bar.update(len(cells))
            checkpoint.save(now=True)
            checked, checks = self._check(values, check, seed) if self.engine != "reference" else (0.0, 0)
        except KeyboardInterrupt:
            checkpoint.save(now=True)
            said = (f"stopped with {int(done.sum())} of {len(done)} cells of {self.name} done; the same call with checkpoint= "
                    f"this exception's .checkpoint goes on ({checkpoint!r})")  # fmt: skip
            raise SweepInterrupted(said, checkpoint) from None
        return Computed(values, dict(self.counters), checked, checks)

    @property
    def counters(self) -> Counter[str]:
        """The work of the run that is going on."""
        return self.work if self.engine == "reference" else self.executor.work

    def _run(self, cells: np.ndarray, touched: Mapping[Site, np.ndarray]) -> Tensor:
        """One chunk; halved when a GPU has less memory than was thought."""
        if self.engine == "reference":
            return torch.stack([self._reference(int(cell)) for cell in cells])
        try:
            return self.executor(cells, touched)
        except torch.OutOfMemoryError:
            if len(cells) == 1:
                raise SweepError(f"one cell of {self.name} does not fit into the device's memory") from None
        half = len(cells) // 2
        first, second = slice(0, half), slice(half, None)
        return torch.cat(
            [self._run(cells[part], {site: mask[part] for site, mask in touched.items()}) for part in (first, second)]
        )

    def _reference(self, cell: int) -> Tensor:
        """The metric [batch] of one cell by one full run."""
        found = run(self.model, self.base.inputs, change=self.cells.interventions(cell), wanted=self.wanted)
        self.work["token_layers"] += self.base.inputs.tokens.numel() * self.model.config.n_layers
        self.work["forwards"] += 1
        return self.reading.of_full(found.logits)

    def _touched(self, cells: np.ndarray) -> dict[Site, np.ndarray]:
        return self.cells.touched(cells, self.base.cache, self.base.inputs)

    def _rows_at_once(self) -> float:
        """Rows that a chunk may hold: as many as the budget allows, no more than make a matrix product efficient."""
        if self.allowed < self.cost.bytes_per_row * self.cost.most_rows:
            need = self.cost.bytes_per_row * self.cost.most_rows
            raise SweepError(
                f"budget={self.allowed:,.0f} bytes is less than one cell may need; allowed: at least {need:,.0f}"
            )
        return max(self.cost.most_rows, min(self.allowed / self.cost.bytes_per_row, self.cost.enough_rows))

    def _chunks(self, todo: np.ndarray) -> Iterator[tuple[np.ndarray, dict[Site, np.ndarray]]]:
        """Cells in order, as many at a time as fit, with the rows that they touch."""
        if self.engine == "reference":
            yield from ((todo[i : i + 1], {}) for i in range(len(todo)))
            return
        inputs, limit = self.base.inputs, self._rows_at_once()
        if isinstance(self.executor, Walk):
            self.executor.limit = int(limit)
        step = max(1, _BLOCK // (inputs.tokens.numel() * max(1, len(self.cells.sites))))
        for start in range(0, len(todo), step):
            block = todo[start : start + step]
            touched = self._touched(block)
            ends = np.cumsum(self.cost.rows(touched, len(block)))
            first = 0
            while first < len(block):
                before = ends[first - 1] if first else 0
                stop = max(first + 1, int(np.searchsorted(ends, before + limit, side="right")))
                yield block[first:stop], {site: mask[first:stop] for site, mask in touched.items()}
                first = stop

    def _check(self, values: Tensor, count: int, seed: int) -> tuple[float, int]:
        """Runs a random sample of cells (of one example each, where a cell's examples do not meet) again in full."""
        if count <= 0:
            return 0.0, 0
        rng = np.random.default_rng(seed)
        sample = np.sort(rng.choice(len(self.cells), min(len(self.cells), 8 * count), replace=False))
        moved = np.zeros((len(sample), self.base.inputs.batch), dtype=bool)
        for mask in self._touched(sample).values():
            moved |= mask.any(2)
        pairs = np.argwhere(moved)
        if not len(pairs):
            pairs = np.argwhere(~moved)
        pairs = pairs[rng.choice(len(pairs), min(len(pairs), count), replace=False)]
        largest = max(float(one.abs().nan_to_num(0, 0, 0).max()) for one in (values, self.base.metric))
        info = torch.finfo(self.base.slice.dtype)
        allowed = _TOLERANCE[self.base.slice.dtype] * largest + 100 * info.eps * float(
            self.base.slice.abs().nan_to_num(0, 0, 0).max()
        )
        worst, chosen = 0.0, [(int(sample[number]), int(example)) for number, example in pairs]
        for (cell, example), expected in zip(chosen, self._full_values(chosen), strict=True):
            got = float(values[cell, example])
            gap = 0.0 if expected == got or (expected != expected and got != got) else abs(expected - got)
            if not gap <= (0.0 if self.exact == "bitwise" else allowed):
                where = f"cell {cell}" if self.label is None else self.label(cell)
                raise SweepCheckError(f"{self.name}, {where}, example {example}: {got:.6g}, but a full run gives {expected:.6g} "
                                      f"(tolerance {allowed:.2g}). The metric may read positions or entries that it does not "
                                      "declare, or give another value when it is called again; engine='reference' takes no "
                                      "shortcut")  # fmt: skip
            worst = max(worst, gap)
        return worst, len(pairs)

    def _full_values(self, pairs: list[tuple[int, int]]) -> list[float]:
        """The metric of some (cell, example) pairs by full forwards, which know nothing of rows and layouts."""
        inputs, read = self.base.inputs, self.reading.of_full
        declared = isinstance(self.reading.metric, Metric)  # a plain function may compare examples
        if not (declared and self.exact == "rounding" and self.cells.separable and isinstance(self.executor, Walk)):
            runs = [
                run(self.model, inputs, change=self.cells.interventions(cell), wanted=self.wanted) for cell, _ in pairs
            ]
            return [float(read(found.logits)[example]) for found, (_, example) in zip(runs, pairs, strict=True)]
        changes = [self.cells.interventions(cell, example) for cell, example in pairs]
        alone = [inputs.select([example]) for _, example in pairs]
        with torch.no_grad():  # one batch of single examples, each with its own cell's changes
            chosen = inputs.select([example for _, example in pairs])
            tap, model = ManyTap(changes, alone, set(self.wanted)), self.model
            assert isinstance(model, Transformer)
            stream = model.stream(chosen, tap)
            rows = [example for _, example in pairs]
            ends = {site for site in model.sites if site.name in ("final_scale", "final_hat", "final", "logits")}
            if type(self.reading.metric) is Metric and not ends & set(self.wanted):
                slices = self.reading.at(
                    model, stream, rows, tap
                )  # it is given what it declares, and sees nothing else
                return [float(self.reading.alone(one, row)) for one, row in zip(slices, rows, strict=True)]
            logits = model.unembed(stream, tap)
        return [
            float(read(one.expand(inputs.batch, -1, -1))[example])
            for one, (_, example) in zip(logits, pairs, strict=True)
        ]


def engine_for(asked: str, model: Hookable, cells: Cells) -> str:
    """The engine that was asked for; "full" where the fast one does not know this model or these changes."""
    return asked if asked == "reference" or (isinstance(model, Transformer) and cells.rowwise) else "full"


def free_memory(device: torch.device) -> float:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(ValueError, OSError, AttributeError):
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return 4.0 * 2**30
