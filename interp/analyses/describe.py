"""What a model consists of and what it costs: parameters by group, sites with their shapes, FLOPs and bytes."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from interp.analyses.describe_cost import cost_table, forward_flops, sizes_of, source_of, weight_of
from interp.display import axes, card, size
from interp.hookable import Hookable, require_hookable
from interp.model.transformer import Transformer
from interp.model.weights import PARTITION, WHOLES, WeightsError
from interp.sites import SITES

LENGTH = 128  # tokens unless said, or the model's longest input where that is shorter
_KINDS = {
    "embeddings": ("W_E", "W_pos"),
    "unembedding": ("W_U", "b_U"),
    "qk": ("W_Q", "W_K", "b_Q", "b_K"),
    "ov": ("W_V", "W_O", "b_V", "b_O"),
    "ffn_in": ("W_in", "W_gate", "b_in", "b_gate"),
    "ffn_out": ("W_out", "b_out"),
}
_BLOCKS = ("attention", "ffn")
_FUSED = {"qkv": ("q", "k", "v"), "gate_up(_proj)?": ("gate", "up", "in")}


class DescribeError(ValueError):
    """A length, batch or site that a model does not have; the message names the value received and the values allowed."""


@dataclass(frozen=True, repr=False)
class ModelInfo:
    """What `model_info` found; `missing` says in words what could not be.

    parameters: group, part_of, parameters, share (of all), share_blocks (of attention + FFN). sites, one row per name: stack,
    site, layers, symbol, equation, axes, shape (batch first), bytes (all layers), transformer_lens. flops of one forward pass:
    part, flops, share. cost: what, cells, flops, bytes.
    """

    name: str
    config: Any
    dtype: str
    device: str
    batch: int
    length: int
    source_length: int | None
    parameters: pd.DataFrame
    sites: pd.DataFrame
    flops: pd.DataFrame
    cost: pd.DataFrame
    missing: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """The model and the inputs that sizes are given for, one line."""
        source = "" if self.source_length is None else f" of a source of {self.source_length}"
        layers = f"{self.config.n_layers} layers"
        return (f"{self.name}, {self.config.kind}, {layers}, {self.dtype} on {self.device}; batch {self.batch}, "
                f"{self.length} tokens{source}")  # fmt: skip

    @property
    def cards(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Heading, columns and rows of each table in human units, as the command line and notebooks show them."""
        inside = self.parameters["part_of"].notna()
        indented = ["  " * part + group for group, part in zip(self.parameters["group"], inside, strict=True)]
        counts = self.parameters.assign(group=indented).drop(columns="part_of")
        # As they are typed: the first layer's name stands for all.
        sites = self.sites.assign(
            site=[_typed(*row) for row in self.sites[["stack", "layers", "site"]].itertuples(index=False)]
        )
        return [
            ("parameters", *_shown(counts, {"share_blocks": "of attention + FFN"})),
            ("FLOPs of a forward pass", *_shown(self.flops, {})),
            ("cost", *_shown(self.cost, {})),
            ("sites", *_shown(sites.drop(columns="stack"), {"symbol": "book", "transformer_lens": "TransformerLens"})),
        ]

    def __repr__(self) -> str:
        return f"ModelInfo({self.title}: {self.parameters['parameters'].iloc[-1]:,} parameters)"

    def _repr_html_(self) -> str:
        head = card(self.title, [f"not known: {one}" for one in self.missing])
        return head + "".join(card(title, (), columns, rows) for title, columns, rows in self.cards)


