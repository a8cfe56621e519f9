"""Autoregressive generation: the output is appended to the input, with keys and values of earlier positions kept (A4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from interp.at import POSITION_AXES, SelectionError, side
from interp.hookable import Hookable, require_head
from interp.interventions import AddNoise, HasCache, Intervention, InterventionError
from interp.model.inputs import Inputs, InputsError, KVCache
from interp.model.transformer import Transformer
from interp.run import Cache, Run, RunTap, prepare, record_sites
from interp.sites import Site


class CacheError(RuntimeError):
    """A cache of keys and values that did not grow by the positions that were run."""


@dataclass(frozen=True, eq=False)
class Generated:
    """What generation gave.

    tokens [batch n]: the new ones. logits [batch n vocab]: those that each new token was chosen from. cache: the
    recorded sites at every position that was run, prompt first (the last new token is never run). inputs: what was run.
    """

    tokens: Tensor
    logits: Tensor
    cache: Cache
    inputs: Inputs

    def __repr__(self) -> str:
        return f"Generated(tokens {tuple(self.tokens.shape)}: {self.tokens.tolist()}, {self.cache!r})"


@torch.no_grad()
def generate(
    model: Hookable,
    inputs: Any,
    max_new: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Sequence[int] = (),
    seed: int = 0,
    use_cache: bool = True,
    record: str | Site | Iterable[str | Site] = (),
    change: Intervention | Sequence[Intervention] = (),
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> Generated:
    """Up to `max_new` tokens: greedy at temperature 0, else sampled from softmax(logits/temperature).

    max_new: None is 20, or as many as n_ctx leaves room for. inputs: the prompt; a prefix decoder's may have
    prefix_length, an encoder-decoder's is its target so far (BOS) beside source=. Prompts of different length: pad with
    a mask. top_k keeps the k likeliest tokens, top_p the smallest set whose probability reaches p. A sequence that has
    produced a `stop` token repeats it; generation ends when all have. record, change: as in `run`; positions in `at`
    are absolute: columns of the prompt from 0, then of the new tokens, and a change holds for its positions whenever
    they are run (one after the end of generation never is). The same result with and without the cache of keys and
    values; a bridged model recomputes.
    Raises InputsError (too long, bad ids, bad options), SelectionError, InterventionError, UnknownSiteError.
    """
    require_head(model)
    inputs = prepare(model, inputs, tokenizer, prefix)
    max_new = max(1, min(20, model.config.n_ctx - inputs.length + 1)) if max_new is None else max_new
    stop = [stop] if isinstance(stop, int | str) else torch.as_tensor(() if stop is None else stop).flatten().tolist()
    _check_options(model, inputs, max_new, temperature, top_k, top_p, stop)
    generator = torch.Generator().manual_seed(seed)
    stops = torch.tensor(stop, device=inputs.tokens.device).long()
    cache = KVCache() if use_cache and isinstance(model, Transformer) else None
    tap = _GenerationTap(model, inputs, max_new, record_sites(model, record), change)
    new, chosen_from, step = [], [], inputs
    done = torch.zeros(inputs.batch, dtype=torch.bool, device=inputs.tokens.device)
    for _ in range(max_new):
        logits = _last_logits(model, step, tap, cache)
        token = _choose(logits, temperature, top_k, top_p, generator)
        if new:
            token = torch.where(done, new[-1], token)
        new.append(token)
        chosen_from.append(logits)
        done = done | torch.isin(token, stops)
        if bool(done.all()) or len(new) == max_new:
            break
        inputs = _append(inputs, token[:, None])
        step = inputs if cache is None else Inputs(token[:, None], prefix_length=inputs.prefix_length)
    tap.check_reached()
    return Generated(torch.stack(new, 1), torch.stack(chosen_from, 1), tap.joined(inputs), inputs)


class _GenerationTap(RunTap):
    """Applies changes and records over many forward passes, each of the positions `start` … of one growing sequence."""

    def __init__(self, model: Hookable, prompt: Inputs, max_new: int, record, changes) -> None:
        self.horizon = _append(prompt, prompt.tokens.new_zeros(prompt.batch, max_new - 1))  # all that can be run
        super().__init__(model, self.horizon, record, changes)
        self.covered: dict[Intervention, int] = {}  # how many positions the run that a change takes its values from has
        self.changes = {site: [self._to_come(site, one) for one in those] for site, those in self.changes.items()}
        self.start, self.pieces = 0, {site: [] for site in self.record}

    def begin(self, start: int) -> None:
        """The next forward pass runs the positions from `start`."""
        self.start, self.recorded = start, {}

    def end(self) -> None:
        """Put this pass's values behind those of the passes before; a pass from 0 replaces them."""
        for site, value in self.recorded.items():
            self.pieces[site] = [value] if self.start == 0 else [*self.pieces[site], value]

    def changed(self, site: Site, value: Tensor, change: Intervention) -> Tensor:
        """The change made to the whole sequence to come, of which this pass sees a part."""
        part, whole = [slice(None)], [value.shape[0]]
        for axis, size in zip(site.spec.axes, value.shape[1:], strict=True):
            moves = self._moves(site, axis)
            first = self.start if moves and axis != "key" else 0
            part.append(slice(first, first + size))
            whole.append(self.horizon.length if moves else size)
        full = value.new_zeros(whole)
        full[tuple(part)] = value
        new = change.apply(full, self.horizon)[tuple(part)]
        if change in self.covered and bool(new.isnan().any()):
            raise InterventionError(f"the run that {type(change).__name__} at '{site}' takes its values from covers positions "
                                    f"0 … {self.covered[change] - 1}; choose among those with at=")  # fmt: skip
        return new

    def _moves(self, site: Site, axis: str) -> bool:
        """Whether an axis grows with the generated sequence (a source's positions do not)."""
        return axis in POSITION_AXES and side(site, axis, self.horizon) is self.horizon

    def _to_come(self, site: Site, change: Intervention) -> Intervention:
        """The change with absolute positions checked, and the run it reads filled up with NaN where it has no position."""
        entries = change.at if isinstance(getattr(change, "at", ()), tuple) else (change.at,)  # type: ignore[attr-defined]
        for axis, entry in zip(site.spec.axes, entries, strict=False):
            if self._moves(site, axis) and _counts_from_the_end(entry):
                raise SelectionError(f"{axis} of '{site}': {entry!r} counts from an end that moves; allowed: absolute positions "
                                     f"0 … {self.horizon.length - 1}")  # fmt: skip
        if isinstance(change, AddNoise) and "query" in site.spec.axes:
            raise InterventionError(f"AddNoise at '{site}' would depend on how long the sequence becomes; allowed: sites without "
                                    "edges, or Add with values of your own")  # fmt: skip
        for name in ("value", "run", "reference"):
            held = getattr(change, name, None)
            if isinstance(held, HasCache) or (name == "reference" and isinstance(held, Tensor)):
                found = held.cache[site] if isinstance(held, HasCache) else held
                filled, covered = found, self.horizon.length
                for number, axis in enumerate(site.spec.axes, 1):
                    if self._moves(site, axis):
                        covered = min(covered, found.shape[number])
                        filled = _resized(filled, number, self.horizon.length)
                change = replace(change, **{name: Run(filled, Cache({site: filled}), self.horizon)})
                self.covered[change] = covered
        return change

    def joined(self, inputs: Inputs) -> Cache:
        """The recorded sites over all positions that were run."""
        return Cache({site: self._join(site, pieces, inputs.length) for site, pieces in self.pieces.items()})

    def _join(self, site: Site, pieces: list[Tensor], length: int) -> Tensor:
        axes = site.spec.axes
        grows = [number for number, axis in enumerate(axes, 1) if axis != "key" and self._moves(site, axis)]
        if "key" in axes and self._moves(site, "key"):  # no earlier query reads a later key
            nothing = float("-inf") if site.name == "scores" else 0.0
            pieces = [_resized(piece, axes.index("key") + 1, length, nothing) for piece in pieces]
        return torch.cat(pieces, grows[0]) if grows else pieces[0]


