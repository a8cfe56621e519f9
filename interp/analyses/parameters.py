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
    layers = range(model.config.n_layers)

    def count(kinds: tuple[str, ...], layer: int | None = None) -> int:
        found = [model.weight(kind, layer) for kind in kinds]
        return sum(weight.numel() for weight in found if weight is not None)

    attention = sum(count(ATTENTION_WEIGHTS, layer) for layer in layers)
    ffn = sum(count(FFN_WEIGHTS, layer) for layer in layers)
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

    Raises UnsupportedModelError for a stream that is not additive (post-norm).
    """
    if not model.additive_stream:
        raise UnsupportedModelError(
            "the stream of this model is not a sum of what is written to it: post-norm, or embedding_norm"
        )
    names = [name for name in ("attn_out", "ffn_out") if any(site.name == name for site in model.sites)]
    last = f"{model.config.n_layers - 1}.resid_post"
    got = run(model, inputs, record=["0.resid_pre", *names, last])
    total = got.cache["0.resid_pre"].double()
    for name in names:
        total = total + got.cache.stack(name).double().sum(0)
    end = got.cache[last].double()
    return float(torch.abs(end - total).max() / end.abs().max())
