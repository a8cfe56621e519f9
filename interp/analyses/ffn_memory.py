"""The FFN as a key-value memory (Geva 2021, 2022): what each neuron reads, what sets it off, what it writes.

Neuron i of a plain FFN: key = column i of W1, value = row i of the last matrix, coefficient m_i = act(x·k_i + b).
A gated neuron has no single key: its coefficient act(x·gate_i)(x·up_i) is signed, so both of its read vectors are
listed and triggers are found for both signs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.analyses.subupdates import FFNError, vocabulary
from interp.analyses.subupdates import ffn_subupdates as ffn_subupdates
from interp.hookable import Hookable, require_weight
from interp.run import prepare, run
from interp.sites import Site
from interp.tokens import labels


class NeuronError(FFNError):
    """A neuron or layer that the model does not have."""


def ffn_values(
    model: Hookable,
    layer: int,
    neurons: Sequence[int] | None = None,
    k: int = 10,
    sign: int = 1,
    tokenizer: Any = None,
    norm: str = "none",
) -> pd.DataFrame:
    """Tokens that each value vector promotes most: top `k` of sign · (v_i W_U) (Geva 2022).

    norm: "none" = W_U alone, "final" = through the final norm's gain (and centring). Columns: layer, neuron, sign, rank (0 =
    most promoted), token, text, score (logits per unit of coefficient, before the final norm's scale), norm (length of v_i),
    through (what stands between value and vocabulary: "none", "gain", "gain, centred").
    """
    values = require_weight(model, "W_out", layer)
    reader, through = vocabulary(model, norm)
    table = _project(values, reader, layer, chosen_neurons(values.shape[0], neurons), k, sign, tokenizer, "value")
    return table.assign(through=through)


def ffn_keys(
    model: Hookable, layer: int, neurons: Sequence[int] | None = None, k: int = 10, tokenizer: Any = None
) -> pd.DataFrame:
    """Tokens whose input embedding points most along what each neuron reads: top `k` of E·k_i.

    Plain FFN: one row set per neuron, reads = "key". Gated: two, reads = "gate" and "up", since a gated neuron has no
    single key. Columns: layer, neuron, reads, sign, rank, token, text, score (embedding · read vector), norm. It says
    nothing of what the neuron reads from other parts of the stream; see `ffn_triggers` for that.
    """
    embedding = require_weight(model, "W_E").T
    return pd.concat(
        [
            _project(part.T, embedding, layer, chosen_neurons(part.shape[1], neurons), k, 1, tokenizer, name)
            for name, part in read_vectors(model, layer).items()
        ],
        ignore_index=True,
    )


def read_vectors(model: Hookable, layer: int) -> dict[str, Tensor]:
    """What a layer's neurons read, each [d_model neuron]: "key", or "gate" and "up" where the FFN is gated."""
    up, gate = require_weight(model, "W_in", layer), model.weight("W_gate", layer)
    return {"key": up} if gate is None else {"gate": gate, "up": up}


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
    searched sign are listed, of equal ones the earlier example first. Columns: layer, neuron, sign, rank, coefficient,
    example, position, token (id), text (printed token), context (the tokens up to and including it). It holds every
    activation of the layer in memory; for a corpus, or every layer, `corpus_triggers` gives the same.
    """
    inputs = prepare(model, inputs, tokenizer, prefix)
    site = Site("ffn_act", layer, model.sites[-1].stack)
    require_weight(model, "W_out", layer)
    parts = [
        run(model, inputs.select(slice(begin, begin + batch_size)), record=site).cache[site]
        for begin in range(0, inputs.batch, batch_size)
    ]
    act = torch.cat(parts)
    chosen = chosen_neurons(act.shape[-1], neurons)
    act = act[..., chosen.to(act.device)]  # [example position neuron]
    real = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    frames = [_extremes(sign, act, real, inputs.tokens, chosen, layer, k, tokenizer) for sign in signs_of(model)]
    return pd.concat(frames, ignore_index=True).sort_values(
        ["neuron", "sign", "rank"], ascending=[True, False, True], ignore_index=True
    )


def signs_of(model: Hookable) -> tuple[int, ...]:
    """The signs that coefficients can have: + alone for ReLU."""
    return (1,) if getattr(model.config, "ffn", None) == "relu" else (1, -1)


def _extremes(sign: int, act: Tensor, real: Tensor, tokens: Tensor, neurons, layer, k, tokenizer) -> pd.DataFrame:
    signed = (sign * act).masked_fill(~real[..., None], float("-inf"))
    strongest, where = signed.max(1)  # [example neuron]
    order = strongest.sort(dim=0, descending=True, stable=True)  # equal coefficients: the earlier example first
    values, examples = order.values[:k], order.indices[:k]
    text = [labels(tokenizer, row) for row in tokens.cpu()]
    rows = []
    for column, neuron in enumerate(neurons.tolist()):
        for rank in range(len(values)):
            value, example = float(values[rank, column]), int(examples[rank, column])
            if value <= 0:
                break
            position = int(where[example, column])
            start = int(real[example].int().argmax())
            rows.append({
                "layer": layer, "neuron": neuron, "sign": sign, "rank": rank, "coefficient": sign * value,
                "example": example, "position": position, "token": int(tokens[example, position]),
                "text": text[example][position], "context": joined(text[example][start : position + 1]),
            })  # fmt: skip
    return pd.DataFrame(rows, columns=TRIGGER_COLUMNS)


TRIGGER_COLUMNS = ["layer", "neuron", "sign", "rank", "coefficient", "example", "position", "token", "text", "context"]


def joined(words: Sequence[str]) -> str:
    """Toy words are separated by spaces; a subword tokenizer's tokens carry their own."""
    return "".join(words) if any(word.startswith((" ", "Ġ")) for word in words[1:]) else " ".join(words)


def chosen_neurons(size: int, neurons: Sequence[int] | None) -> Tensor:
    """Numbers of the neurons asked for, default all `size`. Raises NeuronError."""
    chosen = torch.arange(size) if neurons is None else torch.as_tensor(list(neurons), dtype=torch.long)
    if chosen.numel() == 0 or int(chosen.min()) < 0 or int(chosen.max()) >= size:
        raise NeuronError(f"neurons={neurons!r} is not allowed; allowed: one or more of 0 … {size - 1}")
    return chosen
