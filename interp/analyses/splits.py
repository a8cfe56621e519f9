"""Splitting sequences before anything is fitted: equal ones on the same side, so that none is held out and trained on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import torch

from interp.model.inputs import Inputs


def sequence_names(inputs: Inputs) -> list[str]:
    """A hash per sequence of its real tokens and of what else a model reads of it; equal where a model cannot tell them apart."""
    mask = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    names = []
    for i in range(inputs.batch):
        read: list[Any] = [inputs.tokens[i][mask[i]].tolist()]
        for field in ("source", "source_mask", "prefix_length", "segments", "embeddings"):
            value = getattr(inputs, field)
            read.append(None if value is None else value[i].tolist())
        names.append(hashlib.blake2b(json.dumps(read).encode(), digest_size=8).hexdigest())
    return names


def held_out_names(names: Sequence[str], share: float, generator: torch.Generator) -> set[str]:
    """The different names to hold out: about `share` of them, at least one, and never all of two or more."""
    different = list(dict.fromkeys(names))
    count = min(max(1, round(share * len(different))), max(1, len(different) - 1))
    return {different[i] for i in torch.randperm(len(different), generator=generator)[:count].tolist()}
