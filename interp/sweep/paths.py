"""Path patching (Wang et al. 2022; Goldowsky-Dill et al. 2023): only what goes straight from a sender to a receiver.

In the first step the sender's value is the source run's and every other component is frozen at its own in the base run, so the
receivers' inputs change by what the sender writes and nothing else; in the second the receivers have those values, and
everything runs. Senders are frozen at the base run, as published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from interp.hookable import Hookable, require_head
from interp.interventions import Freeze, Intervention, Replace
from interp.metrics import Metric
from interp.model.inputs import attention_edges, position_ids
from interp.model.positions import rotary_table
from interp.model.transformer import Transformer
from interp.run import prepare, run
from interp.sites import Site, resolve
from interp.sweep.base import Recorded, further_sites, record
from interp.sweep.cells import Grid
from interp.sweep.checkpoint import Checkpoint
from interp.sweep.errors import SweepError
from interp.sweep.execute import Exact, Job, engine_for
from interp.sweep.grid import SiteGrid, axes_of, check_choices, check_pairs, site_grids, site_groups, sites_of
from interp.sweep.listed import Listed
from interp.sweep.patch import Direction, SweepPlan
from interp.sweep.result import SweepResult

SENDERS = ("z", "head_out", "attn_out", "cross_z", "cross_head_out", "cross_out", "ffn_act", "ffn_out")
RECEIVERS = (
    "norm1",
    "q",
    "k",
    "v",
    "cross_norm",
    "cross_q",
    "cross_k",
    "cross_v",
    "norm2",
    "ffn_pre",
    "ffn_up",
    "final",
    "logits",
)


def path_patch(
    model: Hookable,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    receivers: Mapping[str, Any],
    senders: str = "z",
    by: str | Sequence[str] = ("layer", "head"),
    direction: Direction = "denoising",
    engine: Literal["fast", "reference"] = "fast",
    exact: Exact = "rounding",
    positions: Sequence[int] | None = None,
    budget: float | None = None,
    check: int = 2,
    checkpoint: Checkpoint | str | Path | None = None,
    progress: bool = False,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> SweepResult:
    """The metric when only the direct path from each sender to a receiver carries the other run's value.

    receivers: name -> (site, at) or a list of them, such as {"9.9 q": ("9.q", (slice(None), 9))}: what a head or an FFN reads, or
    ("final", ()) for the output itself (direct effect). senders, by: a component's output and the axes of its sweep, as in
    `patch_sweep`. A sender that lies behind a receiver has no path to it and effect 0. Axes of the result: "receiver", then by.
    Raises SweepError and what `patch_sweep` raises.
    """
    if not isinstance(senders, str) or senders.split(".")[-1] not in SENDERS:
        raise SweepError(
            f"senders={senders!r} is not allowed; allowed: what a component writes, one of {', '.join(SENDERS)}"
        )
    clean, corrupted = (prepare(model, inputs, tokenizer, prefix) for inputs in (clean, corrupted))
    require_head(model)
    check_pairs(clean, corrupted)
    check_choices(direction=direction, engine=engine, exact=exact, budget=budget)
    by = axes_of(by)
    if "window" in by or "receiver" in by:
        raise SweepError(
            f"by={by!r} is not allowed; allowed: layer, position or role, head or neuron: a path starts at one place"
        )
    groups = site_groups(model, senders, by)
    places = _places(model, receivers)
    frozen = [site for site in model.sites if site.name in ("attn_out", "cross_out", "ffn_out")]
    targets = [site for place in places.values() for site, _ in place]
    sending = sites_of(groups)
    streams = [site for site in model.sites if site.name in ("resid_pre", "resid_mid", "resid_cross", "resid_post")]
    wanted = list(dict.fromkeys([*sending, *targets]))
    reads = list(dict.fromkeys([*wanted, *frozen, *streams, *further_sites(model, engine, exact)]))
    whole = engine == "reference" or exact == "bitwise"
    runs = {"clean": record(model, clean, reads, metric, (), wanted, whole),
            "corrupted": record(model, corrupted, reads, metric, (), wanted, whole)}  # fmt: skip
    source, base = (
        runs[key] for key in (("clean", "corrupted") if direction == "denoising" else ("corrupted", "clean"))
    )
    shapes = {site: tuple(base.cache[site].shape) for site in wanted}
    (grid,) = site_grids(groups, by, shapes, clean, corrupted, 1, positions)
    sent = grid.cells(source.cache, model.sites)
    paths = _Paths(model, base, source, sent, list(places.values()), not whole, wanted)
    cells = PathCells(paths, model.sites, targets)
    axes = ("receiver", *grid.axes)
    whole_grid = SiteGrid(f"{senders} → receiver", (), axes, (list(places), *grid.coordinates), (), None, 1)
    way = engine_for(engine, model, cells)
    job = Job(model, cells, base, exact, way, budget, whole_grid.name, whole_grid.label, wanted)
    plan = SweepPlan([job], [whole_grid], direction, runs["clean"].metric, runs["corrupted"].metric)
    return plan.run(check, checkpoint, progress)


def _places(model: Hookable, receivers: Mapping[str, Any]) -> dict[str, list[tuple[Site, Any]]]:
    """The receivers by name, each a list of (site, at)."""
    if not isinstance(receivers, Mapping) or not receivers:
        raise SweepError(
            f"receivers={receivers!r} is not allowed; allowed: name -> (site, at), such as {{'9.9 q': ('9.q', (slice(None), 9))}}"
        )
    found = {}
    for name, place in receivers.items():
        many = [place] if isinstance(place, tuple | str) else list(place)
        pairs = [(one, ()) if isinstance(one, str) else one for one in many]
        found[str(name)] = [(resolve(site, model.sites), at) for site, at in pairs]
        for site, _ in found[str(name)]:
            if site.name not in RECEIVERS:
                raise SweepError(
                    f"receiver {name!r} is '{site}'; allowed: what a component reads, one of {', '.join(RECEIVERS)}"
                )
    return found


class PathCells(Listed):
    """Cells whose receivers' values are worked out when they are needed."""

    def __init__(self, paths: Sequence[list[Intervention]], order: Sequence[Site], targets: Sequence[Site]) -> None:
        super().__init__([], order)
        self.changes = paths  # type: ignore[assignment]
        self.sites = tuple(site for site in order if site in set(targets))

    @property
    def rowwise(self) -> bool:  # type: ignore[override]
        return True  # only Replace

    def identity(self) -> Any:
        paths: Any = self.changes
        return (paths.sent.identity(), [[(str(site), at) for site, at in place] for place in paths.places])


