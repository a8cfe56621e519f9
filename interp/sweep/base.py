"""The runs that a sweep starts from and takes values from, recorded once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interp.hookable import Hookable
from interp.interventions import Intervention
from interp.metrics import Metric
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.run import Cache, RunTap, check_weights, run
from interp.sites import Site
from interp.sweep.cells import in_rows
from interp.sweep.cost import reached
from interp.sweep.reading import Reading

_SHORT = 512  # tokens of a run up to which two in one batch are faster than one after the other


@dataclass(frozen=True, eq=False)
class Recorded:
    """One unpatched run: inputs, recorded sites, what the metric reads, that slice [batch n_positions n_entries], its metric."""

    inputs: Inputs
    cache: Cache
    reading: Reading
    slice: Tensor
    metric: Tensor


def record(
    model: Hookable,
    inputs: Inputs,
    sites: Iterable[Site],
    metric: Metric | Callable[[Tensor], Tensor],
    change: Sequence[Intervention] = (),
    wanted: Sequence[Site] = (),
    whole: bool = False,
) -> Recorded:
    """One run of a sweep, made without logits that nothing reads. whole: with them, by `interp.run`."""
    reading = Reading(metric, inputs, model.config.vocab)
    if whole or not isinstance(model, Transformer):
        found = run(model, inputs, record=list(sites), change=change, wanted=wanted)
        one = reading.of_run(found.logits)
        return Recorded(inputs, found.cache, reading, one, reading.of_full(found.logits, inputs))
    tap = RunTap(model, inputs, list(sites), change, tuple(wanted))
    with torch.no_grad():
        stream = model.stream(inputs, tap)
        if _at_the_end(model, tap.wanted):
            one = reading.of_run(model.unembed(stream, tap))
        else:
            one = reading.at(model, stream)
    tap.check_reached()
    return _recorded(model, inputs, tap.recorded, reading, one)


def _recorded(model: Any, inputs: Inputs, values: dict[Site, Tensor], reading: Reading, one: Tensor) -> Recorded:
    if not bool(torch.isfinite(one.sum())):
        check_weights(model)
    return Recorded(inputs, Cache(values), reading, one, reading.of_slice(one))


def _at_the_end(model: Any, sites: Iterable[Site]) -> bool:
    """Whether any of the sites lies behind the last block."""
    ends = [site for site in sites if site.layer is None and site.name not in ("embed", "pos_embed")]
    return any(site.stack == model.sites[-1].stack for site in ends)


def record_pair(
    model: Transformer,
    base: Inputs,
    source: Inputs,
    further: Sequence[Site],
    metric: Metric | Callable[[Tensor], Tensor],
    wanted: Sequence[Site],
) -> tuple[Recorded, Recorded] | None:
    """The run that cells start from, with `further` sites, and the one that they take values from, made as one batch.

    Short runs cost a processor little more together than one of them. None where that is no gain, and where a value that the
    two share would not have the same bits in both: a patch that changes nothing must have effect exactly 0.
    """
    if base.tokens.numel() > _SHORT or model.encoder is not None or _at_the_end(model, wanted):
        return None
    both = joined(base, source)
    if both is None:
        return None
    tap = RunTap(model, both, list(dict.fromkeys([*wanted, *further])), (), tuple(wanted))
    with torch.no_grad():
        streams = model.stream(both, tap).split(base.batch)
        found = []
        for part, (inputs, sites) in enumerate(((base, tap.recorded), (source, wanted))):
            values = {site: tap.recorded[site].split(base.batch)[part] for site in sites}
            reading = Reading(metric, inputs, model.config.vocab)
            found.append(_recorded(model, inputs, values, reading, reading.at(model, streams[part])))
    same = torch.from_numpy(~reached(model.config, base, base.tokens != source.tokens)).to(base.tokens.device)
    for site in wanted:
        ours, theirs = (in_rows(site, one.cache[site])[same] for one in found)
        if not torch.equal(ours, theirs):
            return None
    return found[0], found[1]


def joined(first: Inputs, second: Inputs) -> Inputs | None:
    """Two batches as one, without roles; None unless they have the same fields and differ in their tokens only."""
    fields = {}
    for name in ("tokens", "mask", "prefix_length", "segments"):
        a, b = getattr(first, name), getattr(second, name)
        if (a is None) != (b is None):
            return None
        fields[name] = None if a is None or b is None else torch.cat([a, b])
    return None if first.embeddings is not None or second.embeddings is not None else Inputs(**fields)


def further_sites(model: Hookable, engine: str, exact: str) -> list[Site]:
    """What an engine reads of the base run beside the sites that are swept: each layer's stream, keys and values."""
    if engine == "reference" or not isinstance(model, Transformer):
        return []
    last = {name: len(blocks) - 1 for name, blocks in _stacks(model).items()}
    ends = [site for site in model.sites if site.name == "resid_post" and site.layer == last[site.stack]]
    if exact == "bitwise":
        return [*(site for site in model.sites if site.name == "resid_pre"), *ends]
    keys = "k_rot" if model.config.rotates else "k"
    queries = "q_rot" if model.config.rotates else "q"
    names = {"resid_pre", keys, "v", "cross_k", "cross_v", *([queries] if model.config.norm_position == "pre" else [])}
    middles = {
        Site(blocks[layer].middle.name, layer, name)  # type: ignore[arg-type]
        for name, blocks in _stacks(model).items()
        for layer in range(len(blocks))
    }
    source = [Site("final", stack="encoder")] if model.encoder is not None else []
    return list(
        dict.fromkeys([*(site for site in model.sites if site.name in names or site in middles), *ends, *source])
    )


def _stacks(model: Any) -> dict[str | None, Any]:
    """Each stack's blocks."""
    own = {model.sites[-1].stack: model.blocks}
    return own if model.encoder is None else {"encoder": model.encoder.blocks, **own}
