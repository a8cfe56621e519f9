"""The FFN as a key-value memory (Geva 2021, 2022): what each neuron reads, what sets it off, what it writes.

Neuron i of a plain FFN: key = column i of W1, value = row i of the last matrix, coefficient m_i = act(x·k_i + b).
A gated neuron has no single key: its coefficient act(x·gate_i)(x·up_i) is signed, so both of its read vectors are
listed and triggers are found for both signs (SCIENCE 1.5).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.at import positions
from interp.hookable import Hookable, require_weight
from interp.run import prepare, run
from interp.sites import Site
from interp.tokens import labels


class NeuronError(ValueError):
    """A neuron or layer that the model does not have."""


def ffn_values(
    model: Hookable, layer: int, neurons: Sequence[int] | None = None, k: int = 10, sign: int = 1, tokenizer: Any = None
) -> pd.DataFrame:
    """Tokens that each value vector promotes most: top `k` of sign · (v_i W_U), through no norm (Geva 2022).

    Columns: layer, neuron, sign, rank (0 = most promoted), token, text, score (logits per unit of coefficient, before
    the final norm's scale), norm (length of v_i).
    """
    values = require_weight(model, "W_out", layer)
    unembedding = require_weight(model, "W_U")
    return _project(values, unembedding, layer, _neurons(values.shape[0], neurons), k, sign, tokenizer, "value")


def ffn_keys(
    model: Hookable, layer: int, neurons: Sequence[int] | None = None, k: int = 10, tokenizer: Any = None
) -> pd.DataFrame:
    """Tokens whose input embedding points most along what each neuron reads: top `k` of E·k_i.

    Plain FFN: one row set per neuron, reads = "key". Gated: two, reads = "gate" and "up", since a gated neuron has no
    single key. Columns: layer, neuron, reads, sign, rank, token, text, score (embedding · read vector), norm. It says
    nothing of what the neuron reads from other parts of the stream; see `ffn_triggers` for that.
    """
    embedding = require_weight(model, "W_E").T
    parts = {"key": require_weight(model, "W_in", layer)}
    gate = model.weight("W_gate", layer)
    if gate is not None:
        parts = {"gate": gate, "up": parts["key"]}
    return pd.concat(
        [
            _project(part.T, embedding, layer, _neurons(part.shape[1], neurons), k, 1, tokenizer, name)
            for name, part in parts.items()
        ],
        ignore_index=True,
    )


@torch.no_grad()
def _project(vectors, directions, layer, neurons, k, sign, tokenizer, reads) -> pd.DataFrame:
    if sign not in (1, -1):
        raise NeuronError(f"sign={sign!r} is not allowed; allowed: 1, -1")
    chosen = vectors[neurons]
    best = (sign * chosen @ directions).topk(min(k, directions.shape[1]), -1)
    n, width = best.indices.shape
    return pd.DataFrame({
        "layer": layer, "neuron": neurons.repeat_interleave(width).tolist(), "reads": reads, "sign": sign,
        "rank": list(range(width)) * n, "token": best.indices.flatten().tolist(),
        "text": labels(tokenizer, best.indices.flatten()), "score": best.values.flatten().tolist(),
        "norm": chosen.norm(dim=-1).repeat_interleave(width).tolist(),
    })  # fmt: skip


def ffn_triggers(
    model: Hookable,
    inputs: Any,
    layer: int,
    neurons: Sequence[int] | None = None,
    k: int = 10,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
    batch_size: int = 64,
) -> pd.DataFrame:
    """The inputs that set each neuron off most: per example the extreme over its real positions, then the top `k`.

    Gated (and any other signed) activations are searched for both signs; ReLU only for +. Only coefficients of the
    searched sign are listed. Columns: layer, neuron, sign, rank, coefficient, example, position, token (id), text
    (printed token), context (the tokens up to and including it).
    """
    inputs = prepare(model, inputs, tokenizer, prefix)
    site = Site("ffn_act", layer, model.sites[-1].stack)
    require_weight(model, "W_out", layer)
    parts = [
        run(model, inputs.select(slice(begin, begin + batch_size)), record=site).cache[site]
        for begin in range(0, inputs.batch, batch_size)
    ]
    act = torch.cat(parts)
    chosen = _neurons(act.shape[-1], neurons)
    act = act[..., chosen.to(act.device)]  # [example position neuron]
    real = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    signs = (1,) if getattr(model.config, "ffn", None) == "relu" else (1, -1)
    frames = [_extremes(sign, act, real, inputs.tokens, chosen, layer, k, tokenizer) for sign in signs]
    return pd.concat(frames, ignore_index=True).sort_values(
        ["neuron", "sign", "rank"], ascending=[True, False, True], ignore_index=True
    )


def ffn_subupdates(
    model: Hookable,
    inputs: Any,
    layer: int,
    targets: Tensor,
    position: Any = -1,
    k: int = 10,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The `k` dominant sub-updates m_i v_i of each example at `position`: largest |m_i| · ‖v_i‖ (Geva 2022).

    Columns: example, layer, neuron, rank, coefficient m_i, size |m_i|·‖v_i‖, share (of Σ_j |m_j|·‖v_j‖), target (token
    id), target_logit (m_i v_i · W_U[target], before the final norm's scale), top (token that m_i v_i promotes most),
    top_text. They are what the FFN writes, not what the fact depends on.
    """
    inputs = prepare(model, inputs, tokenizer, prefix)
    values, unembedding = require_weight(model, "W_out", layer), require_weight(model, "W_U")
    site = Site("ffn_act", layer, model.sites[-1].stack)
    index = positions(inputs, position)
    rows = torch.arange(inputs.batch, device=inputs.tokens.device)
    with torch.no_grad():
        act = run(model, inputs, record=site).cache[site][rows, index]  # [example neuron]
        size = act.abs() * values.norm(dim=-1)
        best = size.topk(min(k, size.shape[-1]), -1)
        m = act.gather(-1, best.indices)
        updates = (m[..., None] * values[best.indices]) @ unembedding  # [example k vocab]
        wanted = targets.to(updates.device)[:, None, None].expand(-1, m.shape[1], 1)
        target_logit, top = updates.gather(-1, wanted)[..., 0], updates.argmax(-1)
    n, width = best.indices.shape
    return pd.DataFrame({
        "example": rows.repeat_interleave(width).tolist(), "layer": layer, "neuron": best.indices.flatten().tolist(),
        "rank": list(range(width)) * n, "coefficient": m.flatten().tolist(), "size": best.values.flatten().tolist(),
        "share": (best.values / size.sum(-1, keepdim=True)).flatten().tolist(),
        "target": wanted[..., 0].flatten().tolist(), "target_logit": target_logit.flatten().tolist(),
        "top": top.flatten().tolist(), "top_text": labels(tokenizer, top.flatten()),
    })  # fmt: skip


def _extremes(sign: int, act: Tensor, real: Tensor, tokens: Tensor, neurons, layer, k, tokenizer) -> pd.DataFrame:
    signed = (sign * act).masked_fill(~real[..., None], float("-inf"))
    strongest, where = signed.max(1)  # [example neuron]
    best = strongest.topk(min(k, strongest.shape[0]), 0)
    text = [labels(tokenizer, row) for row in tokens.cpu()]
    rows = []
    for column, neuron in enumerate(neurons.tolist()):
        for rank in range(best.indices.shape[0]):
            value, example = float(best.values[rank, column]), int(best.indices[rank, column])
            if value <= 0:
                break
            position = int(where[example, column])
            start = int(real[example].int().argmax())
            rows.append({
                "layer": layer, "neuron": neuron, "sign": sign, "rank": rank, "coefficient": sign * value,
                "example": example, "position": position, "token": int(tokens[example, position]),
                "text": text[example][position], "context": _join(text[example][start : position + 1]),
            })  # fmt: skip
    columns = ["layer", "neuron", "sign", "rank", "coefficient", "example", "position", "token", "text", "context"]
    return pd.DataFrame(rows, columns=columns)


def _join(words: list[str]) -> str:
    """Toy words are separated by spaces; a subword tokenizer's tokens carry their own."""
    return "".join(words) if any(word.startswith((" ", "Ġ")) for word in words[1:]) else " ".join(words)


def _neurons(size: int, neurons: Sequence[int] | None) -> Tensor:
    chosen = torch.arange(size) if neurons is None else torch.as_tensor(list(neurons), dtype=torch.long)
    if chosen.numel() == 0 or int(chosen.min()) < 0 or int(chosen.max()) >= size:
        raise NeuronError(f"neurons={neurons!r} is not allowed; allowed: one or more of 0 … {size - 1}")
    return chosen
