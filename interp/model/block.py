"""One transformer block: six lines beside the book's six equations."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from interp.model.attention import Attention, CrossAttention
from interp.model.config import ModelConfig
from interp.model.feedforward import FeedForward
from interp.model.inputs import Edges, Inputs, InputsError, KVCache, Memory, attention_edges, position_ids
from interp.model.norms import make_norm
from interp.model.positions import rotary_table
from interp.model.tap import Tap, as_tap
from interp.sites import layer_sites


class Block(nn.Module):
    """What pre-norm and post-norm blocks share: two norms, attention, an FFN unless ffn="none".

    The decoder of an encoder-decoder has a third sublayer between them, cross-attention with its own norm.
    """

    def __init__(self, config: ModelConfig, layer: int, stack: str | None = None) -> None:
        super().__init__()
        s = self.sites = layer_sites(layer, stack)
        self.norm1 = make_norm(config, s.norm1_scale, s.norm1_hat)
        self.attention = Attention(config, layer, stack)
        self.norm2 = None if config.ffn == "none" else make_norm(config, s.norm2_scale, s.norm2_hat)
        self.ffn = None if config.ffn == "none" else FeedForward(config, layer, stack)
        crosses = config.kind == "encoder-decoder"
        self.cross_norm: Any = make_norm(config, s.cross_norm_scale, s.cross_norm_hat) if crosses else None
        self.cross_attention: Any = CrossAttention(config, layer, stack) if crosses else None
        # The stream that the FFN reads; without an FFN it is what leaves the block.
        middle = "resid_post" if self.ffn is None else "resid_cross" if crosses else "resid_mid"
        self.middle, self.middle_sum = getattr(s, middle), getattr(s, f"{middle}_sum")

    def forward(
        self, x: Tensor, tap: Tap, edges: Edges, rotary, cache: KVCache | None = None, memory: Memory | None = None
    ) -> Tensor:
        """x [batch pos d_model], who reads whom, rotary angles, earlier keys and values -> h, same shape."""
        return self.feed(self.mix(x, tap, edges, rotary, cache, memory), tap)

    def mix(
        self, x: Tensor, tap: Tap, edges: Edges, rotary, cache: KVCache | None = None, memory: Memory | None = None
    ) -> Tensor:
        """x -> t³: the attention sublayers, the only lines in which tokens read each other."""
        raise NotImplementedError

    def feed(self, t3: Tensor, tap: Tap) -> Tensor:
        """t³ -> h: the FFN, each token for itself."""
        raise NotImplementedError

    def keys_values(self, x: Tensor, tap: Tap, rotary) -> tuple[Tensor, Tensor]:
        """x -> the keys and values that attention reads of it [batch pos kv_head d_head], and nothing else."""
        raise NotImplementedError


class PreNormBlock(Block):
    """x + Sublayer(LayerNorm(x)): components only add to the stream (7.27-7.32)."""

    def mix(
        self, x: Tensor, tap: Tap, edges: Edges, rotary, cache: KVCache | None = None, memory: Memory | None = None
    ) -> Tensor:
        s = self.sites
        x = tap(s.resid_pre, x)
        t1 = tap(s.norm1, self.norm1(x, tap))  # t¹ = LayerNorm(x)                 (7.27)
        t2 = tap(s.attn_out, self.attention(t1, tap, edges, rotary, cache))  # t² = MHA(t¹, [t¹₁ …])  (7.28)
        if self.cross_attention is not None:  # a decoder's second sublayer, added like the first
            x = tap(s.resid_mid, t2 + x)
            t2 = tap(s.cross_out, self.cross_attention(tap(s.cross_norm, self.cross_norm(x, tap)), tap, memory, cache))
        return tap(self.middle, t2 + x)  # t³ = t² + x                       (7.29)

    def feed(self, t3: Tensor, tap: Tap) -> Tensor:
        s = self.sites
        if self.ffn is None or self.norm2 is None:
            return t3
        t4 = tap(s.norm2, self.norm2(t3, tap))  # t⁴ = LayerNorm(t³)                (7.30)
        t5 = tap(s.ffn_out, self.ffn(t4, tap))  # t⁵ = FFN(t⁴)                      (7.31)
        return tap(s.resid_post, t5 + t3)  # h = t⁵ + t³                       (7.32)

    def keys_values(self, x: Tensor, tap: Tap, rotary) -> tuple[Tensor, Tensor]:
        s = self.sites
        x = tap(s.resid_pre, x)
        return self.attention.keys_values(tap(s.norm1, self.norm1(x, tap)), tap, rotary)


class PostNormBlock(Block):
    """LayerNorm(x + Sublayer(x)): the original transformer (Vaswani 2017); the stream itself is normed."""

    def mix(
        self, x: Tensor, tap: Tap, edges: Edges, rotary, cache: KVCache | None = None, memory: Memory | None = None
    ) -> Tensor:
        s, norm = self.sites, self.norm1
        x = tap(s.resid_pre, x)
        t2 = tap(s.attn_out, self.attention(x, tap, edges, rotary, cache))
        if self.cross_attention is not None:  # a decoder's second sublayer, added and normed like the first
            x, norm = tap(s.resid_mid, self.norm1(tap(s.resid_mid_sum, t2 + x), tap)), self.cross_norm
            t2 = tap(s.cross_out, self.cross_attention(x, tap, memory, cache))
        return tap(self.middle, norm(tap(self.middle_sum, t2 + x), tap))  # t³ = LayerNorm(t² + x)

    def feed(self, t3: Tensor, tap: Tap) -> Tensor:
        s = self.sites
        if self.ffn is None or self.norm2 is None:
            return t3
        t5 = tap(s.ffn_out, self.ffn(t3, tap))
        return tap(s.resid_post, self.norm2(tap(s.resid_post_sum, t5 + t3), tap))  # h = LayerNorm(t⁵ + t³)

    def keys_values(self, x: Tensor, tap: Tap, rotary) -> tuple[Tensor, Tensor]:
        return self.attention.keys_values(tap(self.sites.resid_pre, x), tap, rotary)


class Blocks(nn.ModuleList):
    """The stack of blocks: index it (`model.blocks[3]`), or call it to run blocks start … stop−1 on a stream."""

    def __init__(self, config: ModelConfig, stack: str | None = None) -> None:
        kind = PreNormBlock if config.norm_position == "pre" else PostNormBlock
        super().__init__(kind(config, layer, stack) for layer in range(config.n_layers))
        self.config = config

    def forward(
        self,
        stream: Tensor,
        start: int,
        stop: int,
        tap: Tap | None = None,
        inputs: Inputs | None = None,
        keys_values: KVCache | None = None,
        memory: Memory | None = None,
    ) -> Tensor:
        """stream [batch pos d_model] before block `start` -> after block `stop`−1.

        inputs gives mask and positions (None: all real, positions from 0). keys_values holds earlier positions
        and is extended by the stream's. memory: what cross-attention reads (default: the one in keys_values); an
        encoder-decoder's blocks need one. Raises InputsError without it.
        """
        tap = as_tap(tap)
        inputs = inputs or Inputs(stream.new_zeros(stream.shape[:2]).long())
        if memory is None and keys_values is not None:
            memory = keys_values.memory
        if memory is None and self.config.kind == "encoder-decoder":
            raise InputsError(
                "the decoder's blocks read the encoder: memory=None is not allowed; allowed: model.encode(inputs)"
            )
        edges = attention_edges(self.config, inputs, keys_values)
        rotary = None
        if self.config.positions == "rotary":
            rotary = rotary_table(self.config, position_ids(inputs, keys_values), stream.dtype)
        for layer in range(start, stop):
            stream = self[layer](stream, tap, edges, rotary, keys_values, memory)
        return stream
