"""Deliberate faults of the edge engine, in the manner of `faults.py`; name -> context manager."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from faults import make_fault

from interp.circuits import attribution, patching, scrubbing
from interp.circuits.flow import _Changes
from interp.circuits.patching import Study

flow = sys.modules["interp.circuits.flow"]

CIRCUIT_FAULTS: dict[str, Any] = {}


def fault(name: str, *targets: tuple[Any, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        CIRCUIT_FAULTS[name] = make_fault(name, replacement, *targets)
        return replacement

    return register


@fault("an edge that carries nothing", (flow, "_dosed"))
def _(original, mask, changes):
    return changes.source.new_zeros(1, 1, 1, 1)


@fault("a dose that is not scaled", (flow, "_dosed"))
def _(original, mask, changes):
    return original(
        (mask != 0).to(mask.dtype) if mask.is_floating_point() and not mask.requires_grad else mask, changes
    )


@fault("frozen senders: the base run's output instead of the live one", (Study, "run"))
def _(original, study, mask=None, **more):
    add, base = _Changes.add, study.base.written
    _Changes.add = lambda self, out: add(self, base[self.n : self.n + len(out)])
    try:
        return original(study, mask, **more)
    finally:
        _Changes.add = add


@fault("sign of source - live turned round", (_Changes, "so_far"))
def _(original, self):
    return -original(self)


@fault("dose of one position given to all", (flow, "_dosed"))
def _(original, mask, changes):
    return original(mask.amax(-1, keepdim=True) if mask.ndim == 4 else mask, changes)


@fault("patched edges added to the stream, not to their receiver", (patching, "flow"), (attribution, "flow"))
def _(original, start, stages, mask=None, source=None, probe=None, resume=None):
    if mask is None:
        return original(start, stages, mask, source, probe, resume)
    spread = (mask != 0).any(0, keepdim=True).to(mask.dtype).expand_as(mask)
    return original(start, stages, spread, source, probe, resume)


@fault("output bias of attention dropped", (patching, "stages_of"), (scrubbing, "stages_of"))
def _(original, model, inputs):
    return [replace(stage, bias=None) for stage in original(model, inputs)]


@fault("keys read what values should", (flow, "_heads"))
def _(original, block, graph, edges, rotary):
    run, n, k = original(block, graph, edges, rotary), graph.n_heads, graph.kv_heads

    def swapped(given):
        if len(given) == 1:
            return run(given)
        q, keys, values = given.tensor_split((n, n + k))
        return run(torch.cat([q, values, keys]))

    return swapped


@fault("every head reads what the first reads", (flow, "_projected"))
def _(original, x, weight, bias):
    return original(x[:1], weight, bias)


@fault("rotary left out of the edge engine", (flow, "rotary_table"))
def _(original, config, positions, dtype):
    return tuple(
        torch.ones_like(x) if i == 0 else torch.zeros_like(x) for i, x in enumerate(original(config, positions, dtype))
    )


@fault("noising and denoising swapped", (patching, "study"), (attribution, "study"))
def _(original, model, clean, corrupted, metric, direction="noising", *rest):
    return original(model, clean, corrupted, metric, "denoising" if direction == "noising" else "noising", *rest)


@fault("resample gives some examples their own value", (patching, "_ablated"))
def _(original, source, base, ablation, seed):
    return base if ablation == "resample" else original(source, base, ablation, seed)


@fault("mean over positions instead of examples", (patching, "_ablated"))
def _(original, source, base, ablation, seed):
    return (
        source.mean(2, keepdim=True).expand_as(source) if ablation == "mean" else original(source, base, ablation, seed)
    )


@fault("gradients taken at the other run", (attribution, "receiver_gradients"))
def _(original, found, start):
    return original(found, start + found.source[0] - found.base.senders[0][0])


@fault("gradient summed over the batch and given to every example", (attribution, "receiver_gradients"))
def _(original, found, start):
    gradients = original(found, start)
    return gradients.sum(1, keepdim=True).expand_as(gradients)


@fault("integrated gradients at the base only", (attribution, "receiver_gradients"))
def _(original, found, start):
    return original(found, found.base.senders[0][0])


@fault("scrubbing draws from any example", (scrubbing, "_draw"))
def _(original, labels, n, generator):
    return original(None, n, generator)
