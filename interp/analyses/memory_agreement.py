"""Do keys and values of an FFN agree over a corpus (Geva 2021), and which values promote a given token?

A key agrees with its value where the token that follows the key's strongest trigger is the one that sign · v_i promotes most.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.analyses.subupdates import CHUNK, FFNError, ffn_layers, vocabulary
from interp.analyses.triggers import Triggers
from interp.hookable import Hookable, require_weight
from interp.tokens import as_tokenizer, labels


@torch.no_grad()
def memory_pairs(model: Hookable, triggers: Triggers, norm: str = "none", tokenizer: Any = None) -> pd.DataFrame:
    """Every key that fires beside its value: one row per layer, sign and neuron with a trigger that a token follows.

    triggers: of `corpus_triggers` (with followed=True every trigger has a continuation; others are not counted). norm: as of
    `vocabulary`. Columns: layer, sign, neuron, coefficient, continuation (token after the strongest trigger), top (token that
    sign · v_i promotes most), continuation_text, top_text, agrees, rank (of the continuation among the tokens that sign · v_i
    promotes, 0 = top), n_triggers, agrees_any (top follows any of them), confidence (of top: the softmax of sign · v_i W_U, Geva
    2021; with norm="final", of v_i divided by its root mean square as a final norm alone with it would do), log_odds (of top;
    where confidence rounds to 1 these still differ), marginal (share of the corpus's positions read that top follows), uniform
    (1/vocabulary), through (as of `ffn_values`). Raises FFNError.
    """
    reader, through = vocabulary(model, norm)
    counts = triggers.next_counts.double()
    share, frames = (counts / counts.sum()).clamp(min=0), []
    for i, layer in enumerate(triggers.layers):
        values = require_weight(model, "W_out", layer).detach()
        if norm == "final":
            values = values / _scale(values, through)
        found = _tops(values, reader, triggers.next_token[i, :, :, 0].long())
        for s, sign in enumerate(triggers.signs):
            coefficient, following = triggers.coefficient[i, s], triggers.next_token[i, s].long()  # [neuron k]
            neurons = (following[:, 0] >= 0).nonzero()[:, 0]
            after = following[neurons]
            top, log_odds, rank = (one[s, neurons] for one in found)
            frames.append(pd.DataFrame({
                "layer": layer, "sign": sign, "neuron": neurons.tolist(), "coefficient": coefficient[neurons, 0].tolist(),
                "continuation": after[:, 0].tolist(), "top": top.tolist(), "continuation_text": labels(tokenizer, after[:, 0]),
                "top_text": labels(tokenizer, top), "agrees": (top == after[:, 0]).tolist(), "rank": rank.tolist(),
                "n_triggers": (after >= 0).sum(1).tolist(), "agrees_any": (after == top[:, None]).any(1).tolist(),
                "confidence": log_odds.double().sigmoid().tolist(), "log_odds": log_odds.tolist(),
                "marginal": share[top].tolist(), "uniform": 1 / len(counts), "through": through,
            }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def _scale(values: Tensor, through: str) -> Tensor:
    """What a final norm would divide each value by, were it the whole stream [neuron 1]."""
    if through == "the model has none":
        return torch.ones_like(values[:, :1])
    centred = values - values.mean(-1, keepdim=True) if "centred" in through else values
    return centred.square().mean(-1, keepdim=True).sqrt().clamp(min=torch.finfo(values.dtype).tiny)


def _tops(values: Tensor, reader: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Per sign and value: the token promoted most, its log-odds by softmax, how many tokens are promoted more than `wanted`.

    wanted [sign neuron]; all results too. Both signs come from one product, which is what takes the time.
    """
    found = []
    for part, asked in zip(values.split(CHUNK), wanted.clamp(min=0).split(CHUNK, 1), strict=True):
        scores, signs = part @ reader, []
        for one in asked.to(scores.device):
            best, here = scores.max(-1, keepdim=True), scores.gather(-1, one[:, None])
            rank = (scores > here).sum(-1)
            others = scores.scatter_(-1, best.indices, -math.inf).logsumexp(-1)  # 1 − p itself would round to 0
            scores.scatter_(-1, best.indices, best.values)
            signs.append((best.indices[:, 0].cpu(), (best.values[:, 0] - others).cpu(), rank.cpu()))
            scores = scores.neg_()
        found.append([torch.stack(three) for three in zip(*signs, strict=True)])
    top, log_odds, rank = (torch.cat(parts, 1) for parts in zip(*found, strict=True))
    return top, log_odds, rank


def memory_agreement(pairs: pd.DataFrame, permutations: int = 1000, seed: int = 0) -> pd.DataFrame:
    """Per layer and sign: the share of keys whose strongest trigger is followed by what their value promotes most (Geva 2021).

    pairs: of `memory_pairs`. Columns: layer, sign, n (keys), agreement; null_mean, null_999 (99.9th percentile, NaN under 10,000
    permutations) and p = (1 + #{null >= agreement})/(1 + permutations), one-sided, from values paired anew with the keys of the
    same layer and sign; frequency_null = (1/n) Σ_i q(top_i), where q(w) is the share of all positions read that w follows: what
    independent draws of ordinary continuations would agree; uniform = 1/vocabulary (Geva 2021's null, far too easy);
    permutations, through. The unit is the neuron of one trained model: p says nothing of other seeds. Raises FFNError.
    """
    if not isinstance(permutations, int) or isinstance(permutations, bool) or permutations < 1000:
        raise FFNError(f"permutations={permutations!r} is not allowed; allowed: an int from 1000")
    missing = {"layer", "sign", "top", "continuation", "marginal", "uniform", "through"} - set(pairs.columns)
    if missing:
        raise FFNError(f"pairs lacks {', '.join(sorted(missing))}; allowed: the table of memory_pairs")
    draw, rows = np.random.default_rng(seed), []
    for (layer, sign), part in pairs.groupby(["layer", "sign"], sort=False):
        top, continuation = part["top"].to_numpy(), part["continuation"].to_numpy()
        observed = int((top == continuation).sum())  # counts, so that equal shares are equal
        null = np.array([(draw.permutation(top) == continuation).sum() for _ in range(permutations)])
        rows.append({
            "layer": layer, "sign": sign, "n": len(part), "agreement": observed / len(part),
            "null_mean": null.mean() / len(part),
            "null_999": np.quantile(null, 0.999) / len(part) if permutations >= 10_000 else math.nan,
            "p": (1 + int((null >= observed).sum())) / (1 + permutations),
            "frequency_null": part["marginal"].mean(), "uniform": part["uniform"].iloc[0], "permutations": permutations,
            "through": part["through"].iloc[0],
        })  # fmt: skip
    return pd.DataFrame(rows)


def confident_values(pairs: pd.DataFrame, n: int = 100) -> pd.DataFrame:
    """The `n` most confident values of the model and where they are, one row per layer and sign (Geva 2021: 97 of 100 on top).

    Columns: layer, sign, n_confident (how many of the n are here), share (of the n), agree_any (how many of them promote most
    what follows any of their triggers), agree_first (… their strongest trigger), least_confidence and least_log_odds (of the n;
    the same in every row). pairs: of `memory_pairs`; keys without a trigger are not among them. Raises FFNError.
    """
    if not isinstance(n, int) or isinstance(n, bool) or n < 1:
        raise FFNError(f"n={n!r} is not allowed; allowed: an int from 1")
    best = pairs.sort_values("log_odds", ascending=False, kind="stable").head(n)
    groups = best.groupby(["layer", "sign"], sort=False)
    found = pd.DataFrame({
        "n_confident": groups.size(), "agree_any": groups["agrees_any"].sum(), "agree_first": groups["agrees"].sum(),
    })  # fmt: skip
    every = pd.MultiIndex.from_frame(pairs[["layer", "sign"]].drop_duplicates())
    table = found.reindex(every, fill_value=0).astype(int).reset_index()
    table.insert(3, "share", table["n_confident"] / len(best))
    return table.assign(least_confidence=best["confidence"].min(), least_log_odds=best["log_odds"].min())


@torch.no_grad()
def values_promoting(
    model: Hookable,
    token: int | str,
    layers: Sequence[int] | int | None = None,
    k: int = 20,
    norm: str = "none",
    tokenizer: Any = None,
    triggers: Triggers | None = None,
) -> pd.DataFrame:
    """The `k` values ±v_i that promote one token most, over all `layers`: the search from the answer back to the memory.

    token: an id, or text that is one token of `tokenizer`. Columns: rank (by z), layer, neuron, sign, token, text, score (sign ·
    v_i · w), z (score less the value's mean over the vocabulary, by its standard deviation), rank_of_token (among all tokens
    under that value, 0 = top), through; with `triggers`, what fires it with that sign: coefficient, fired_by (token), fired_text,
    example, context (missing where nothing does). Raises FFNError.
    """
    reader, through = vocabulary(model, norm)
    if not isinstance(k, int) or isinstance(k, bool) or k < 1:
        raise FFNError(f"k={k!r} is not allowed; allowed: an int from 1")
    wanted = _token(token, tokenizer, reader.shape[1])
    every = _scores_of(model, ffn_layers(model, layers), reader, wanted)
    best = every.sort_values("z", ascending=False, kind="stable").head(k).reset_index(drop=True)
    ranks = []
    for layer, neuron, sign in zip(*(best[name].tolist() for name in ("layer", "neuron", "sign")), strict=True):
        scores = sign * (require_weight(model, "W_out", layer)[neuron].detach() @ reader)
        ranks.append(int((scores > scores[wanted]).sum()))
    best = best.assign(rank_of_token=ranks)
    best.insert(0, "rank", range(len(best)))
    best.insert(4, "token", wanted)
    best.insert(5, "text", labels(tokenizer, [wanted])[0])
    best = best.assign(through=through)
    return best if triggers is None else best.join(_fired(best, triggers, tokenizer))


def _scores_of(model: Hookable, layers: Sequence[int], reader: Tensor, token: int) -> pd.DataFrame:
    """Score and z of one token under every ±v_i, with mean and variance over tokens from the reader's own."""
    wide = reader.double()
    mean = wide.mean(1)
    off = wide - mean[:, None]
    spread, frames = off @ off.T / reader.shape[1], []
    for layer in layers:
        values = require_weight(model, "W_out", layer).detach().double()
        score = values @ wide[:, token]
        z = (score - values @ mean) / ((values @ spread) * values).sum(-1).clamp(min=1e-300).sqrt()
        for sign in (1, -1):
            frames.append(pd.DataFrame({"layer": layer, "neuron": range(len(z)), "sign": sign, "score": (sign * score).tolist(),
                                        "z": (sign * z).tolist()}))  # fmt: skip
    return pd.concat(frames)


def _fired(best: pd.DataFrame, triggers: Triggers, tokenizer: Any) -> pd.DataFrame:
    """The strongest trigger of each row's neuron and sign."""
    rows = []
    for layer, neuron, sign in zip(*(best[name].tolist() for name in ("layer", "neuron", "sign")), strict=True):
        found = pd.DataFrame()
        if layer in triggers.layers:
            found = triggers.table(layer, [neuron], tokenizer, k=1).query(f"sign == {sign}")
        one = found.iloc[0].to_dict() if len(found) else {}
        rows.append({"coefficient": one.get("coefficient", math.nan), "fired_by": one.get("token"),
                     "fired_text": one.get("text"), "example": one.get("example"), "context": one.get("context")})  # fmt: skip
    return pd.DataFrame(rows).astype({"fired_by": "Int64", "example": "Int64"})


def _token(token: int | str, tokenizer: Any, vocab: int) -> int:
    if isinstance(token, str):
        if tokenizer is None:
            raise FFNError(f"token={token!r} is text; allowed: an id, or text with tokenizer=")
        ids = as_tokenizer(tokenizer).ids(token)
        if len(ids) != 1:
            raise FFNError(f"token={token!r} is {len(ids)} tokens; allowed: text that is one token")
        return ids[0]
    if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token < vocab:
        raise FFNError(f"token={token!r} is not allowed; allowed: an id of 0 … {vocab - 1}")
    return token
