"""Two statements that are arithmetic: where the parameters are (F1), and that components only add (R1)."""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch

from interp.hookable import Hookable, UnsupportedModelError
from interp.model.transformer import ATTENTION_WEIGHTS, FFN_WEIGHTS
from interp.run import run


def parameter_table(model: Hookable) -> pd.DataFrame:
    """Parameters per group: embeddings (tied ones once), attention, ffn, other (norms and the rest).

    Columns: group, parameters, share (of all), share_blocks (of attention + ffn; missing for the others).
    """
    stacks: dict[str | None, int] = {model.sites[-1].stack: model.config.n_layers}
    if model.config.kind == "encoder-decoder":
        stacks["encoder"] = model.config.n_encoder_layers

    def count(kinds: tuple[str, ...], layer: int | None = None, stack: str | None = None) -> int:
        found = [model.weight(kind, layer, stack) for kind in kinds]
        return sum(weight.numel() for weight in found if weight is not None)

    def total_of(kinds: tuple[str, ...]) -> int:
        return sum(count(kinds, layer, stack) for stack, n in stacks.items() for layer in range(n))

    crosses = tuple(f"cross_{kind}" for kind in ATTENTION_WEIGHTS) if len(stacks) > 1 else ()
    attention, ffn = total_of((*ATTENTION_WEIGHTS, *crosses)), total_of(FFN_WEIGHTS)
    tied = bool(getattr(model.config, "tied_embeddings", False))
    embeddings = count(("W_E", "W_pos", "b_U") if tied else ("W_E", "W_pos", "b_U", "W_U"))
    total = sum(parameter.numel() for parameter in model.parameters())  # type: ignore[attr-defined]
    counts = {"embeddings": embeddings, "attention": attention, "ffn": ffn}
    counts["other"] = total - sum(counts.values())
    rows = [
        {"group": group, "parameters": n, "share": n / total,
         "share_blocks": n / (attention + ffn) if group in ("attention", "ffn") else None}
        for group, n in counts.items()
    ]  # fmt: skip
    return pd.DataFrame(rows)


def stream_identity(model: Hookable, inputs: Any) -> float:
    """Largest |h_L − (x_0 + Σ attn_out + Σ ffn_out)| over the largest |h_L| (R1): rounding for a pre-norm model.

    An encoder-decoder's decoder also adds its cross_out; its encoder is held to the same, and the larger error returned.
    Raises UnsupportedModelError for a stream that is not additive (post-norm).
    """
    if not model.additive_stream:
        raise UnsupportedModelError(
            "the stream of this model is not a sum of what is written to it: post-norm, or embedding_norm"
        )
    stacks = dict.fromkeys(site.stack for site in model.sites)
    names = ("attn_out", "cross_out", "ffn_out")
    written = [site for site in model.sites if site.name in names]
    streams = {
        stack: [s for s in model.sites if s.stack == stack and s.name in ("resid_pre", "resid_post")]
        for stack in stacks
    }
    ends = [site for stream in streams.values() for site in (stream[0], stream[-1])]
    cache = run(model, inputs, record=[*written, *ends]).cache
    errors = []
    for stack, stream in streams.items():
        parts = [cache[stream[0]], *(cache[site] for site in written if site.stack == stack)]
        end = cache[stream[-1]].double()
        total = torch.stack([part.double() for part in parts]).sum(0)
        errors.append(float(torch.abs(end - total).max() / end.abs().max()))
    return max(errors)
