"""Deliberate faults of patching, recording and reading, in the manner of `faults.py`; name -> context manager."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from faults import make_fault

from interp import interventions
from interp.analyses import ffn_memory
from interp.interventions import Intervention, KnockOut, Mean, Replace
from interp.metrics import Metric
from interp.model.inputs import Inputs
from interp.run import RunTap
from interp.sweep import patch
from interp.sweep.result import SweepResult

PATCH_FAULTS: dict[str, Any] = {}


def fault(name: str, *targets: tuple[Any, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        PATCH_FAULTS[name] = make_fault(name, replacement, *targets)
        return replacement

    return register


@fault("patch off by one position", (interventions, "select"))
def _(original, site, shape, at, inputs):
    index = list(original(site, shape, at, inputs))
    if len(index) > 1 and isinstance(index[1], int):
        index[1] = (index[1] + 1) % shape[1]
    return tuple(index)


@fault("patch written in place", (Intervention, "apply"))
def _(original, self, value, inputs):
    return value.copy_(original(self, value, inputs))


@fault("patch of the whole batch with its first example", (Replace, "edited"))
def _(original, self, chosen, value, index):
    new = original(self, chosen, value, index)
    return new[:1] if isinstance(new, torch.Tensor) and new.ndim == chosen.ndim else new


@fault("patch that changes nothing", (Replace, "edited"))
def _(original, self, chosen, value, index):
    return chosen


@fault("denoising and noising swapped", (patch, "plan_sweep"))
def _(original, model, clean, corrupted, metric, sites, by, direction, *rest):
    swapped = "noising" if direction == "denoising" else "denoising"
    plan = original(model, clean, corrupted, metric, sites, by, swapped, *rest)
    plan.direction = direction
    return plan


@fault("recorded before its changes", (RunTap, "__call__"))
def _(original, self, site, value):
    before = value.detach().clone()
    changed = original(self, site, value)
    if site in self.recorded:
        self.recorded[site] = before
    return changed


@fault("recorded without a copy", (RunTap, "_keep"))
def _(original, self, site, value):
    return value if self.keep_graph else value.detach()


@fault("last position counts padding", (Inputs, "last"))
def _(original, self):
    return torch.full((self.batch,), self.length - 1)


@fault("metric reads the position before", (Metric, "read"))
def _(original, self, logits, inputs):
    return original(self, logits.roll(1, 1), inputs)


@fault("effect is a mean of ratios", (SweepResult, "effect"))
def _(original, self):
    start, end = (self.corrupted, self.clean) if self.direction == "denoising" else (self.clean, self.corrupted)
    return {site: ((values - start) / (end - start)).mean(-1) for site, values in self.values.items()}


@fault("resampling may keep an example's own value", (interventions, "derangement"))
def _(original, n, seed):
    return torch.arange(n)


@fault("knock-out sets scores to zero", (KnockOut, "edited"))
def _(original, self, chosen, value, index):
    return torch.zeros_like(chosen)


@fault("mean over positions instead of examples", (Mean, "edited"))
def _(original, self, chosen, value, index):
    return chosen.mean(1, keepdim=True)


@fault("triggers found on padding", (ffn_memory, "_extremes"))
def _(original, sign, act, real, *rest):
    return original(sign, act, torch.ones_like(real), *rest)


@fault("lens reads the position before", (sys.modules["interp.analyses.logit_lens"], "locate"))
def _(original, inputs, position, *rest):
    return (original(inputs, position, *rest) - 1).clamp(min=0)
