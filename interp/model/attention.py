"""Multi-head attention: softmax(q kᵀ · scale) v per head, heads written to the stream by W_O (7.28)."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.model.config import ModelConfig
from interp.model.inputs import Edges, KVCache, Memory
from interp.model.layers import linear
from interp.model.norms import RMSNorm
from interp.model.positions import rotate
from interp.model.tap import NO_TAP, Tap
from interp.sites import layer_sites


class Attention(nn.Module):
    """Causal, bidirectional or prefix attention: which, is decided by the `Edges` it is given.

    Weights are stored fused as PyTorch stores them (`qkv`, `out`) and read as views: `W_Q` [head d_model d_head],
    `W_K`, `W_V` [kv_head d_model d_head], `W_O` [head d_head d_model], `b_Q`, `b_K`, `b_V`, `b_O` (None when absent).
    """

    def __init__(self, config: ModelConfig, layer: int, stack: str | None = None) -> None:
        super().__init__()
        self.config, self.layer, self.sites = config, layer, layer_sites(layer, stack)
        self.sizes = [config.n_heads, config.kv_heads, config.kv_heads]
        width = config.head_size
        self.qkv = linear(config.d_model, sum(self.sizes) * width, bias="qkv" in config.biases)
        self.out = linear(config.n_heads * width, config.d_model, bias="attn_out" in config.biases)
        self.q_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(width, config.norm_eps) if config.qk_norm else None

    def forward(
        self, t1: Tensor, tap: Tap, edges: Edges, rotary: tuple[Tensor, Tensor] | None, cache: KVCache | None = None
    ) -> Tensor:
        s, config = self.sites, self.config
        qkv = self.qkv(t1).unflatten(-1, (-1, config.head_size))
        q, k, v = qkv.split(self.sizes, dim=-2)
        q, k, v = tap(s.q, q), tap(s.k, k), tap(s.v, v)
        if config.rotates:
            q = tap(s.q_rot, self._into_scores(q, self.q_norm, rotary))
            k = tap(s.k_rot, self._into_scores(k, self.k_norm, rotary))
        if cache is not None:
            k, v = cache.extend(self.layer, k, v)
        return self._attend(q, k, v, tap, edges)

    def keys_values(self, t1: Tensor, tap: Tap, rotary: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor]:
        """Keys as they enter the scores and values [batch pos kv_head d_head], without queries."""
        s, n_heads = self.sites, self.sizes[0]
        k, v = self._project(t1, n_heads, sum(self.sizes)).split(self.sizes[1:], dim=-2)
        k, v = tap(s.k, k), tap(s.v, v)
        return (tap(s.k_rot, self._into_scores(k, self.k_norm, rotary)) if self.config.rotates else k), v

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tap: Tap, edges: Edges) -> Tensor:
        """From queries, keys and values [batch pos head d_head] to what is written to the stream [batch pos d_model]."""
        s = self.sites
        if edges.read is not None:
            z = edges.read(self, q, k, v, tap)
        elif tap.wants(s.scores) or tap.wants(s.pattern):
            z = self._explicit(q, k, v, tap, edges)
        else:
            z = self._fused(q, k, v, edges)
        z = tap(s.z, z)
        if not tap.wants(s.head_out):
            return self.out(z.flatten(-2))
        heads = tap(s.head_out, torch.einsum("bphd,hdm->bphm", z, self.W_O))
        return heads.sum(-2) if self.b_O is None else heads.sum(-2) + self.b_O

    def _project(self, x: Tensor, first: int, last: int) -> Tensor:
        """x by the fused matrix's heads first … last−1: [batch pos head d_head]."""
        rows, bias = slice(first * self.config.head_size, last * self.config.head_size), self.qkv.bias
        return F.linear(x, self.qkv.weight[rows], None if bias is None else bias[rows]).unflatten(
            -1, (-1, self.config.head_size)
        )

    def _into_scores(self, x: Tensor, norm: nn.Module | None, rotary: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x if norm is None else norm(x, NO_TAP)
        return x if rotary is None else rotate(x, rotary)

    def _explicit(self, q: Tensor, k: Tensor, v: Tensor, tap: Tap, edges: Edges) -> Tensor:
        """Attention with its scores and pattern spelled out [batch head query key]."""
        scale = self.config.attention_scale
        assert scale is not None  # the config resolves it
        mask = edges.dense(q.shape[1], k.shape[1], q.device)
        k, v = (x.repeat_interleave(q.shape[2] // x.shape[2], 2) if x.shape[2] != q.shape[2] else x for x in (k, v))
        scores = torch.matmul(q.transpose(1, 2) * scale, k.permute(0, 2, 3, 1))
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        scores = tap(self.sites.scores, scores)
        if mask is not None:  # again: no change of scores may open an edge that the mask closes
            scores = scores.masked_fill(~mask, float("-inf"))
        pattern = tap(self.sites.pattern, softmax_or_zero(scores))
        if mask is not None and tap.wants(self.sites.pattern):  # nor may a change of the pattern
            pattern = pattern.masked_fill(~mask, 0.0)
        return torch.matmul(pattern, v.transpose(1, 2)).transpose(1, 2)

    def _fused(self, q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> Tensor:
        """The same numbers up to rounding, by `scaled_dot_product_attention`, never holding the pattern."""
        mask = edges.mask
        any_edge = None
        if mask is not None and edges.empty_rows:
            any_edge = mask.any(-1, keepdim=True)  # [batch 1 query 1]
            mask = mask | ~any_edge  # a kernel's answer for an empty row is not to be relied on
        z = F.scaled_dot_product_attention(
            q.transpose(1, 2),
            k.transpose(1, 2),
            v.transpose(1, 2),
            attn_mask=mask,
            is_causal=edges.causal,
            scale=self.config.attention_scale,
            enable_gqa=self.config.kv_heads != self.config.n_heads,
        )
        return (z if any_edge is None else z * any_edge).transpose(1, 2)

    # Views of the fused weights, indexed as researchers index them.

    @property
    def W_Q(self) -> Tensor:
        """[head d_model d_head], a view."""
        return self._rows(self.qkv.weight, 0).transpose(1, 2)

    @property
    def W_K(self) -> Tensor:
        """[kv_head d_model d_head], a view."""
        return self._rows(self.qkv.weight, 1).transpose(1, 2)

    @property
    def W_V(self) -> Tensor:
        """[kv_head d_model d_head], a view."""
        return self._rows(self.qkv.weight, 2).transpose(1, 2)

    @property
    def W_O(self) -> Tensor:
        """[head d_head d_model], a view."""
        return self.out.weight.unflatten(1, (self.config.n_heads, -1)).permute(1, 2, 0)

    @property
    def b_Q(self) -> Tensor | None:
        """[head d_head], a view, or None."""
        return None if self.qkv.bias is None else self._rows(self.qkv.bias, 0)

    @property
    def b_K(self) -> Tensor | None:
        """[kv_head d_head], a view, or None."""
        return None if self.qkv.bias is None else self._rows(self.qkv.bias, 1)

    @property
    def b_V(self) -> Tensor | None:
        """[kv_head d_head], a view, or None."""
        return None if self.qkv.bias is None else self._rows(self.qkv.bias, 2)

    @property
    def b_O(self) -> Tensor | None:
        """[d_model], or None."""
        return self.out.bias

    def _rows(self, fused: Tensor, part: int) -> Tensor:
        return fused.unflatten(0, (-1, self.config.head_size)).split(self.sizes)[part]


class CrossAttention(Attention):
    """Queries from the decoder's stream, keys and values from the encoder's last states of all source positions.

    Without rotary or q/k norm: source and target positions have no common order.
    """

    def __init__(self, config: ModelConfig, layer: int, stack: str | None = None) -> None:
        super().__init__(config, layer, stack)
        names = ("q", "k", "v", "scores", "pattern", "z", "head_out")
        self.sites = SimpleNamespace(**{name: getattr(self.sites, f"cross_{name}") for name in names})
        self.q_norm = self.k_norm = None

    def forward(self, t: Tensor, tap: Tap, memory: Memory, cache: KVCache | None = None) -> Tensor:  # type: ignore[override]
        s, n_heads = self.sites, self.sizes[0]
        q = tap(s.q, self._project(t, 0, n_heads))
        if cache is not None and self.layer in cache.cross:
            k, v = cache.cross[self.layer]
        else:
            k, v = self._project(memory.states, n_heads, sum(self.sizes)).split(self.sizes[1:], dim=-2)
            k, v = tap(s.k, k), tap(s.v, v)
            if cache is not None:
                cache.cross[self.layer] = k, v
        return self._attend(q, k, v, tap, memory.edges)


def softmax_or_zero(scores: Tensor) -> Tensor:
    """Softmax over the last axis; a row that is −∞ throughout gives zeros, never NaN, also in the gradient."""
    any_edge = (scores > float("-inf")).any(-1, keepdim=True)
    return torch.where(any_edge, scores, 0.0).softmax(-1) * any_edge