def _counts_from_the_end(entry: Any) -> bool:
    if isinstance(entry, slice):
        return min(entry.start or 0, entry.stop or 0) < 0
    if isinstance(entry, Tensor):
        return bool((entry < 0).any())
    numbers = list(entry) if isinstance(entry, list | range) else [entry]
    return any(isinstance(one, int) and one < 0 for one in numbers)


def _resized(value: Tensor, axis: int, size: int, fill: float = float("nan")) -> Tensor:
    """`value` cut to `size` entries along an axis, or filled up to it."""
    value = value.narrow(axis, 0, min(size, value.shape[axis]))
    missing = list(value.shape)
    missing[axis] = size - value.shape[axis]
    return torch.cat([value, value.new_full(missing, fill)], axis)


def _last_logits(model: Any, step: Inputs, tap: _GenerationTap, cache: KVCache | None) -> Tensor:
    before = 0 if cache is None else cache.length
    tap.begin(before)
    logits = model(step, tap) if cache is None else model(step, tap, kv_cache=cache)
    tap.end()
    if cache is not None and (cache.length != before + step.length or _held(cache) != cache.length):
        raise CacheError(f"the cache holds {_held(cache)} positions after {before} and {step.length} new ones")
    return logits[torch.arange(step.batch, device=logits.device), step.last()]