class _Paths(Sequence):
    """The second step's changes of every (receiver, sender) cell; the last few are kept."""

    def __init__(
        self,
        model: Hookable,
        base: Recorded,
        source: Recorded,
        sent: Grid,
        places: list[list[tuple[Site, Any]]],
        fast: bool,
        wanted: Sequence[Site],
    ) -> None:
        self.model, self.base, self.source, self.sent, self.places, self.wanted = (
            model,
            base,
            source,
            sent,
            places,
            wanted,
        )
        # Where the stream is a sum, what a sender writes arrives as it is; elsewhere the first step is run in full.
        self.linear = fast and isinstance(model, Transformer) and model.additive_stream and model.encoder is None
        self.order = {site: i for i, site in enumerate(model.sites)}
        self.kept: dict[int, list[Intervention]] = {}

    def __len__(self) -> int:
        return len(self.places) * len(self.sent)

    def __getitem__(self, cell: Any) -> list[Intervention]:  # type: ignore[override]
        cell = int(cell)
        if cell >= len(self):
            raise IndexError(cell)
        if cell not in self.kept:
            if len(self.kept) > 4096:
                self.kept.clear()
            self.kept[cell] = self._changes(*divmod(cell, len(self.sent)))
        return self.kept[cell]

    def _changes(self, receiver: int, sender: int) -> list[Intervention]:
        send = self.sent.interventions(sender)
        reached = [(site, at) for site, at in self.places[receiver] if self._before(send, site)]
        if not reached:
            return []
        values = self._linear(send, reached) if self.linear else self._frozen(send, reached)
        return [Replace(site, SimpleNamespace(cache={site: values[site]}), at=at) for site, at in reached]

    def _before(self, send: list[Intervention], site: Site) -> bool:
        """Whether some of the senders come before the receiver."""
        return any(self.order[change.place] < self.order[site] for change in send)

    def _frozen(self, send: list[Intervention], reached: list[tuple[Site, Any]]) -> dict[Site, Tensor]:
        """The receivers' values in a full run with every other component frozen at the base run's."""
        own = {_output(change.place) for change in send}
        outputs = [site for site in self.model.sites if site.name in ("attn_out", "cross_out", "ffn_out")]
        # Where a sender is a part of an output, its fellows are held instead of the output, and it is set after them.
        freeze = [Freeze(site, self.base) for site in outputs if site not in own]
        freeze += [Freeze(site, self.base) for site in dict.fromkeys(change.place for change in send)]
        sites = [site for site, _ in reached]
        return dict(run(self.model, self.base.inputs, record=sites, change=[*freeze, *send], wanted=self.wanted).cache)

    @torch.no_grad()
    def _linear(self, send: list[Intervention], reached: list[tuple[Site, Any]]) -> dict[Site, Tensor]:
        """The same where the stream is a sum: each receiver's part of the model on the base run's stream + what was sent."""
        values = {}
        for site, _ in reached:
            before = [change for change in send if self.order[change.place] < self.order[site]]
            delta = sum((self._written(change) for change in before), torch.zeros(()))
            new, old = self._received(site, delta), self.base.cache[site]
            moved = (delta != 0).any(-1)  # elsewhere the input is the base run's, and so is what is read of it
            values[site] = torch.where(moved.reshape(*moved.shape, *[1] * (new.ndim - 2)), new, old)
        return values

    def _written(self, change: Intervention) -> Tensor:
        """What a sender's change adds to the stream [batch pos d_model]."""
        site, base = change.place, self.base.cache[change.place]
        difference = change.apply(base, self.base.inputs) - base
        if site.name in ("z", "cross_z"):
            weight = self.model.weight("W_O" if site.name == "z" else "cross_W_O", site.layer)
            assert weight is not None
            return torch.einsum("bphd,hdm->bpm", difference, weight)
        if site.name == "ffn_act":
            weight = self.model.weight("W_out", site.layer)
            assert weight is not None
            return difference @ weight
        return difference.sum(2) if difference.ndim == 4 else difference

    def _received(self, site: Site, delta: Tensor) -> Tensor:
        """What a receiver reads when `delta` is added to its stream: its part of the model, up to the receiver."""
        model, cache, inputs = self.model, self.base.cache, self.base.inputs
        assert isinstance(model, Transformer)
        kept: dict[Site, Tensor] = {}
        tap = _Until(site, kept, set(self.wanted))
        try:
            if site.layer is None:
                last = Site("resid_post", model.config.n_layers - 1)
                model.unembed(cache[last] + delta, tap)
            else:
                block = model.blocks[site.layer]
                if site.name in ("norm2", "ffn_pre", "ffn_up"):
                    block.feed(cache[block.middle] + delta, tap)  # type: ignore[operator]
                else:
                    stream = cache[Site("resid_pre", site.layer)] + delta
                    rotary = None
                    if model.config.positions == "rotary":
                        rotary = rotary_table(model.config, position_ids(inputs), stream.dtype)
                    block.mix(stream, tap, attention_edges(model.config, inputs), rotary)  # type: ignore[operator]
        except _Reached:
            pass
        return kept[site]


class _Reached(Exception):
    """The site that was waited for."""


class _Until:
    """Keeps one site's value and stops there."""

    def __init__(self, site: Site, kept: dict[Site, Tensor], wanted: set[Site]) -> None:
        self.site, self.kept, self.wanted = site, kept, wanted

    def wants(self, site: Site) -> bool:
        return site == self.site or site in self.wanted

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        if site == self.site:
            self.kept[site] = value
            raise _Reached
        return value


def _output(site: Site) -> Site:
    """The component output that a sender is part of."""
    name = {
        "z": "attn_out",
        "head_out": "attn_out",
        "cross_z": "cross_out",
        "cross_head_out": "cross_out",
        "ffn_act": "ffn_out",
    }
    return Site(name.get(site.name, site.name), site.layer, site.stack)
