"""The whole model: embeddings, blocks, final norm, head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from interp.model.block import Blocks
from interp.model.config import ConfigError, ModelConfig
from interp.model.inputs import Inputs, InputsError, KVCache, as_inputs, position_ids
from interp.model.layers import embedding, linear
from interp.model.layout import ordered_sites
from interp.model.norms import make_norm
from interp.model.positions import sinusoidal
from interp.model.tap import Tap, as_tap
from interp.sites import Site, model_sites

ATTENTION_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
FFN_WEIGHTS = ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out")
MODEL_WEIGHTS = ("W_E", "W_U", "b_U", "W_pos")


class Transformer(nn.Module):
    """logits = head(final_norm(blocks(embed(tokens) + positions))).

    `model(inputs, tap=None, kv_cache=None)` -> logits [batch pos vocab] (the stream when head=False). Weights are
    drawn from `seed` alone: N(0, 1/d_in) for matrices, the two that write to the stream divided by sqrt(2 n_layers)
    (Radford 2019), embeddings N(0, 1/d_model), biases 0. They are stored as PyTorch stores them and read as
    researchers index them, as views: see `Attention`, `FeedForward`, `W_E` [vocab d_model], `W_U` [d_model vocab].
    """

    can_resume = True

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        super().__init__()
        if config.kind == "encoder-decoder":
            raise ConfigError(f"Transformer builds one stack: kind={config.kind!r} is not allowed; allowed: 'decoder', "
                              "'encoder', 'prefix-decoder'")  # fmt: skip
        self.config, self.site_names = config, model_sites()
        self.sites: tuple[Site, ...] = ordered_sites(config)
        self.embedding = embedding(config.vocab, config.d_model)
        self.W_pos = nn.Parameter(torch.empty(config.n_ctx, config.d_model)) if config.positions == "learned" else None
        self.segment_embedding = embedding(config.n_segments, config.d_model) if config.n_segments else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.blocks = Blocks(config)
        s = self.site_names
        self.final_norm = make_norm(config, s.final_scale, s.final_hat) if config.final_norm else None
        untied = config.head and not config.tied_embeddings
        self.unembedding = linear(config.d_model, config.vocab, bias=False) if untied else None
        self.b_U = nn.Parameter(torch.zeros(config.vocab)) if "unembed" in config.biases else None
        if seed is not None:  # None: the caller fills the weights
            self.reset(seed)

    @property
    def additive_stream(self) -> bool:
        """Whether the stream is the sum of everything written to it (pre-norm; R1)."""
        return self.config.norm_position == "pre" and not self.config.embedding_norm

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw every weight again from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        shrink = 1 / math.sqrt(2 * self.config.n_layers)
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or name == "b_U":
                parameter.zero_()
            elif parameter.ndim < 2:
                parameter.fill_(1.0)  # norm gains, a learned β
            else:
                std = 1 / math.sqrt(parameter.shape[1])
                std *= shrink if name.endswith(("attention.out.weight", "ffn.down.weight")) else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def forward(self, inputs: Any, tap: Tap | Any = None, kv_cache: KVCache | None = None) -> Tensor:
        inputs, tap = as_inputs(inputs), as_tap(tap)
        if kv_cache is not None and self.config.kind == "encoder":
            raise InputsError("kind='encoder' cannot use kv_cache: earlier positions read later ones; allowed: None")
        stream = self.embed(inputs, tap, kv_cache)
        stream = self.blocks(stream, 0, self.config.n_layers, tap, inputs, kv_cache)
        if kv_cache is not None:
            kv_cache.advance(inputs)
        return self.unembed(stream, tap)

    def embed(self, inputs: Inputs, tap: Any = None, kv_cache: KVCache | None = None) -> Tensor:
        """Token + position (+ segment) embeddings [batch pos d_model]: x of the first block."""
        tap, s, config = as_tap(tap), self.site_names, self.config
        x = self.embedding(inputs.tokens) if inputs.embeddings is None else inputs.embeddings
        x = tap(s.embed, x)
        if config.positions in ("learned", "sinusoidal"):
            ids = position_ids(inputs, kv_cache)
            table = sinusoidal(ids, config.d_model, x.dtype) if self.W_pos is None else self.W_pos[ids]
            x = x + tap(s.pos_embed, table.expand(x.shape))
        if self.segment_embedding is not None:
            segments = torch.zeros_like(inputs.tokens) if inputs.segments is None else inputs.segments
            x = x + self.segment_embedding(segments)
        return x if self.embedding_norm is None else self.embedding_norm(x, tap)

    def unembed(self, stream: Tensor, tap: Any = None) -> Tensor:
        """Final norm and head: stream [… d_model] -> logits [… vocab]."""
        tap, s = as_tap(tap), self.site_names
        if self.final_norm is not None:
            stream = tap(s.final, self.final_norm(stream, tap))
        if not self.config.head:
            return stream
        weight = self.embedding.weight if self.unembedding is None else self.unembedding.weight
        return tap(s.logits, nn.functional.linear(stream, weight, self.b_U))

    @property
    def W_E(self) -> Tensor:
        """[vocab d_model]."""
        return self.embedding.weight

    @property
    def W_U(self) -> Tensor | None:
        """[d_model vocab], a view; the embedding's own when tied; None without a head."""
        if not self.config.head:
            return None
        return (self.embedding.weight if self.unembedding is None else self.unembedding.weight).T

    def weight(self, kind: str, layer: int | None = None, stack: str | None = None) -> Tensor | None:
        """The weight named `kind` ("W_Q" … "b_out" with a layer; "W_E", "W_U", "b_U", "W_pos"), None when absent."""
        if stack is not None:
            raise ValueError(f"stack={stack!r}: kind={self.config.kind!r} has one stack; allowed: None")
        if kind in MODEL_WEIGHTS:
            return getattr(self, kind)
        if kind not in ATTENTION_WEIGHTS + FFN_WEIGHTS:
            allowed = ", ".join(ATTENTION_WEIGHTS + FFN_WEIGHTS + MODEL_WEIGHTS)
            raise ValueError(f"unknown weight {kind!r}; allowed: {allowed}")
        if layer is None or not 0 <= layer < self.config.n_layers:
            raise ValueError(f"layer={layer!r} for {kind!r} is not allowed; allowed: 0 … {self.config.n_layers - 1}")
        block: Any = self.blocks[layer]
        part = block.attention if kind in ATTENTION_WEIGHTS else block.ffn
        return None if part is None else getattr(part, kind)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' floating-point type."""
        return self.embedding.weight.dtype
