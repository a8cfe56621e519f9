"""Causal tracing (Meng et al. 2022, ROME): which single clean value, put back into a corrupted run, restores the answer.

The subject is corrupted by other tokens (symmetric replacement) or by Gaussian noise on its embeddings. The two can disagree, and
noise leaves what the model was trained on (Zhang & Nanda 2024): prefer replacement, show noise beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from tqdm.auto import tqdm

from interp.analyses.joint_metric import (
    Asked,
    TraceError,
    asked,
    copies,
    joint_metric,
    layer_windows,
    metric_names,
    odd_window,
)
from interp.analyses.subject_noise import noise_scale, subject_noise
from interp.analyses.trace_cells import severed_cells, span_cells
from interp.analyses.trace_result import TracePart, TraceResult, position_roles, real_positions
from interp.hookable import Hookable, UnsupportedModelError, require_head
from interp.interventions import Add
from interp.model.inputs import Inputs
from interp.sites import Site, output_sites, resolve
from interp.sweep import SweepPlan
from interp.sweep.base import further_sites, record
from interp.sweep.cells import Cells
from interp.sweep.execute import Job, engine_for
from interp.sweep.grid import SiteGrid, check_choices, check_pairs
from interp.tasks.facts import Prompts
from interp.tasks.task import Pairs

CORRUPTIONS = ("replacement", "noise")
SEVERED = ("ffn_out", "attn_out")


def causal_trace(
    model: Hookable,
    prompts: Prompts | Pairs,
    metrics: Sequence[str] | str | None = None,
    corruption: str | Sequence[str] | None = None,
    noise: float = 3.0,
    nu: float | None = None,
    noise_seeds: int = 10,
    seed: int = 0,
    window: int | None = None,
    sites: str | Sequence[str] = ("resid_post", "ffn_out", "attn_out"),
    severed: str | Sequence[str] = (),
    severed_at: str | None = "subject_last",
    answers: Literal["given", "predicted"] | None = None,
    published: Literal["code", "paper"] | None = None,
    engine: Literal["fast", "reference"] = "fast",
    exact: Literal["rounding", "bitwise"] = "rounding",
    budget: float | None = None,
    check: int = 2,
    batch: int = 64,
    progress: bool = False,
) -> TraceResult:
    """The metrics after restoring each (site, layer, position) of the clean run in the corrupted one (Meng et al. 2022, ROME).

    prompts: Pairs for replacement and for logit differences, Prompts otherwise; both need the roles subject and subject_last.
    metrics: "probability", "logit_difference" or both, of the same runs. corruption: "replacement" (default), "noise" or both.
    noise: standard deviation in multiples of `noise_scale` of these prompts; nu: the standard deviation itself instead.
    noise_seeds: draws per prompt, each a function of (seed, draw, the prompt's tokens) alone; every restoration and the corrupted
    baseline of one (prompt, draw) have the same noise. window: layers of ffn_out and attn_out restored together (odd; streams are
    restored one at a time). severed: further variants of the streams' trace, in which that token's "ffn_out" or "attn_out" in
    later layers is held at its corrupted value; severed_at: the role at which, None for every position. answers: the token that
    is followed, "given" by the prompts or "predicted" by the model.

    published: "code" or "paper" make noise, 10-layer windows and the probability of the predicted token the defaults. They
    differ: the paper restores layers l − 4 … l + 5, the code l − 5 … l + 4, and the code seeds its noise anew in every call, so
    one draw of 10 rows serves the whole study. engine, exact, budget, check: as in `patch_sweep`. batch: rows (prompt × draw)
    per sweep. Raises TraceError, UnsupportedModelError, UnknownSiteError and what `patch_sweep` raises.
    """
    require_head(model)
    check_choices("denoising", engine, exact, budget)
    kinds, window = _choices(corruption, noise, nu, noise_seeds, window, published, batch)
    if published is not None:
        answers, metrics = answers or "predicted", metrics or "probability"
    ask = asked(model, prompts, answers or "given", metrics)
    names = metric_names(metrics, ask.wrong)
    if "replacement" in kinds and ask.corrupted is None:
        raise TraceError("corruption by replacement needs Pairs (as replacement_pairs makes them), got Prompts")
    if severed and severed_at is not None and severed_at not in ask.clean.roles:
        raise TraceError(
            f"severed_at={severed_at!r} is not allowed; allowed: {', '.join(ask.clean.roles)}, or None for all positions"
        )
    cells = _CellMaker(model, *_sites(model, sites, severed), window, severed_at, published)
    if nu is None and "noise" in kinds:
        nu = noise * noise_scale(model, ask.clean)
    way = _Way(model, ask, names, cells, nu, noise_seeds, seed, published == "code", engine, exact, budget, check)
    todo = [
        (kind, rows) for kind in kinds for rows in _groups(ask.clean, batch // (noise_seeds if kind == "noise" else 1))
    ]
    bar = tqdm(todo, disable=not progress, desc="tracing", unit="batch")
    parts = [part for kind, rows in bar for part in way.traced(kind, rows)]
    spans = {site.name: [(s[0], s[-1], len(s) < cells.width(site.name)) for s in cells.spans(site.name)]
             for site in cells.first}  # fmt: skip
    return TraceResult(tuple(parts), names, spans, ask.facts, ask.right, position_roles(ask.clean), nu)


@dataclass(frozen=True)
class _CellMaker:
    """Which layers each cell of each site restores: names of restored sites, of severed ones, and at which role."""

    model: Hookable
    first: tuple[Site, ...]
    severed: tuple[str, ...]
    window: int
    severed_at: str | None
    published: str | None

    def width(self, name: str) -> int:
        return 1 if name.startswith("resid") else self.window

    def spans(self, name: str) -> list[tuple[int, ...]]:
        return layer_windows(len(output_sites(name, self.model.sites)), self.width(name), self.published)

    def wanted(self) -> list[Site]:
        names = [*(site.name for site in self.first), *self.severed]
        return list(dict.fromkeys(site for name in names for site in output_sites(name, self.model.sites)))

    def make(
        self, clean: Any, corrupted: Any, inputs: Inputs, always: Sequence[Add]
    ) -> list[tuple[str, str, SiteGrid, Cells]]:
        """Per restored site, and per severed variant of a stream: its name, what is severed, grid and cells."""
        every = np.repeat(np.arange(inputs.length)[:, None], inputs.batch, 1)
        found, order = [], self.model.sites
        for site in self.first:
            sites = output_sites(site.name, order)
            made = span_cells(site.name, sites, self.spans(site.name), every, clean, order, always)
            found.append((site.name, "none", *made))
            for cut in self.severed if site.name.startswith("resid") else ():
                rows = every if self.severed_at is None else inputs.roles[self.severed_at].cpu().numpy()[None]
                held = output_sites(cut, order)
                made = severed_cells(site.name, sites, cut, held, rows, clean, corrupted, order, always)
                found.append((site.name, cut, *made))
        return found


@dataclass(frozen=True)
class _Way:
    """How a batch of prompts is traced."""

    model: Hookable
    ask: Asked
    names: tuple[str, ...]
    cells: _CellMaker
    nu: float | None
    noise_seeds: int
    seed: int
    code: bool
    engine: str
    exact: Any
    budget: float | None
    check: int

    def traced(self, kind: str, rows: np.ndarray) -> list[TracePart]:
        """The parts of some prompts of one length."""
        model, draws = self.model, list(range(self.noise_seeds)) if kind == "noise" else [-1]
        clean = _unpadded(self.ask.clean, rows)
        source, base, always = self._ends(kind, clean, rows, draws)
        each = np.repeat(rows, len(draws))
        index = torch.from_numpy(each).to(clean.tokens.device)
        wrong = None if self.ask.wrong is None else self.ask.wrong[index]
        last = torch.full((len(each),), clean.length - 1, device=clean.tokens.device)
        metric = joint_metric(self.names, self.ask.correct[index], wrong, last)
        wanted, whole = self.cells.wanted(), self.engine == "reference" or self.exact == "bitwise"
        own = [resolve(change.place, model.sites) for change in always]
        further = further_sites(model, self.engine, self.exact)
        start = record(model, base, list(dict.fromkeys([*wanted, *own, *further])), metric, always, wanted, whole)
        gives = record(model, source, wanted, metric, (), wanted, whole)
        made = self.cells.make(gives.cache, start.cache, base, always)
        jobs = [
            Job(
                model,
                cells,
                start,
                self.exact,
                engine_for(self.engine, model, cells),
                self.budget,
                grid.name,
                grid.label,
                wanted,
            )
            for _, _, grid, cells in made
        ]
        got = SweepPlan(jobs, [grid for _, _, grid, _ in made], "denoising", gives.metric, start.metric).run(
            self.check, progress=False
        )
        shape = (len(self.names), len(each))
        ends = got.clean.unflatten(0, shape), start.metric.cpu().unflatten(0, shape)
        seeds = np.tile(draws, len(rows))
        return [
            TracePart(kind, site, cut, each, seeds, real_positions(self.ask.clean, rows, grid.rows, len(draws)),
                      got.values[grid.name].unflatten(-1, shape), *ends, got.checked)
            for site, cut, grid, _ in made
        ]  # fmt: skip

    def _ends(
        self, kind: str, clean: Inputs, rows: np.ndarray, draws: list[int]
    ) -> tuple[Inputs, Inputs, tuple[Add, ...]]:
        """The clean batch, the corrupted one, and the interventions that corrupt it; beyond the first copy the two are alike."""
        device = clean.tokens.device
        if kind == "replacement":
            assert self.ask.corrupted is not None
            corrupted = _unpadded(self.ask.corrupted, rows)
            check_pairs(clean, corrupted)
            base, more = copies(corrupted, self.names), copies(corrupted, self.names[1:])
            return replace(base, tokens=torch.cat([clean.tokens, more.tokens])), base, ()
        many = clean.select(torch.arange(clean.batch).repeat_interleave(len(draws)).to(device))
        both = copies(many, self.names)
        drawn = subject_noise(clean, draws, self.model.config.d_model, self.seed, self.code) * (self.nu or 0.0)
        rest = drawn.new_zeros(drawn.shape[0] * (len(self.names) - 1), *drawn.shape[1:])
        return both, both, (Add("embed", torch.cat([drawn, rest])),)


def _groups(inputs: Inputs, batch: int) -> Iterator[np.ndarray]:
    """Examples of one length, at most `batch` at a time."""
    length = (torch.full((inputs.batch,), inputs.length) if inputs.mask is None else inputs.mask.sum(1)).cpu().numpy()
    for one in dict.fromkeys(length.tolist()):
        rows = np.flatnonzero(length == one)
        yield from (rows[i : i + max(1, batch)] for i in range(0, len(rows), max(1, batch)))


def _unpadded(inputs: Inputs, rows: np.ndarray) -> Inputs:
    """Some examples of one length, without padding."""
    index = torch.from_numpy(rows).to(inputs.tokens.device)
    some = inputs.select(index)
    if some.mask is None or bool(some.mask.all()):
        return replace(some, mask=None)
    if (
        some.prefix_length is not None
        or some.segments is not None
        or some.embeddings is not None
        or some.source is not None
    ):
        raise TraceError("padded prompts with prefix_length, segments, embeddings or a source cannot be traced; allowed: prompts "
                         "of one length")  # fmt: skip
    before = some.mask.long().cumsum(1) - 1  # where each real token stands among the real ones
    roles = {name: before.gather(1, at[:, None])[:, 0] for name, at in some.roles.items()}
    return Inputs(some.tokens[some.mask].unflatten(0, (len(rows), -1)), roles=roles)


def _choices(corruption, noise, nu, noise_seeds, window, published, batch) -> tuple[tuple[str, ...], int]:
    """The corruptions and the window, checked."""
    if published not in (None, "code", "paper"):
        raise TraceError(f"published={published!r} is not allowed; allowed: None, 'code', 'paper'")
    corruption = corruption or ("replacement" if published is None else "noise")
    kinds = (corruption,) if isinstance(corruption, str) else tuple(corruption)
    if not kinds or len(set(kinds)) < len(kinds) or not set(kinds) <= set(CORRUPTIONS):
        raise TraceError(f"corruption={corruption!r} is not allowed; allowed: 'replacement', 'noise' or both")
    for name, value in (("noise", noise), ("nu", nu)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not value > 0):
            raise TraceError(f"{name}={value!r} is not allowed; allowed: a number > 0")
    for name, value in (("noise_seeds", noise_seeds), ("batch", batch)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise TraceError(f"{name}={value!r} is not allowed; allowed: an int >= 1")
    if window is None:
        window = 1 if published is None else 10
    return kinds, odd_window(window, even=published is not None)


def _sites(
    model: Hookable, sites: str | Sequence[str], severed: str | Sequence[str]
) -> tuple[tuple[Site, ...], tuple[str, ...]]:
    """The first layer's site of each restored name, and the severed names. Raises TraceError, UnsupportedModelError."""
    asked_sites = (sites,) if isinstance(sites, str) else tuple(sites)
    cut = (severed,) if isinstance(severed, str) else tuple(severed or ())
    if not asked_sites or len(set(asked_sites)) < len(asked_sites):
        raise TraceError(f"sites={sites!r} is not allowed; allowed: different per-layer names such as 'resid_post'")
    if len(set(cut)) < len(cut) or not set(cut) <= set(SEVERED):
        raise TraceError(
            f"severed={severed!r} is not allowed; allowed: different ones of {', '.join(map(repr, SEVERED))}"
        )
    if cut and not any(name.startswith("resid") for name in asked_sites):
        raise TraceError(f"severed={severed!r} needs a stream among the sites, such as 'resid_post'; got {asked_sites}")
    found = []
    for name in (*asked_sites, *cut):
        every = output_sites(name, model.sites)
        if not every or every[0].spec.axes != ("position", "d_model") or every[0].layer is None:
            names = dict.fromkeys(
                s.name for s in model.sites if s.layer is not None and s.spec.axes == ("position", "d_model")
            )
            raise UnsupportedModelError(f"site {name!r} cannot be restored token by token in every layer; this model has "
                                        f"{', '.join(names)}")  # fmt: skip
        found.append(every[0])
    return tuple(found[: len(asked_sites)]), cut
