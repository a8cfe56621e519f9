"""Attention knock-out (Geva et al. 2023): what the final position reads, from where and in which layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

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
from interp.analyses.subject_noise import subject_mask
from interp.analyses.trace_effects import mean_interval
from interp.hookable import Hookable, require_head
from interp.interventions import Add
from interp.model.inputs import Inputs
from interp.sites import output_sites
from interp.sweep import run_many
from interp.tasks.facts import Prompts
from interp.tasks.task import Pairs

TARGETS = ("subject", "relation", "last", "rest", "non_subject")
"""subject: its first to last token. relation: the role's token. last: the final position itself. rest: everything else.
non_subject: all but the subject and the final position, as Geva et al. cut it."""


def attention_knock_out(
    model: Hookable,
    prompts: Prompts | Pairs,
    metrics: Sequence[str] | str | None = None,
    window: int = 1,
    targets: Sequence[str] | Mapping[str, Tensor] = ("subject", "relation", "last", "rest"),
    answers: Literal["given", "predicted"] = "given",
    engine: Literal["fast", "reference"] = "fast",
    budget: float | None = None,
    check: int = 2,
    batch: int = 64,
    progress: bool = False,
) -> pd.DataFrame:
    """The metrics with the attention edges from the final position to `targets` cut in windows of layers (Geva et al. 2023).

    window: odd, around each centre layer (Geva et al. take 9 of GPT-2 XL's 48 layers). targets: names of TARGETS, or name -> bool
    [example pos], the keys to cut. Other arguments as in `causal_trace`; all heads are cut at once.
    One row per example × target × centre × metric. Columns: fact, example, right, from ("final"), to, edges (keys cut that the
    final position could read; 0 cuts nothing), layer (centre), window, first_layer, last_layer, clipped, metric, clean, knocked.
    Raises TraceError and what `run_many` raises.
    """
    require_head(model)
    odd_window(window)
    ask = asked(model, prompts, answers, metrics)
    names = metric_names(metrics, ask.wrong)
    masks = _masks(ask.clean, targets)
    if not isinstance(batch, int) or isinstance(batch, bool) or batch < 1:
        raise TraceError(f"batch={batch!r} is not allowed; allowed: an int >= 1")
    spans = layer_windows(len(output_sites("scores", model.sites)), window)
    parts = [
        _knocked(model, ask, np.arange(start, min(start + batch, ask.clean.batch)), names, masks, spans, engine, budget, check,
                 progress)
        for start in range(0, ask.clean.batch, batch)
    ]  # fmt: skip
    table = pd.concat(parts, ignore_index=True)
    first, last = (np.array([span[end] for span in spans])[table["layer"]] for end in (0, -1))
    table = table.assign(window=window, first_layer=first, last_layer=last, clipped=last - first + 1 < window)
    columns = [
        "fact",
        "example",
        "right",
        "from",
        "to",
        "edges",
        "layer",
        "window",
        "first_layer",
        "last_layer",
        "clipped",
    ]
    return table[[*columns, "metric", "clean", "knocked"]]


def _knocked(
    model: Hookable,
    ask: Asked,
    rows: np.ndarray,
    names: Sequence[str],
    masks: Mapping[str, Tensor],
    spans: Sequence[tuple[int, ...]],
    engine: Any,
    budget: float | None,
    check: int,
    progress: bool,
) -> pd.DataFrame:
    """The rows of some prompts."""
    index = torch.from_numpy(rows).to(ask.clean.tokens.device)
    inputs = ask.clean.select(index)
    metric = joint_metric(names, ask.correct[index], None if ask.wrong is None else ask.wrong[index], inputs.last())
    both, n = copies(inputs, names), len(rows)
    sites = output_sites("scores", model.sites)
    cells, about = [], []
    for name, mask in masks.items():
        cut = torch.zeros(both.batch, both.length, device=both.tokens.device)
        cut[:n] = cut[:n].masked_fill(mask[index], float("-inf"))
        # KnockOut cuts the same keys of every example, or one per example; here each example has its own set. The sum is the
        # same −∞, and only the first copy of the prompts is cut.
        at = (slice(None), both.last())
        for centre, span in enumerate(spans):
            cells.append([Add(sites[layer], cut[:, None], at=at) for layer in span])
            about.append((name, centre))
    got = run_many(model, both, cells, metric, engine=engine, budget=budget, check=check, progress=progress)
    values = got.values["cells"].unflatten(-1, (len(names), n)).numpy()
    cell, which, row = (axis.reshape(-1) for axis in np.indices(values.shape))
    counts = {name: mask[index].sum(1).cpu().numpy() for name, mask in masks.items()}
    example, to = rows[row], np.array([name for name, _ in about], dtype=object)[cell]
    return pd.DataFrame({
        "fact": ask.facts[example], "example": example, "right": ask.right[example], "from": "final", "to": to,
        "edges": np.stack([counts[name] for name, _ in about])[cell, row], "layer": np.array([at for _, at in about])[cell],
        "metric": np.array(names, dtype=object)[which], "clean": got.clean.unflatten(0, (len(names), n)).numpy()[which, row],
        "knocked": values.reshape(-1),
    })  # fmt: skip


def _masks(inputs: Inputs, targets: Sequence[str] | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The keys to cut, per name [example pos] bool: real tokens up to the final one."""
    subject = subject_mask(inputs)
    at = torch.arange(inputs.length, device=subject.device)[None]
    last = at == inputs.last()[:, None]
    real = torch.ones_like(subject) if inputs.mask is None else inputs.mask
    if isinstance(targets, Mapping):
        found = {name: torch.as_tensor(mask).to(subject.device) for name, mask in targets.items()}
    else:
        names = (targets,) if isinstance(targets, str) else tuple(targets)
        unknown = [name for name in names if name not in TARGETS]
        if unknown or len(set(names)) < len(names):
            raise TraceError(
                f"targets={targets!r} is not allowed; allowed: different ones of {', '.join(map(repr, TARGETS))}"
            )
        if "relation" in names and "relation" not in inputs.roles:
            raise TraceError(f"the prompts have no role 'relation'; they have {', '.join(inputs.roles)}")
        relation = torch.zeros_like(subject)
        if "relation" in inputs.roles:
            relation = (at == inputs.roles["relation"][:, None]) & ~last & ~subject
        every = {"subject": subject & ~last, "relation": relation, "last": last, "rest": ~subject & ~relation & ~last,
                 "non_subject": ~subject & ~last}  # fmt: skip
        found = {name: every[name] for name in names}
    if not found:
        raise TraceError("targets is empty: nothing to cut")
    for name, mask in found.items():
        if mask.shape != subject.shape or mask.dtype != torch.bool:
            raise TraceError(
                f"target {name!r} must be bool {tuple(subject.shape)} [example pos], got {mask.dtype} {tuple(mask.shape)}"
            )
    return {name: mask & real for name, mask in found.items()}


def knock_out_effects(table: pd.DataFrame, confidence: float = 0.95) -> pd.DataFrame:
    """The change per target and centre layer over facts, of `attention_knock_out`; rows with nothing to cut are left out.

    Columns: metric, to, layer, window, first_layer, last_layer, clipped, change (mean of knocked − clean, in the metric's unit),
    low, high (t interval over facts), n (facts), percent (Geva et al.: the mean of 100 (knocked − clean) / clean), percent_low,
    percent_high, ratio_percent (100 × the ratio of means, which facts of small probability do not dominate). Percentages of a
    logit difference have no sense where it changes its sign.
    """
    missing = [
        name for name in ("fact", "to", "edges", "layer", "metric", "clean", "knocked") if name not in table.columns
    ]
    if missing:
        raise TraceError(f"the table lacks column(s) {missing}; it has {list(table.columns)}")
    keys = ["metric", "to", "layer", "window", "first_layer", "last_layer", "clipped"]
    some = table[table["edges"] > 0]
    clean, knocked = some["clean"].astype(float), some["knocked"].astype(float)
    some = some.assign(change=knocked - clean, percent=100 * (knocked - clean) / clean, clean=clean)
    facts = some.groupby([*keys, "fact"], sort=False)[["change", "percent", "clean"]].mean()
    grouped = facts.groupby(keys, sort=False)
    found = mean_interval(grouped["change"], confidence).rename(columns={"mean": "change"})
    percent = mean_interval(grouped["percent"], confidence)
    found["percent"], found["percent_low"], found["percent_high"] = percent["mean"], percent["low"], percent["high"]
    found["ratio_percent"] = 100 * grouped["change"].mean() / grouped["clean"].mean()
    return found.reset_index()
