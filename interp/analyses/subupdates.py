"""What an FFN writes, memory by memory: FFN(x) = Σ_i m_i v_i (+ b_out), read in the vocabulary (Geva 2022).

A sub-update m_i v_i is signed where its coefficient is (gated FFNs), so it is always read as it is written, sign included.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.analyses.norm_reading import norm_readings
from interp.at import positions
from interp.hookable import Hookable, require_head, require_weight
from interp.model.inputs import Inputs
from interp.run import prepare, run
from interp.sites import Site
from interp.tokens import labels

NORMS = ("none", "final")
CHUNK = 256  # neurons projected at once: 50 MB in float32 with 49,152 tokens


class FFNError(ValueError):
    """A choice of layers, of a norm or of a size that an analysis of FFN memories cannot take."""


def vocabulary(model: Hookable, norm: str = "none") -> tuple[Tensor, str]:
    """What reads a written vector in the vocabulary [d_model vocab], and how a table names it.

    norm: "none" = W_U alone; "final" = through the final norm's gain, and its centring where it centres (a LayerNorm), its
    scale and its offset left out. Raises FFNError.
    """
    require_head(model)
    unembedding = require_weight(model, "W_U").detach()
    if norm not in NORMS:
        raise FFNError(f"norm={norm!r} is not allowed; allowed: {', '.join(map(repr, NORMS))}")
    if norm == "none":
        return unembedding, "none"
    reading = norm_readings(model, "final")[0]
    name = ("gain, centred" if reading.centred else "gain") if reading.exists else "the model has none"
    return reading.read(unembedding), name


def ffn_layers(model: Hookable, layers: Sequence[int] | int | None) -> list[int]:
    """The layers asked for that have an FFN, default all. Raises FFNError for one without."""
    stack = model.sites[-1].stack
    have = [
        site.layer for site in model.sites if site.name == "ffn_act" and site.stack == stack and site.layer is not None
    ]
    asked = have if layers is None else [layers] if isinstance(layers, int) else list(layers)
    bad = [layer for layer in asked if layer not in have]
    if bad or not asked:
        raise FFNError(
            f"layers={layers!r} is not allowed; allowed: one or more of {have or 'none: this model has no FFN'}"
        )
    return asked


@torch.no_grad()
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


@torch.no_grad()
def value_extremes(values: Tensor, reader: Tensor) -> Tensor:
    """The token that +v_i and that −v_i promotes most: [2 neuron], rows + and −."""
    found = []
    for part in values.split(CHUNK):
        scores = part @ reader
        found.append(torch.stack([scores.argmax(-1), scores.argmin(-1)]))
    return torch.cat(found, 1)


@torch.no_grad()
def subupdate_shares(
    model: Hookable,
    inputs: Any,
    layers: Sequence[int] | int | None = None,
    position: Any = -1,
    k: int = 10,
    norm: str = "none",
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
    batch_size: int = 16,
) -> pd.DataFrame:
    """How much of each FFN's output its `k` dominant memories write, one row per example and layer (Geva 2021, 2022).

    position: where each example is read (int, ints [batch] or a role). Columns: example, position, layer, k, of_memories (k of
    d_ff, a share), size_share (Σ over the k of |m_i|·‖v_i‖, of the sum over all), output_share (their sum projected on the
    output, so that all memories and b_out have 1 together; it can leave 0 … 1), cosine (of their sum and the output),
    output_norm, output_top (the token that the output promotes most), composed (no single memory with m_i ≠ 0 promotes that
    token most), norm (what the tokens were read through, see `vocabulary`). Raises FFNError, and what `run` raises.
    """
    reader, norm_name = vocabulary(model, norm)
    wanted, frames = ffn_layers(model, layers), []
    values = {layer: require_weight(model, "W_out", layer).detach() for layer in wanted}
    extremes = {layer: value_extremes(values[layer], reader) for layer in wanted}
    inputs = prepare(model, inputs, tokenizer, prefix)
    for begin, index, cache in _passes(model, inputs, wanted, ("ffn_act", "ffn_out"), position, batch_size):
        for layer in wanted:
            act, out, v = cache["ffn_act", layer], cache["ffn_out", layer], values[layer]
            size = act.abs() * v.norm(dim=-1)
            best = size.topk(_size(k, size.shape[-1]), -1)
            written = torch.einsum("ek,ekd->ed", act.gather(-1, best.indices), v[best.indices])
            top = (out @ reader).argmax(-1)
            alone = torch.where(act > 0, extremes[layer][0], extremes[layer][1])  # [example neuron]
            single = ((alone == top[:, None]) & (act != 0)).any(-1)
            frames.append(pd.DataFrame({
                "example": range(begin, begin + len(index)), "position": index.tolist(), "layer": layer, "k": k,
                "of_memories": k / size.shape[-1], "size_share": (best.values.sum(-1) / size.sum(-1)).tolist(),
                "output_share": ((written * out).sum(-1) / out.square().sum(-1)).tolist(),
                "cosine": torch.cosine_similarity(written, out).tolist(), "output_norm": out.norm(dim=-1).tolist(),
                "output_top": top.tolist(), "composed": (~single).tolist(), "norm": norm_name,
            }))  # fmt: skip
    return pd.concat(frames, ignore_index=True).sort_values(["example", "layer"], ignore_index=True)


@torch.no_grad()
def prediction_events(
    model: Hookable,
    inputs: Any,
    position: Any = -1,
    k: int = 10,
    norm: str = "none",
    seed: int = 0,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
    batch_size: int = 16,
) -> pd.DataFrame:
    """Do the dominant sub-updates promote what wins or push down what loses? One row per event and kind of updates (Geva 2022).

    Tops are the logit lens's. saturation: the model's final prediction is not the top entering the layer (resid_pre), is the top
    leaving it and stays so to the end. elimination: the top entering the layer is not the top leaving it. Columns: example,
    position, layer, event, token (the one promoted or eliminated), text, by_ffn (the token became, or ceased to be, the top
    between resid_mid and resid_post), updates, k, mean, max, min (of the scores m_i v_i · w over the k updates), norm.
    updates: "dominant" (largest |m_i|·‖v_i‖); "random" (k others of the layer as they are); "matched" (the same others, scaled to
    the dominant ones' sizes, so that only their directions differ). Post-norm models are refused: their stream has no resid_mid.
    """
    reader, norm_name = vocabulary(model, norm)
    wanted = ffn_layers(model, None)
    values = {layer: require_weight(model, "W_out", layer).detach() for layer in wanted}
    generator = torch.Generator().manual_seed(seed)
    inputs, frames = prepare(model, inputs, tokenizer, prefix), []
    names = ("resid_pre", "resid_mid", "resid_post", "ffn_act")
    for begin, index, cache in _passes(model, inputs, wanted, names, position, batch_size):
        tops = {key: model.unembed(value).argmax(-1) for key, value in cache.items() if key[0] != "ffn_act"}
        final, stays = tops["resid_post", wanted[-1]], torch.ones(len(index), dtype=torch.bool, device=index.device)
        for layer in reversed(wanted):
            before, middle, after = (tops[name, layer] for name in names[:3])
            stays = stays & (after == final)
            happened = {"saturation": (stays & (before != final), final, middle != final),
                        "elimination": (before != after, before, middle == before)}  # fmt: skip
            for event, (mask, token, by_ffn) in happened.items():
                rows = mask.nonzero()[:, 0]
                if not len(rows):
                    continue
                scores = _scores(cache["ffn_act", layer][rows], values[layer], reader, token[rows], k, generator)
                for kind, score in scores.items():
                    frames.append(pd.DataFrame({
                        "example": (begin + rows).tolist(), "position": index[rows].tolist(), "layer": layer, "event": event,
                        "token": token[rows].tolist(), "text": labels(tokenizer, token[rows]), "by_ffn": by_ffn[rows].tolist(),
                        "updates": kind, "k": k, "mean": score.mean(-1).tolist(), "max": score.amax(-1).tolist(),
                        "min": score.amin(-1).tolist(), "norm": norm_name,
                    }))  # fmt: skip
    if not frames:
        return pd.DataFrame(columns=EVENT_COLUMNS)
    return pd.concat(frames, ignore_index=True).sort_values(
        ["example", "layer", "event", "updates"], ignore_index=True, kind="stable"
    )


EVENT_COLUMNS = [
    "example",
    "position",
    "layer",
    "event",
    "token",
    "text",
    "by_ffn",
    "updates",
    "k",
    "mean",
    "max",
    "min",
    "norm",
]


def _scores(act: Tensor, values: Tensor, reader: Tensor, token: Tensor, k: int, generator) -> dict[str, Tensor]:
    """Scores of `token` [event] by the dominant, random and matched sub-updates, each [event k]."""
    size = act.abs() * values.norm(dim=-1)
    best = size.topk(_size(k, size.shape[-1] // 2), -1)
    noise = torch.rand(act.shape, generator=generator).to(act.device)
    noise = noise.masked_fill(act == 0, -1.0).scatter(
        -1, best.indices, -math.inf
    )  # silent ones only where others are too few
    other = noise.topk(best.indices.shape[-1], -1).indices
    towards = reader[:, token].T  # [event d_model]
    each = {
        name: act.gather(-1, chosen) * torch.einsum("ekd,ed->ek", values[chosen], towards)
        for name, chosen in (("dominant", best.indices), ("random", other))
    }
    scale = best.values / size.gather(-1, other).clamp(min=torch.finfo(size.dtype).tiny)
    return {**each, "matched": torch.where(size.gather(-1, other) > 0, each["random"] * scale, 0)}


def _passes(
    model: Hookable, inputs: Inputs, layers: Sequence[int], names: Sequence[str], position: Any, batch_size: int
) -> Iterator[tuple[int, Tensor, dict[tuple[str, int], Tensor]]]:
    """Batch by batch: its first example's number, the positions read [example], and each site there [example …]."""
    index, stack = positions(inputs, position), model.sites[-1].stack
    sites = [Site(name, layer, stack) for layer in layers for name in names]
    missing = [str(site) for site in sites if site not in model.sites]
    if missing:
        raise FFNError(f"this needs the sites {', '.join(names)} of every layer, and the model has no {missing[0]}")
    for begin in range(0, inputs.batch, batch_size):
        chosen = slice(begin, begin + batch_size)
        part, here = inputs.select(chosen), index[chosen]
        rows = torch.arange(part.batch, device=here.device)
        cache = run(model, part, record=sites).cache
        yield begin, here, {(site.name, int(site.layer or 0)): cache[site][rows, here] for site in sites}


def _size(k: int, most: int) -> int:
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= most:
        raise FFNError(f"k={k!r} is not allowed; allowed: an int from 1 to {most}")
    return k
