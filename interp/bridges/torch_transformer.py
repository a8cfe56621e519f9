"""PyTorch's own `torch.nn.Transformer` into ours: the outside oracle of the encoder-decoder."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn

from interp.model.config import ModelConfig
from interp.model.transformer import Transformer


def from_torch_transformer(module: nn.Transformer, vocab: int, n_ctx: int) -> Transformer:
    """Our encoder-decoder with the weights of a `torch.nn.Transformer`; it has no embeddings or head, so write `embed`.

    The module's layers must be its own TransformerEncoderLayer and TransformerDecoderLayer (relu, with biases).
    """
    encoder, decoder = list(module.encoder.layers), list(module.decoder.layers)  # type: ignore[arg-type]
    first: Any = decoder[0]
    config = ModelConfig(
        kind="encoder-decoder", vocab=vocab, n_ctx=n_ctx, n_layers=len(decoder), n_encoder_layers=len(encoder),
        n_heads=module.nhead, d_model=module.d_model, d_ff=first.linear1.out_features, ffn="relu", positions="none",
        norm_position="pre" if first.norm_first else "post", norm_eps=first.norm1.eps, final_norm=True, head=False,
    )  # fmt: skip
    ours = Transformer(config).to(first.linear1.weight.dtype)
    assert ours.encoder is not None and ours.final_norm is not None and ours.encoder.final_norm is not None
    pairs: list[tuple[nn.Module, nn.Module]] = [
        (ours.final_norm, module.decoder.norm), (ours.encoder.final_norm, module.encoder.norm),  # type: ignore[list-item]
    ]  # fmt: skip
    attention: list[tuple[Any, Any]] = []
    for mine, theirs in zip([*ours.encoder.blocks, *ours.blocks], [*encoder, *decoder], strict=True):
        block, layer = cast(Any, mine), cast(Any, theirs)
        crosses = block.cross_attention is not None
        last = layer.norm3 if crosses else layer.norm2
        pairs += [
            (block.norm1, layer.norm1),
            (block.norm2, last),
            (block.ffn.up, layer.linear1),
            (block.ffn.down, layer.linear2),
        ]
        attention.append((block.attention, layer.self_attn))
        if crosses:
            pairs.append((block.cross_norm, layer.norm2))
            attention.append((block.cross_attention, layer.multihead_attn))
    pairs += [(a.out, b.out_proj) for a, b in attention]
    with torch.no_grad():
        for mine, theirs in pairs:
            mine.load_state_dict(theirs.state_dict())
        for mine, theirs in attention:
            mine.qkv.weight.copy_(theirs.in_proj_weight)
            mine.qkv.bias.copy_(theirs.in_proj_bias)
    return ours.eval()
