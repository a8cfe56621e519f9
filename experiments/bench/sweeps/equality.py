"""How far the fast engine's values are from full forward passes with one replacement each."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from interp import Replace, Site, run
from sweeps import peers
from sweeps.case import Case, spread

ALLOWED = {torch.float64: 1e-12, torch.float32: 2e-5}


def equality(case: Case, engine: str, dtype: torch.dtype, cells: int) -> dict[str, Any]:
    """A row: the largest difference over sampled cells, over the largest |metric|, and what is allowed."""
    ours = copy.deepcopy(case.ours).to(dtype)
    sample = spread(cells, len(case.cells))
    values = peers.ours(Case(**(vars(case) | {"ours": ours})), engine).lap().values
    assert values is not None
    expected = by_definition(case, ours, sample)
    relative = float((values[sample] - expected).abs().max() / expected.abs().max())
    return {"row": case.name, "site": case.site, "dtype": str(dtype).removeprefix("torch."), "cells": len(case.cells),
            "compared": len(sample), "relative_difference": relative, "allowed": ALLOWED[dtype],
            "equal": relative <= ALLOWED[dtype]}  # fmt: skip


def by_definition(case: Case, ours: Any, sample: list[int]) -> Tensor:
    """The metric [cell, example] of one full forward pass per cell."""
    sites = [Site(case.site, layer) for layer in range(case.grid[0])]
    source = run(ours, case.clean, record=sites)
    found = []
    for layer, *at in (case.cells[cell] for cell in sample):
        change = Replace(sites[layer], source, at=tuple(at))
        found.append(case.metric(run(ours, case.corrupted, change=change).logits))
    return torch.stack(found)
