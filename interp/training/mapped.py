"""The model's calls, written so that `torch.func.vmap` over members makes few large programs of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.model.attention import Attention, softmax_or_zero
from interp.model.inputs import Edges
from interp.model.transformer import Transformer


class _Linear(nn.Linear):
    """One matrix product of all tokens: mapped over members it stays one per member, where it would be one per sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


def _attend(attention: Attention, q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> Tensor:
    """softmax(q kᵀ · scale) v under the mask. A CPU's fused kernel, which no map can batch, is given all members as one batch."""
    scale = attention.config.attention_scale
    assert scale is not None  # the config resolves it
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if q.device.type == "cpu" and not edges.empty_rows and not torch.compiler.is_compiling():
        return _Fused.apply(q, k, v, edges.mask, edges.causal, scale).transpose(1, 2)  # type: ignore[union-attr]
    scores, mask = (q * scale) @ k.transpose(-1, -2), edges.mask
    if edges.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    pattern = softmax_or_zero(scores) if edges.empty_rows else scores.softmax(-1)
    return (pattern @ v).transpose(1, 2)


class _Fused(torch.autograd.Function):
    """`scaled_dot_product_attention` with a rule for `vmap`: members join the batch. Only ever called inside a map."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Any:
        q, k, v = (x.movedim(dim, 0).flatten(0, 1) for x, dim in zip((q, k, v), in_dims, strict=False))
        if mask is not None and in_dims[3] is not None:
            mask = mask.movedim(in_dims[3], 0)
            if mask.shape[1] == 1 and len(q) != len(mask):  # one mask for a member's whole batch
                mask = mask.expand(-1, len(q) // len(mask), *mask.shape[2:])
            mask = mask.flatten(0, 1)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        return z.unflatten(0, (info.batch_size, -1)), 0


def for_mapping(model: Transformer) -> Transformer:
    """The same function, written with calls that map well over members."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = _Linear
        elif isinstance(module, Attention):
            module._fused = partial(_attend, module)  # type: ignore[method-assign]
            module._project = partial(_project, module)  # type: ignore[method-assign]
    return model


def _project(attention: Attention, x: Tensor, first: int, last: int) -> Tensor:
    """`Attention._project` as one matrix product."""
    return Attention._project(attention, x.flatten(0, -2), first, last).unflatten(0, x.shape[:-1])
