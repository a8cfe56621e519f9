"""The whole model: embeddings, blocks, final norm, head."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from interp.model.block import Blocks
from interp.model.config import ModelConfig
from interp.model.inputs import Inputs, InputsError, KVCache, Memory, as_inputs, cross_edges, position_ids
from interp.model.layers import embedding, linear
from interp.model.layout import ordered_sites
from interp.model.norms import make_norm
from interp.model.positions import sinusoidal
from interp.model.tap import Tap, as_tap
from interp.model.weights import Weights
from interp.sites import Site, model_sites

ATTENTION_WEIGHTS = ("W_Q", "W_K", "W_V", "W_O", "b_Q", "b_K", "b_V", "b_O")
FFN_WEIGHTS = ("W_in", "W_gate", "W_out", "b_in", "b_gate", "b_out")
MODEL_WEIGHTS = ("W_E", "W_U", "b_U", "W_pos")


class Encoder(nn.Module):
    """The encoder of an encoder-decoder: the same blocks, every edge; its embeddings are the decoder's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        s = self.site_names = model_sites("encoder")
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.blocks = Blocks(config, "encoder")
        self.final_norm = make_norm(config, s.final_scale, s.final_hat) if config.final_norm else None

    def forward(self, x: Tensor, tap: Tap, inputs: Inputs) -> Tensor:
        """x [batch source_pos d_model], embedded -> the states that cross-attention reads, same shape."""
        return self.finish(self.blocks(x, 0, len(self.blocks), tap, inputs), tap)

    def finish(self, states: Tensor, tap: Tap) -> Tensor:
        """What leaves the last block, normed where the model has a final norm."""
        return tap(self.site_names.final, states if self.final_norm is None else self.final_norm(states, tap))