def model_info(
    model: Hookable,
    length: int | None = None,
    batch: int = 1,
    source_length: int | None = None,
    site: str = "resid_pre",
) -> ModelInfo:
    """Parameters, sites, FLOPs and bytes of a model for inputs [batch length], counted without running it.

    length: default 128, or n_ctx where that is less. source_length: of an encoder-decoder, default `length`. site: the per-layer
    name whose layer × position patching sweep is counted (of an encoder-decoder the decoder's). FLOPs are those of matrix
    products, a multiplication and an addition each, every query with every key, masked or not; norms, softmax and activation
    functions are left out. Bytes are in the weights' type. A wrapped model's blocks are taken to be all like its first, and its
    sweeps run full forwards. Raises DescribeError, UnknownSiteError, UnsupportedModelError.
    """
    require_hookable(model)
    _check_site(site)
    length, source_length = _lengths(model, length, batch, source_length)
    tensor, missing = weight_of(model), []
    parameters = parameter_groups(model)
    sites = site_table(model, length, batch, source_length)
    flops = forward_flops(model, length, batch, source_length)
    if flops["flops"].isna().any():
        missing.append(
            "FLOPs: the first layer has no FFN of one width (a mixture of experts, or none that can be read)"
        )
    if (parameters["group"] == "other").any():
        missing.append("groups of some weights: what no weight's name reads (norms, experts) is together in other")
    if not isinstance(model, Transformer):
        missing.append("sizes of single layers: every block is taken to be like the first")
    recorded = sites["bytes"].sum(skipna=False)
    cost = cost_table(model, (batch, length, source_length), recorded, site, missing)
    weights = {"what": "weights", "bytes": parameters["parameters"].iloc[-1] * tensor.element_size()}
    cost = pd.concat([pd.DataFrame([weights]), cost], ignore_index=True)
    cost = cost.reindex(columns=["what", "cells", "flops", "bytes"]).astype({"cells": "Int64"})
    name = getattr(model.config, "architecture", type(model).__name__)
    return ModelInfo(name, model.config, str(tensor.dtype).removeprefix("torch."), str(tensor.device), batch, length,
                     source_length, parameters, sites, flops, cost, tuple(missing))  # fmt: skip


def parameter_groups(model: Hookable) -> pd.DataFrame:
    """How many parameters each group has, tied ones once: group, part_of, parameters, share (of all), share_blocks.

    Rows whose part_of is missing sum to the last, all; qk and ov are parts of attention, ffn_in and ffn_out of ffn.
    share_blocks: of attention + FFN, missing for the others. A wrapped model has no group norms but other: what no name of the
    dictionary reads.
    """
    counts = _counts(model) if isinstance(model, Transformer) else _wrapped_counts(model)
    owner = {part: whole for whole in _BLOCKS for part in WHOLES[whole]}
    blocks = sum(counts.get(part, 0) for part in owner)
    rows = []
    for group, parts in {**{part: (part,) for part in counts if part not in owner},
                         **{whole: WHOLES[whole] for whole in _BLOCKS}, "all": tuple(counts)}.items():  # fmt: skip
        members = [(group, None, sum(counts.get(part, 0) for part in parts))]
        members += [(part, group, counts.get(part, 0)) for part in parts if group in _BLOCKS]
        rows += [
            {"group": name, "part_of": whole, "parameters": n, "share": n / max(sum(counts.values()), 1),
             "share_blocks": n / blocks if (whole or name) in _BLOCKS and blocks else float("nan")}
            for name, whole, n in members if n
        ]  # fmt: skip
    return pd.DataFrame(rows)


def _counts(model: Transformer) -> dict[str, int]:
    """Parameters of each group of the partition."""
    found = {}
    for group in PARTITION:
        with suppress(WeightsError):  # a group that this model lacks
            found[group] = model.weights.count(group)
    return found


def _wrapped_counts(model: Any) -> dict[str, int]:
    """Parameters of each group, by what the named weights hold; tied matrices, of equal numbers, once."""
    found: dict[str, int] = {}
    for group, kinds in _KINDS.items():
        layers = [None] if group.endswith("embeddings") or group == "unembedding" else range(model.config.n_layers)
        held = [model.weight(kind, layer) for kind in kinds for layer in layers]
        found[group] = sum(weight.numel() for weight in held if weight is not None)
    embedding, unembedding = model.weight("W_E"), model.weight("W_U")
    if embedding is not None and unembedding is not None and _same(embedding, unembedding):
        found["unembedding"] -= unembedding.numel()
    total = sum(value.numel() for value in _own(model))
    return {**found, "other": total - sum(found.values())}


def _own(model: Any) -> list[torch.Tensor]:
    """A wrapped model's parameters, without the parts that the wrapper split off a fused matrix and keeps beside it."""
    named, split = dict(model.named_parameters()), set()
    for name in named:
        for fused, parts in _FUSED.items():
            at = re.search(rf"\.(_\w+\.)?{fused}\.", name)
            split |= {f"{name[: at.start()]}.{part}." for part in parts} if at else set()
    kept = {id(value): value for name, value in named.items() if not name.startswith(tuple(split))}
    return list(kept.values())


def _same(embedding: torch.Tensor, unembedding: torch.Tensor) -> bool:
    """Whether W_U is W_E turned: a wrapper may hand out copies, so the numbers decide."""
    return embedding.shape == unembedding.T.shape and bool(torch.equal(embedding, unembedding.T))


