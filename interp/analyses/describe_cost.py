"""What forward passes and patching sweeps of a model cost: FLOPs by part, bytes by what holds them."""

from __future__ import annotations

import dataclasses
import math
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch

from interp.hookable import Hookable, UnsupportedModelError
from interp.metrics import logit_difference
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.sites import Site
from interp.sweep import plan_sweep
from interp.sweep.cost import Cost

Sizes = tuple[int, int, int | None]  # batch, length, source length


def forward_flops(model: Hookable, length: int, batch: int = 1, source_length: int | None = None) -> pd.DataFrame:
    """FLOPs of the matrix products of one forward pass, by part: part, flops, share.

    Two per multiply-add; scores and mix (pattern times values) over all queries and keys. A part is missing (nan) where a
    wrapped model's FFN has no single width.
    """
    sizes = sizes_of(model)
    source_length = source_of(model, length, source_length)
    counted = SimpleNamespace(**{**vars(sizes), "ffn_size": sizes.ffn_size or 0})

    def token(part: str, keys: int = 0) -> float:
        """One token in one block that attends to so many keys, by the sweep's own count."""
        return Cost(counted, batch, keys, 0, 0, 0, None).per_token(part)

    def mix(keys: int) -> float:
        return token("full", keys) - token("full")

    ffn, projections, tokens = token("ffn"), token("full") - token("ffn"), batch * length
    parts = {"attention projections": tokens * sizes.n_layers * projections,
             "attention scores and mix": tokens * sizes.n_layers * mix(length)}  # fmt: skip
    rows = tokens * sizes.n_layers
    if source_length is not None:
        sources = batch * source_length
        encoded = sources * sizes.n_encoder_layers
        parts["attention projections"] += encoded * projections
        parts["attention scores and mix"] += encoded * mix(source_length)
        of_source = sources * sizes.n_layers * token("keys")  # queries and outputs are of the target's tokens
        parts["cross-attention projections"] = rows * (projections - token("keys")) + of_source
        parts["cross-attention scores and mix"] = rows * mix(source_length)
        rows += encoded
    if sizes.ffn_size != 0:
        parts["FFN"] = float("nan") if sizes.ffn_size is None else rows * ffn
    if model.weight("W_U") is not None:
        parts["unembedding"] = tokens * Cost(counted, batch, 0, 0, 0, 0, None).unembedding
    total = sum(parts.values())
    return pd.DataFrame([{"part": part, "flops": n, "share": n / total} for part, n in parts.items()])


def cost_table(model: Hookable, inputs: Sizes, recorded: Any, site: str, missing: list[str]) -> pd.DataFrame:
    """what, cells, flops, bytes of runs and sweeps of inputs of these sizes; recorded: bytes of every site. Adds to `missing`."""
    batch, length, source = inputs
    flops = float(forward_flops(model, length, batch, source)["flops"].sum(skipna=False))
    full = _forward_cost(model, inputs, site)
    peak = full.bytes_per_row * full.most_rows
    rows: list[dict[str, Any]] = [{"what": "forward pass (activations at its peak)", "flops": flops, "bytes": peak}]
    rows.append({"what": "a run that records every site", "flops": flops, "bytes": recorded})
    if model.config.kind != "encoder":
        rows.append({"what": "KV cache", "bytes": _cache_bytes(model, inputs)})
    if model.weight("W_U") is None:
        missing.append("sweeps: the model has no unembedding, so there is no metric of logits to sweep")
        return pd.DataFrame(rows)
    stack = model.sites[-1].stack
    cells = sum((one.name, one.stack) == (site, stack) for one in model.sites) * length
    if not cells:
        missing.append(f"sweeps: the model has no site {site!r}")
        return pd.DataFrame(rows)
    what = f"patch sweep of {site}, layer × position"
    if isinstance(model, Transformer):
        rows.append({"what": f"{what}, fast", "cells": cells, **_fast(model, inputs, site, missing)})
    rows.append({"what": f"{what}, full forwards", "cells": cells, "flops": cells * flops, "bytes": peak})
    return pd.DataFrame(rows)


def _cache_bytes(model: Hookable, inputs: Sizes) -> int:
    """Keys and values of every layer; an encoder-decoder's also of the source, and the source's states."""
    (batch, length, source), sizes = inputs, sizes_of(model)
    pairs = 2 * sizes.n_layers * sizes.kv_heads * sizes.head_size
    numbers = length * pairs + (0 if source is None else source * (pairs + sizes.d_model))
    return batch * numbers * weight_of(model).element_size()


