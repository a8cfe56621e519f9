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
from interp.sweep.reading import Reading


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
    ends = [site for site in tap.wanted if site.layer is None and site.name not in ("embed", "pos_embed")]
    with torch.no_grad():
        stream = model.stream(inputs, tap)
        if any(site.stack == model.sites[-1].stack for site in ends):  # the end of the model is recorded or changed
            one = reading.of_run(model.unembed(stream, tap))
        else:
            one = unembed_at(model, stream, reading)
    tap.check_reached()
    if not bool(torch.isfinite(one.sum())):
        check_weights(model)
    return Recorded(inputs, Cache(tap.recorded), reading, one, reading.of_slice(one))


def unembed_at(model: Any, stream: Tensor, reading: Reading) -> Tensor:
    """The entries that the metric reads [batch n_positions n_entries] of a stream after the last block [batch pos d_model]."""
    rows = stream.gather(1, reading.positions[..., None].expand(-1, -1, stream.shape[-1]))
    return model.unembed(rows, None, None if reading.entries is None else reading.at_entries())


def further_sites(model: Hookable, engine: str, exact: str) -> list[Site]:
    """What an engine reads of the base run beside the sites that are swept: each layer's stream, keys and values."""
    if engine == "reference" or not isinstance(model, Transformer):
        return []
    last = {name: len(blocks) - 1 for name, blocks in _stacks(model).items()}
    ends = [site for site in model.sites if site.name == "resid_post" and site.layer == last[site.stack]]
    if exact == "bitwise":
        return [*(site for site in model.sites if site.name == "resid_pre"), *ends]
    keys = "k_rot" if model.config.rotates else "k"
    names = {"resid_pre", keys, "v", "cross_k", "cross_v"}
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