def site_table(model: Hookable, length: int, batch: int = 1, source_length: int | None = None) -> pd.DataFrame:
    """One row per site name and stack: stack, site, layers, symbol, equation, axes, shape, bytes, transformer_lens.

    shape [batch …] is of one layer, for inputs [batch length]; bytes are those of all its layers in the weights' type.
    layers: how many have it, missing outside the blocks.
    """
    sizes, rows = sizes_of(model), {}
    source_length = source_of(model, length, source_length)
    element = weight_of(model).element_size()
    for site in model.sites:
        row = rows.setdefault((site.stack, site.name), {"layers": 0, "site": site})
        row["layers"] += 1
    table = []
    for (stack, name), row in rows.items():
        spec = row["site"].spec
        shape = (batch, *(_size(axis, name, stack, sizes, length, source_length) for axis in spec.axes))
        equation = re.search(r"\((7\.\d+)\)", spec.meaning)
        table.append(
            {"stack": stack, "site": name, "layers": row["layers"] if spec.per_layer else None, "symbol": spec.symbol,
             "equation": equation[1] if equation else "", "axes": " ".join(["batch", *axes(spec)]), "shape": shape,
             "bytes": None if None in shape else row["layers"] * element * math.prod(n or 1 for n in shape),
             "transformer_lens": spec.transformer_lens if stack is None else ""}
        )  # fmt: skip
    return pd.DataFrame(table).astype({"layers": "Int64", "bytes": "Int64"})


def _size(axis: str, name: str, stack: str | None, sizes: Any, length: int, source: int | None) -> int | None:
    """How long an axis of a site is; keys of cross-attention and everything of the encoder lie on the source."""
    of_source = stack == "encoder" or name in ("cross_k", "cross_v") or (axis == "key" and name.startswith("cross_"))
    if axis in ("position", "query", "key"):
        return source if of_source else length
    return {"one": 1, "head": sizes.n_heads, "kv_head": sizes.kv_heads, "d_head": sizes.head_size, "d_ff": sizes.d_ff,
            "d_model": sizes.d_model, "vocab": sizes.vocab}[axis]  # fmt: skip


def _lengths(model: Hookable, length: int | None, batch: int, source: int | None) -> tuple[int, int | None]:
    """The lengths to describe, checked. DescribeError."""
    sizes_of(model)  # a model without the sizes is refused first
    limit = model.config.n_ctx
    length = min(LENGTH, limit) if length is None else length
    for name, value, most in (("length", length, limit), ("batch", batch, None), ("source_length", source, limit)):
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < 1 or (most is not None and value > most):
            allowed = "an integer from 1" if most is None else f"1 … {most} (n_ctx)"
            raise DescribeError(f"{name}={value!r} is not allowed; allowed: {allowed}")
    if source is not None and model.config.kind != "encoder-decoder":
        raise DescribeError(f"source_length={source!r} is not allowed for kind={model.config.kind!r}; allowed: None")
    return length, source_of(model, length, source)


def _check_site(site: str) -> None:
    """DescribeError unless the name is that of a per-layer site with positions."""
    able = [name for name, spec in SITES.items() if spec.per_layer and "position" in spec.axes]
    if site not in able:
        raise DescribeError(f"site={site!r} is not allowed; allowed: {', '.join(able)}")


def _typed(stack: Any, layers: Any, name: str) -> str:
    return ".".join([*([] if pd.isna(stack) else [stack]), *([] if pd.isna(layers) else ["0"]), name])


def _shown(table: pd.DataFrame, renamed: Mapping[str, str]) -> tuple[list[str], list[list[str]]]:
    """Column headings and cells of a table in human units; what is missing is a dash."""
    columns = list(table.columns)
    rows = [
        [_cell(column, value) for column, value in zip(columns, row, strict=True)]
        for row in table.itertuples(index=False)
    ]
    return [renamed.get(column, column.replace("flops", "FLOPs")) for column in columns], rows


def _cell(column: str, value: Any) -> str:
    if column == "shape":
        return " × ".join("?" if n is None else str(n) for n in value)
    if not isinstance(value, str) and pd.isna(value):
        return "–"
    if column == "flops":
        return flops_text(float(value))
    if column == "bytes":
        return size(int(value))
    if column.startswith("share"):
        return f"{100 * value:.1f}%"
    return f"{value:,.0f}" if column in ("parameters", "cells") else str(value)


def flops_text(count: float) -> str:
    """Floating-point operations with a unit of 1000s: 1.5 GFLOP."""
    for unit in ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} PFLOP"