def _fast(model: Transformer, inputs: Sizes, site: str, missing: list[str]) -> dict[str, Any]:
    """FLOPs and peak bytes of the fast engine, as `plan_sweep` estimates them with memory to spare.

    Which tokens a cell computes follows from the masks and the number of layers, so a narrow model of
    this layout is laid out in its place, and only counted with the model's widths.
    """
    source = inputs[2]
    small = Transformer(_narrow(model.config)).to(model.device)
    clean, corrupted = (_tokens(model, inputs, fill) for fill in (0, 1))
    place = site if source is None else f"decoder.{site}"
    plan = plan_sweep(small, clean, corrupted, logit_difference(0, 1), place, budget=math.inf)
    job = plan.jobs[0]
    view = SimpleNamespace(config=model.config, parameters=model.parameters)
    job.cost = Cost.of(view, job.base.inputs, job.reading, job.cells.sites, walks=True)
    estimate = job.estimate()
    if source is None:
        return {"flops": estimate.flops, "bytes": estimate.memory}
    missing.append("FLOPs of the fast sweep of an encoder-decoder: the sweep's estimate counts full forwards there")
    return {"bytes": estimate.memory}


def _narrow(config: Any) -> Any:
    """A config of the same layout and little width: with less, a norm could make two different tokens equal."""
    return dataclasses.replace(
        config, vocab=2, n_heads=1, n_kv_heads=1, d_head=2, d_model=8, d_ff=1, rotary_fraction=1.0, rotary_scaling=None,
        attention_scale=1.0, norm_eps=1e-5, bias=config.biases - {"unembed"},
    )  # fmt: skip


def _forward_cost(model: Hookable, inputs: Sizes, site: str) -> Cost:
    """The sweep's cost model for full forwards whose metric reads two logits of the last token."""
    batch = inputs[0]
    entries, positions = torch.zeros(batch, 2), torch.zeros(batch, 1)
    sizes = sizes_of(model)
    view = SimpleNamespace(config=SimpleNamespace(**{**vars(sizes), "ffn_size": sizes.ffn_size or 0}),
                           parameters=lambda: iter([weight_of(model)]))  # fmt: skip
    reading: Any = SimpleNamespace(entries=entries, positions=positions)
    return Cost.of(view, _tokens(model, inputs), reading, [Site(site, 0)], walks=False)


def _tokens(model: Any, inputs: Sizes, fill: int = 0) -> Inputs:
    """Inputs of these sizes on the model's device, every token the same."""
    batch, length, source = inputs

    def full(n: int) -> torch.Tensor:
        return torch.full((batch, n), fill, device=weight_of(model).device)

    return Inputs(full(length), source=None if source is None else full(source))


def sizes_of(model: Hookable) -> SimpleNamespace:
    """The sizes that counting needs under one name each; a wrapped model's are those of its first layer.

    ffn_size: None where a wrapped model's first FFN is not two or three matrices that can be read (a mixture of experts).
    """
    c, names = model.config, ("vocab", "n_layers", "d_model", "n_heads", "d_ff")
    if isinstance(model, Transformer):
        sizes = {name: getattr(c, name) for name in names}
        return SimpleNamespace(**sizes, n_encoder_layers=c.n_encoder_layers, kv_heads=c.kv_heads, head_size=c.head_size,
                               ffn_size=c.ffn_size, gated=c.gated)  # fmt: skip
    lacking = [name for name in (*names, "kind", "n_kv_heads", "d_head") if not hasattr(c, name)]
    if lacking:
        raise UnsupportedModelError(
            f"counting needs sizes that this model's config does not have: {', '.join(lacking)}"
        )
    sizes = {name: getattr(c, name) for name in names}
    values, gate = model.weight("W_out", 0), model.weight("W_gate", 0)
    return SimpleNamespace(**sizes, n_encoder_layers=None, kv_heads=c.n_kv_heads, head_size=c.d_head,
                           ffn_size=None if values is None else values.shape[0], gated=gate is not None)  # fmt: skip


def source_of(model: Hookable, length: int, source_length: int | None) -> int | None:
    """How long the source is: of an encoder-decoder as long as the target unless said, of others None."""
    if model.config.kind != "encoder-decoder":
        return None
    return length if source_length is None else source_length


def weight_of(model: Any) -> torch.Tensor:
    """Any weight, for its type and device."""
    return next(value for _, value in model.named_parameters())
