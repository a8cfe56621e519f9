"""Activation patching (Zhang & Nanda 2024): values of one run written into another, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import Tensor
from tqdm.auto import tqdm

from interp.hookable import Hookable, require_head
from interp.interventions import Intervention
from interp.metrics import Metric
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.run import prepare
from interp.sites import Site, resolve
from interp.sweep.base import Recorded, further_sites, record, record_pair
from interp.sweep.cells import Cells
from interp.sweep.checkpoint import Checkpoint
from interp.sweep.errors import SweepError
from interp.sweep.execute import Estimate, Exact, Job, engine_for
from interp.sweep.grid import SiteGrid, axes_of, check_choices, check_pairs, site_grids, site_groups, sites_of
from interp.sweep.listed import Listed
from interp.sweep.result import SweepResult

Direction = Literal["denoising", "noising"]


@dataclass
class SweepPlan:
    """A sweep that is ready to run: `estimate` says what it will cost, `run` carries it out."""

    jobs: list[Job]
    grids: list[SiteGrid]
    direction: str
    clean: Tensor
    corrupted: Tensor | None

    def __repr__(self) -> str:
        return f"SweepPlan({', '.join(job.name for job in self.jobs)}: {self.estimate})"

    @property
    def estimate(self) -> Estimate:
        """Cells, floating-point operations, bytes at the peak and seconds, all sites together."""
        each = [job.estimate() for job in self.jobs]
        total = [sum(values) for values in zip(*((e.cells, e.flops, e.seconds) for e in each), strict=True)]
        return Estimate(
            int(total[0]), total[1], max(e.memory for e in each), total[2], max(e.cells_at_once for e in each)
        )

    def run(
        self, check: int = 2, checkpoint: Checkpoint | str | Path | None = None, progress: bool = True
    ) -> SweepResult:
        """Every cell. Raises SweepError, SweepCheckError, SweepInterrupted."""
        if not isinstance(check, int) or isinstance(check, bool) or check < 0:
            raise SweepError(
                f"check={check!r} is not allowed; allowed: how many cells to run again in full, 0 for none"
            )
        kept = checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint(checkpoint)
        total = sum(len(job.cells) for job in self.jobs)
        with tqdm(total=total, disable=not progress, desc="patching", unit="patch", smoothing=0.1) as bar:
            done = [job.compute(check, kept, bar) for job in self.jobs]
        work: dict[str, int] = {}
        for one in done:
            for name, count in one.work.items():
                work[name] = work.get(name, 0) + count
        first = self.jobs[0]
        return SweepResult(
            metric=first.base.reading.name,
            unit=first.base.reading.unit,
            direction=self.direction,
            values={grid.name: one.values.unflatten(0, grid.shape) for grid, one in zip(self.grids, done, strict=True)},
            axes={grid.name: grid.axes for grid in self.grids},
            coordinates={grid.name: grid.coordinates for grid in self.grids},
            clean=self.clean.cpu(),
            corrupted=None if self.corrupted is None else self.corrupted.cpu(),
            engine=first.engine,
            exact=first.exact,
            work=work,
            checked=max(one.checked for one in done),
            checks=sum(one.checks for one in done),
            spans={grid.name: grid.spans for grid in self.grids},
        )


def plan_sweep(
    model: Hookable,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    sites: str | Sequence[str | Sequence[str]] = ("resid_pre", "attn_out", "ffn_out"),
    by: str | Sequence[str] = ("layer", "position"),
    direction: Direction = "denoising",
    engine: Literal["fast", "reference"] = "fast",
    exact: Exact = "rounding",
    window: int = 1,
    positions: Sequence[int] | None = None,
    budget: float | None = None,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> SweepPlan:
    """A patching sweep with its two runs made and nothing else computed: see `patch_sweep`, which runs it."""
    by, sites = axes_of(by), sites if isinstance(sites, str) else list(sites)
    clean = prepare(model, clean, tokenizer, prefix)
    changes = _changes(model, corrupted)
    other = clean if changes else prepare(model, corrupted, tokenizer, prefix)
    require_head(model)
    check_pairs(clean, other)
    check_choices(direction=direction, engine=engine, exact=exact, budget=budget)
    groups = site_groups(model, sites, by, window)
    wanted = sites_of(groups)
    denoising = direction == "denoising"
    starts, gives = (other, clean) if denoising else (clean, other)
    base, source = _runs(model, starts, gives, changes, denoising, metric, wanted, engine, exact)
    clean_run, corrupted_run = (source, base) if denoising else (base, source)
    shapes = {site: tuple(base.cache[site].shape) for site in wanted}
    grids = site_grids(groups, by, shapes, clean, other, window, positions)
    always = changes if denoising else ()
    jobs = []
    for grid in grids:
        cells = _cells(model, grid, source, always)
        way = engine_for(engine, model, cells)
        jobs.append(Job(model, cells, base, exact, way, budget, grid.name, grid.label, wanted))
    return SweepPlan(jobs, grids, direction, clean_run.metric, corrupted_run.metric)


def _runs(
    model: Hookable,
    starts: Inputs,
    gives: Inputs,
    changes: Sequence[Intervention],
    denoising: bool,
    metric: Metric | Callable[[Tensor], Tensor],
    wanted: Sequence[Site],
    engine: str,
    exact: str,
) -> tuple[Recorded, Recorded]:
    """The run that cells start from and the one that they take values from; `changes` corrupt the former when denoising."""
    further, whole = further_sites(model, engine, exact), engine == "reference" or exact == "bitwise"
    if not changes and not whole and isinstance(model, Transformer):
        pair = record_pair(model, starts, gives, further, metric, wanted)
        if pair is not None:
            return pair
    own = [resolve(change.place, model.sites) for change in changes]
    sites = list(dict.fromkeys([*wanted, *own, *further]))
    base = record(model, starts, sites, metric, changes if denoising else (), wanted, whole)
    return base, record(model, gives, wanted, metric, () if denoising else changes, wanted, whole)


def patch_sweep(
    model: Hookable,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    sites: str | Sequence[str | Sequence[str]] = ("resid_pre", "attn_out", "ffn_out"),
    by: str | Sequence[str] = ("layer", "position"),
    direction: Direction = "denoising",
    engine: Literal["fast", "reference"] = "fast",
    exact: Exact = "rounding",
    window: int = 1,
    positions: Sequence[int] | None = None,
    budget: float | None = None,
    check: int = 2,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: bool = False,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> SweepResult:
    """The metric after each patch (Zhang & Nanda 2024), [*axes, example] per site.

    clean: inputs. corrupted: inputs of equal shape, row i of both forming a pair, or interventions that corrupt the clean ones
    (Gaussian noise on the subject: AddNoise("embed", std, at="subject")). sites: per-layer names, in an encoder-decoder with
    their stack ("encoder.resid_post"); a tuple of names is patched jointly. by: the axes to sweep, of "layer" or "window",
    "position" or "role" (the inputs' named positions), "head", "neuron"; an axis left out is patched whole (without "layer":
    every layer's site at once). direction: denoising writes clean values into the corrupted run (sufficiency), noising the
    reverse (necessity). window: with "window", how many layers around each (odd; cut off at the ends, which the table marks).
    positions: only these, default all.

    engine: "fast" computes per cell only what its patch reaches, as decided from the mask; models whose blocks cannot be
    entered run batched full forwards; "reference" one full run per cell. exact: "rounding" takes every shortcut, "bitwise" only
    those that keep the reference's bits. budget: bytes that a chunk may take, default half of what is free. check: how many
    cells are run again in full; the largest difference is in the result. checkpoint: a path, where finished cells are kept, so
    that the same call goes on after an interruption. Patches that change nothing have effect exactly 0.
    Raises SweepError, SweepCheckError, SweepInterrupted, InputsError, UnknownSiteError, MetricError.
    """
    plan = plan_sweep(model, clean, corrupted, metric, sites, by, direction, engine, exact, window, positions, budget,
                      tokenizer, prefix)  # fmt: skip
    return plan.run(check, checkpoint, progress)


def _changes(model: Hookable, corrupted: Any) -> tuple[Intervention, ...]:
    """The interventions that a corruption consists of; empty when it is inputs."""
    many = (corrupted,) if isinstance(corrupted, Intervention) else corrupted
    if not isinstance(many, list | tuple) or not any(isinstance(one, Intervention) for one in many):
        return ()
    for one in many:
        if not isinstance(one, Intervention):
            raise SweepError(f"corrupted holds {one!r} beside interventions; allowed: inputs, or interventions only")
        resolve(one.place, model.sites)
    return tuple(many)


def _cells(model: Hookable, grid: SiteGrid, source: Recorded, always: Sequence[Intervention]) -> Cells:
    """The grid's cells; one by one where the base run's own changes meet them inside the model."""
    order = model.sites
    cells = grid.cells(source.cache, order, always)
    early = {resolve(change.place, order) for change in always}
    if all(site.name in ("embed", "pos_embed") for site in early) and not early & set(cells.sites):
        return cells
    alone = grid.cells(source.cache, order)
    return Listed([alone.interventions(i) for i in range(len(alone))], order, always)
