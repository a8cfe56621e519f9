"""The same function with simpler weights: `fold_norm` and `center` return a new, untied model with the same logits.

Loading never edits weights; these are visible steps, taken when an analysis of weights asks for them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from interp.model.config import ConfigError, ModelConfig
from interp.model.positions import sinusoidal
from interp.model.transformer import Transformer, require_transformer


@torch.no_grad()
def fold_norm(model: Transformer) -> Transformer:
    """A new model whose norms only normalise: every gain γ and offset β moved into the linear maps that read the norm.

    (γ x̂ + β) W + b = x̂ (γ W) + (β W + b). Biases appear where offsets need them. What no linear map reads alone keeps its
    gain: the embedding norm, and the final norm of a model without head. Logits stay the same up to rounding; folding twice
    changes nothing. Raises ConfigError for post-norm, where the normed vector is the stream itself.
    """
    require_transformer(model, "fold_norm")
    _refuse(model, "fold_norm", model.config.norm_position == "pre", "norm_position='pre'")
    places = {"qkv", "ffn"} if model.config.norm == "layernorm" else set()
    if places and model.config.head and model.config.final_norm:
        places.add("unembed")
    new = _copy(model, places)
    for block in _blocks(new):
        _fold(block.norm1, [block.attention.qkv])
        if block.norm2 is not None:
            _fold(block.norm2, [block.ffn.gate_up if new.config.gated else block.ffn.up])
        if block.cross_attention is not None:
            queries = slice(None, block.cross_attention.sizes[0] * new.config.head_size)
            _fold(block.cross_norm, [block.cross_attention.qkv], queries)
    if new.encoder is not None and new.encoder.final_norm is not None:  # read by every layer's cross-attention
        keys_values = slice(new.config.n_heads * new.config.head_size, None)
        decoder: list[Any] = list(new.blocks)
        _fold(new.encoder.final_norm, [block.cross_attention.qkv for block in decoder], keys_values)
    if new.final_norm is not None and new.unembedding is not None:
        _fold(new.final_norm, [new.unembedding], unembedding_bias=new.b_U)
    return new


@torch.no_grad()
def center(model: Transformer) -> Transformer:
    """A new model in which everything written to the stream has mean 0 over its d_model entries, with the same logits.

    Only LayerNorm subtracts the mean again, so only a pre-norm LayerNorm model with a final norm qualifies; anything else
    raises ConfigError. The unembedding stays as it is; sinusoidal positions become a learned table of the centred sinusoids.
    """
    require_transformer(model, "center")
    config = model.config
    _refuse(model, "center", config.norm_position == "pre", "norm_position='pre'")
    _refuse(model, "center", config.norm == "layernorm", "norm='layernorm'")
    _refuse(model, "center", bool(config.final_norm), "final_norm=True")
    _refuse(model, "center", not config.embedding_norm, "embedding_norm=False")
    new = _copy(model)
    if config.positions == "sinusoidal":
        new = _with_table(new)
    rows = [new.embedding.weight, new.W_pos, new.segment_embedding and new.segment_embedding.weight]
    writers: list[nn.Linear] = []
    for block in _blocks(new):
        parts = (block.attention, block.cross_attention)
        writers += [part.out for part in parts if part is not None]
        writers += [] if block.ffn is None else [block.ffn.down]
    for table in rows:
        if table is not None:
            table -= table.mean(1, keepdim=True)
    for writer in writers:  # stored [out in]: the d_model entries run down the columns
        writer.weight.sub_(writer.weight.mean(0, keepdim=True))
        if writer.bias is not None:
            writer.bias.sub_(writer.bias.mean())
    return new


def _refuse(model: Transformer, what: str, ok: bool, allowed: str) -> None:
    name = allowed.split("=")[0]
    if not ok:
        found = getattr(model.config, name)
        raise ConfigError(
            f"{what} of a model with {name}={found!r} is not allowed: the logits would change; allowed: {allowed}"
        )


def _copy(model: Transformer, biases: Iterable[str] = ()) -> Transformer:
    """The same weights in a new, untied model that also has these biases, zero where there were none."""
    config: ModelConfig = dataclasses.replace(
        model.config, bias=model.config.biases | frozenset(biases), tied_embeddings=False
    )
    new = Transformer(config, seed=None).to(device=model.device, dtype=model.dtype)
    given = model.state_dict()
    if config.head and "unembedding.weight" not in given:
        given["unembedding.weight"] = given["embedding.weight"]
    for name, parameter in new.named_parameters():
        parameter.copy_(given[name]) if name in given else parameter.zero_()
    return new.train(model.training)


def _with_table(model: Transformer) -> Transformer:
    """The same model with its sinusoids as a table of weights."""
    new = Transformer(dataclasses.replace(model.config, positions="learned"), seed=None).to(model.device, model.dtype)
    table = sinusoidal(torch.arange(model.config.n_ctx, device=model.device), model.config.d_model, model.dtype)
    new.load_state_dict({**model.state_dict(), "W_pos": table})
    return new.train(model.training)


def _blocks(model: Transformer) -> list[Any]:
    return [*model.blocks, *(model.encoder.blocks if model.encoder is not None else ())]


def _fold(
    norm: nn.Module, readers: list[nn.Linear], rows: slice = slice(None), unembedding_bias: Tensor | None = None
) -> None:
    """Move a norm's gain and offset into the given rows of the linear maps that read it."""
    gain, offset = norm.weight, norm.bias
    if not isinstance(gain, Tensor):  # norm="none"
        return
    for reader in readers:
        weight = reader.weight[rows]
        bias = reader.bias if unembedding_bias is None else unembedding_bias
        if isinstance(offset, Tensor) and bias is not None:
            bias[rows] += weight @ offset
        weight *= gain
    gain.fill_(1.0)
    if isinstance(offset, Tensor):
        offset.zero_()