def _held(cache: KVCache) -> int:
    return min((keys.shape[1] for keys in cache.keys.values()), default=0)


def _append(inputs: Inputs, tokens: Tensor) -> Inputs:
    """The inputs with further real tokens [batch n] at their end."""
    mask = inputs.mask
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(tokens, dtype=torch.bool)], 1)
    return replace(inputs, tokens=torch.cat([inputs.tokens, tokens], 1), mask=mask)


def _choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double().cpu() / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None:
        ordered, index = logits.sort(-1, descending=True)
        chances = ordered.softmax(-1)
        cut = chances.cumsum(-1) - chances >= top_p  # the likeliest token always stays
        logits = logits.masked_fill(cut.gather(-1, index.argsort(-1)), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _check_options(model, inputs: Inputs, max_new: int, temperature: float, top_k, top_p, stop) -> None:
    if getattr(model.config, "kind", "decoder") == "encoder":
        raise InputsError("kind='encoder' sees both sides of a position and cannot generate; allowed: a decoder")
    if inputs.embeddings is not None or inputs.segments is not None:
        raise InputsError("generation appends token ids: embeddings= and segments= are not allowed")
    for name, value, kind in (("max_new", max_new, int), ("top_k", top_k, int), ("top_p", top_p, float | int),
                              ("temperature", temperature, float | int)):  # fmt: skip
        if value is not None and (not isinstance(value, kind) or isinstance(value, bool) or value != value):
            raise InputsError(
                f"{name}={value!r} is not allowed; allowed: a number" + (" without fraction" if kind is int else "")
            )
    if max_new < 1 or inputs.length + max_new - 1 > model.config.n_ctx:
        room = model.config.n_ctx - inputs.length + 1
        raise InputsError(f"max_new={max_new} after {inputs.length} tokens is not allowed; allowed: 1 … {room}")
    bad = [one for one in stop if not isinstance(one, int) or not 0 <= one < model.config.vocab]
    if bad:
        raise InputsError(f"stop holds {bad[0]!r}; allowed: token ids 0 … {model.config.vocab - 1}")
    if temperature < 0 or 0 < temperature < 1e-6:
        raise InputsError(f"temperature={temperature} is not allowed; allowed: 0 (greedy), or 1e-6 and more")
    if top_k is not None and top_k < 1:
        raise InputsError(f"top_k={top_k} is not allowed; allowed: 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputsError(f"top_p={top_p} is not allowed; allowed: 0 < top_p <= 1")