class Transformer(nn.Module):
    """logits = head(final_norm(blocks(embed(tokens) + positions))); an encoder-decoder's blocks also read encode(source).

    `model(inputs, tap=None, kv_cache=None)` -> logits [batch pos vocab] (the stream when head=False). Weights are
    drawn from `seed` alone: N(0, 1/d_in) for matrices, the two that write to the stream divided by the root of
    how many write (sqrt(2 n_layers), Radford 2019; a decoder with cross-attention sqrt(3 n_layers)), embeddings
    N(0, 1/d_model), biases 0. They are stored as PyTorch stores them and read as researchers index them, as views:
    see `Attention`, `FeedForward`, `W_E` [vocab d_model], `W_U` [d_model vocab].
    """

    can_resume = True

    def __init__(self, config: ModelConfig, seed: int | None = 0) -> None:
        super().__init__()
        two = config.kind == "encoder-decoder"
        self.config, self.site_names = config, model_sites("decoder" if two else None)
        self.sites: tuple[Site, ...] = ordered_sites(config)
        self.embedding = embedding(config.vocab, config.d_model)
        self.W_pos = nn.Parameter(torch.empty(config.n_ctx, config.d_model)) if config.positions == "learned" else None
        self.segment_embedding = embedding(config.n_segments, config.d_model) if config.n_segments else None
        self.embedding_norm = make_norm(config) if config.embedding_norm else None
        self.blocks = Blocks(config, "decoder" if two else None)
        s = self.site_names
        self.final_norm = make_norm(config, s.final_scale, s.final_hat) if config.final_norm else None
        untied = config.head and not config.tied_embeddings
        self.unembedding = linear(config.d_model, config.vocab, bias=False) if untied else None
        self.b_U = nn.Parameter(torch.zeros(config.vocab)) if "unembed" in config.biases else None
        self.encoder = Encoder(config.encoder) if two else None
        if seed is not None:  # None: the caller fills the weights
            self.reset(seed)
        self.eval()  # there is no dropout, so modes change nothing; other libraries ask for this one

    @property
    def additive_stream(self) -> bool:
        """Whether the stream is the sum of everything written to it (pre-norm; R1)."""
        return self.config.norm_position == "pre" and not self.config.embedding_norm

    @torch.no_grad()
    def reset(self, seed: int) -> None:
        """Draw every weight again from `seed`."""
        generator = torch.Generator().manual_seed(seed)
        writers = 3 if self.encoder is not None else 2  # per block: a decoder's cross-attention writes too
        shrink = {"blocks": 1 / math.sqrt(writers * self.config.n_layers)}
        if self.encoder is not None:
            shrink["encoder"] = 1 / math.sqrt(2 * len(self.encoder.blocks))
        for name, parameter in self.named_parameters():
            if name.endswith("bias") or name == "b_U":
                parameter.zero_()
            elif parameter.ndim < 2:
                parameter.fill_(1.0)  # norm gains, a learned β
            else:
                std = 1 / math.sqrt(parameter.shape[1])
                std *= shrink[name.split(".")[0]] if name.endswith(("attention.out.weight", "ffn.down.weight")) else 1.0
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)

    def forward(self, inputs: Any, tap: Tap | Any = None, kv_cache: KVCache | None = None) -> Tensor:
        return self.unembed(self.stream(inputs, tap, kv_cache), tap)

    def stream(self, inputs: Any, tap: Any = None, kv_cache: KVCache | None = None) -> Tensor:
        """The stream after the last block [batch pos d_model]: everything but the final norm and the head."""
        inputs, tap = as_inputs(inputs), as_tap(tap)
        if kv_cache is not None and self.config.kind == "encoder":
            raise InputsError("kind='encoder' cannot use kv_cache: earlier positions read later ones; allowed: None")
        memory = self.encode(inputs, tap, kv_cache) if self.encoder is not None else None
        x = self.embed(inputs, tap, kv_cache)
        stream = self.blocks(x, 0, self.config.n_layers, tap, inputs, kv_cache, memory)
        if kv_cache is not None:
            kv_cache.advance(inputs)
        return stream

    def encode(self, inputs: Inputs, tap: Any = None, kv_cache: KVCache | None = None) -> Memory:
        """What an encoder-decoder's cross-attention reads of `inputs.source`. Raises InputsError without one.

        With a cache the source is encoded once: the cache belongs to it, and a later call's source is not read.
        """
        if self.encoder is None:
            raise InputsError(f"kind={self.config.kind!r} has no encoder to run; allowed: 'encoder-decoder'")
        if kv_cache is not None and kv_cache.memory is not None:
            return kv_cache.memory
        source, tap = inputs.encoder, as_tap(tap)
        memory = Memory(self.encoder(self.embed_source(source, tap), tap, source), cross_edges(inputs))
        if kv_cache is not None:
            kv_cache.memory = memory
        return memory

    def embed(self, inputs: Inputs, tap: Any = None, kv_cache: KVCache | None = None) -> Tensor:
        """Token + position (+ segment) embeddings [batch pos d_model]: x of the first block."""
        return self._embed(inputs, as_tap(tap), self.site_names, kv_cache, self.embedding_norm)

    def embed_source(self, source: Inputs, tap: Any = None) -> Tensor:
        """The embeddings that an encoder-decoder's encoder reads [batch source_pos d_model]; source = inputs.encoder."""
        assert self.encoder is not None
        return self._embed(source, as_tap(tap), self.encoder.site_names, None, self.encoder.embedding_norm)

    def _embed(self, inputs: Inputs, tap: Tap, s: Any, kv_cache: KVCache | None, norm: nn.Module | None) -> Tensor:
        """One stack's embeddings, its sites `s` and its embedding norm."""
        config = self.config
        x = self.embedding(inputs.tokens) if inputs.embeddings is None else inputs.embeddings
        x = tap(s.embed, x)
        if config.positions in ("learned", "sinusoidal"):
            ids = position_ids(inputs, kv_cache)
            table = sinusoidal(ids, config.d_model, x.dtype) if self.W_pos is None else self.W_pos[ids]
            x = x + tap(s.pos_embed, table.expand(x.shape))
        if self.segment_embedding is not None:
            segments = torch.zeros_like(inputs.tokens) if inputs.segments is None else inputs.segments
            x = x + self.segment_embedding(segments)
        return x if norm is None else norm(x, tap)

    def unembed(self, stream: Tensor, tap: Any = None, entries: Tensor | None = None) -> Tensor:
        """Final norm and head: stream [… d_model] -> logits [… vocab], or [… n] of the token ids `entries` [… n] only."""
        tap, s = as_tap(tap), self.site_names
        if self.final_norm is not None:
            stream = tap(s.final, self.final_norm(stream, tap))
        if not self.config.head:
            return stream
        weight = self.embedding.weight if self.unembedding is None else self.unembedding.weight
        if entries is not None and not tap.wants(s.logits):
            chosen = torch.einsum("...d,...nd->...n", stream, weight[entries])
            return chosen if self.b_U is None else chosen + self.b_U[entries]
        logits = tap(s.logits, nn.functional.linear(stream, weight, self.b_U))
        return logits if entries is None else logits.gather(-1, entries)

    @property
    def weights(self) -> Weights:
        """The weights by group: to count, read, swap and draw again."""
        return Weights(self)

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
        """The weight named `kind`, None when absent: "W_Q" … "b_out" and "cross_W_Q" … "cross_b_O" with a layer, or "W_E",
        "W_U", "b_U", "W_pos", which both stacks of an encoder-decoder share. stack: its "decoder" (default) or "encoder".
        """
        allowed = ("encoder", "decoder") if self.encoder is not None else ()
        if stack is not None and stack not in allowed:
            raise ValueError(
                f"stack={stack!r} is not allowed for kind={self.config.kind!r}; allowed: {(None, *allowed)}"
            )
        if kind in MODEL_WEIGHTS:
            return getattr(self, kind)
        name, crosses = kind.removeprefix("cross_"), kind.startswith("cross_")
        if name not in ATTENTION_WEIGHTS + (() if crosses else FFN_WEIGHTS):
            known = (*ATTENTION_WEIGHTS, *FFN_WEIGHTS, *MODEL_WEIGHTS, *(f"cross_{name}" for name in ATTENTION_WEIGHTS))
            raise ValueError(f"unknown weight {kind!r}; allowed: {', '.join(known)}")
        blocks: Any = self.encoder.blocks if self.encoder is not None and stack == "encoder" else self.blocks
        if layer is None or not 0 <= layer < len(blocks):
            raise ValueError(f"layer={layer!r} for {kind!r} is not allowed; allowed: 0 … {len(blocks) - 1}")
        block = blocks[layer]
        part = block.cross_attention if crosses else block.attention if name in ATTENTION_WEIGHTS else block.ffn
        return None if part is None else getattr(part, name)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.embedding.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' floating-point type."""
        return self.embedding.weight.dtype


def require_transformer(model: Any, what: str) -> None:
    """TypeError for anything but our own Transformer, whose weights `what` needs."""
    if not isinstance(model, Transformer):
        raise TypeError(f"{what} needs an interp.Transformer, whose weights it knows; got {type(model).__name__}")
