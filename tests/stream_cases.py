"""Small random models of every kind whose stream is a sum, with norms and biases off their initial values, and padded inputs."""

from __future__ import annotations

from typing import Any

import torch

from interp import Inputs, ModelConfig, Transformer

SIZES: dict[str, Any] = {"vocab": 13, "n_layers": 2, "n_heads": 4, "d_model": 16, "n_ctx": 16, "d_ff": 12}
EVERY_BIAS = frozenset({"qkv", "attn_out", "ffn", "unembed"})
CASES: dict[str, dict[str, Any]] = {
    "layernorm, b_U": {"bias": EVERY_BIAS},
    "tied, gelu": {"tied_embeddings": True, "ffn": "gelu", "positions": "sinusoidal"},
    "grouped, rotary, rmsnorm, gated": {
        "n_kv_heads": 2, "positions": "rotary", "norm": "rmsnorm", "ffn": "swiglu", "bias": False,
    },
    "no norm": {"norm": "none", "positions": "none"},
    "no final norm": {"final_norm": False},
    "no ffn": {"ffn": "none"},
    "prefix decoder": {"kind": "prefix-decoder"},
    "encoder with segments": {"kind": "encoder", "n_segments": 2},
    "encoder-decoder": {"kind": "encoder-decoder", "n_encoder_layers": 1},
}  # fmt: skip


def case(name: str, dtype: torch.dtype = torch.float64, **changes: Any) -> tuple[Transformer, Inputs]:
    """The model called `name` and three sequences of seven tokens, one padded on the left, one on the right."""
    model = Transformer(ModelConfig(**{**SIZES, **CASES[name], **changes}), seed=1).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for key, value in model.named_parameters():
            if value.ndim < 2 or key == "b_U":
                value.add_(0.3 * torch.randn(value.shape, generator=generator, dtype=dtype))
    tokens = torch.randint(0, 13, (3, 7), generator=generator)
    mask = torch.ones(3, 7, dtype=torch.bool)
    mask[1, :2], mask[2, 5:] = False, False
    fields: dict[str, Any] = {}
    if name == "prefix decoder":
        fields["prefix_length"] = torch.tensor([2, 3, 1])
    if name == "encoder with segments":
        fields["segments"] = torch.randint(0, 2, (3, 7), generator=generator)
    if name == "encoder-decoder":
        fields["source"] = torch.randint(0, 13, (3, 5), generator=generator)
        fields["source_mask"] = torch.arange(5)[None] < torch.tensor([5, 3, 4])[:, None]
    return model, Inputs(tokens, mask=mask, roles={"subject": torch.tensor([1, 3, 2])}, **fields)
