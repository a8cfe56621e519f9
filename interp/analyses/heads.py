"""Scores of heads by what they attend to on repeated random tokens, and by whether they copy (Olsson 2022, Elhage 2021).

Sequence: BOS, a random r of length n without repeats, r again. Attention tells where a head looks, not what the output needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.analyses.circuits import HeadWeights
from interp.analyses.norm_reading import norm_readings
from interp.hookable import Hookable, UnsupportedModelError, require_head, require_hookable, require_weight
from interp.metrics import wide
from interp.model.inputs import InputsError
from interp.run import run
from interp.sites import output_sites

PATTERNS = ("previous token", "duplicate token", "induction")
SCORES = (*PATTERNS, "copying")
CONVENTIONS = ("mean", "mul", "abs")


class HeadScoreError(ValueError):
    """A score or convention that does not exist, or tokens that are not BOS and the same sequence twice."""


@torch.no_grad()
def head_scores(
    model: Hookable,
    tokens: Any = None,
    scores: Sequence[str] = SCORES,
    conventions: Sequence[str] = CONVENTIONS,
    lengths: Sequence[int] = (8, 12, 16),
    n: int = 16,
    bos: int = 0,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per score × convention × layer × head.

    Scores by attention A on sequences whose second copy of r starts n after the first: "previous token" (i to i − 1),
    "duplicate token" (to the same token earlier: i − n), "induction" (to what followed it: i − n + 1; Olsson's prefix matching).
    Conventions: "mean" = the mean of A over those edges, of every query for the previous token, of queries in the second copy
    for the others; "mul" = Σ(A P)/ΣA and "abs" = 1 − Σ|A − P|/positions, P = 1 on edges that the tokens define, else 0: those of
    TransformerLens's `detect_head` (which rounds "abs"). Each is the mean over sequences of one number per sequence.
    "copying" (convention "eigenvalues"): Σλ/Σ|λ| of W_E W_V W_O W_U, −1 … 1, norm gains folded in, from weights alone.
    tokens: the sequences [n 1+2·length], else `n` of each of `lengths` are drawn from `seed`, without the token `bos` in r.
    Columns: score, convention, layer, head, value, n_sequences (missing for copying), seed (missing where nothing was drawn).
    Raises HeadScoreError, InputsError, UnsupportedModelError.
    """
    _check(scores, conventions)
    require_hookable(model)
    rows: list[dict[str, Any]] = []
    wanted = [score for score in PATTERNS if score in scores]
    if wanted:
        if model.config.kind == "encoder-decoder":
            raise UnsupportedModelError(
                "repeated tokens need one stack of blocks; this model has an encoder and a decoder"
            )
        batches = [_repeated(tokens)] if tokens is not None else [
            repeated_tokens(model.config.vocab, length, n, bos, seed + i) for i, length in enumerate(lengths)
        ]  # fmt: skip
        rows += _attention_rows(model, batches, wanted, conventions, None if tokens is not None else seed)
    if "copying" in scores:
        rows += _copying_rows(model)
    columns = ["score", "convention", "layer", "head", "value", "n_sequences", "seed"]
    return pd.DataFrame(rows, columns=columns).astype({"n_sequences": "Int64", "seed": "Int64"})


def repeated_tokens(vocab: int, length: int, n: int, bos: int = 0, seed: int = 0) -> Tensor:
    """`n` sequences [n 1+2·length]: BOS, r, r, with r drawn without repeats from all tokens but BOS. Raises HeadScoreError."""
    if not 1 < length < vocab:
        raise HeadScoreError(f"length={length} is not allowed: r has no repeats and no BOS; allowed: 2 … {vocab - 1}")
    if not 0 <= bos < vocab:
        raise HeadScoreError(f"bos={bos} is outside the vocabulary; allowed: 0 … {vocab - 1}")
    generator = torch.Generator().manual_seed(seed)
    r = torch.stack([torch.randperm(vocab - 1, generator=generator)[:length] for _ in range(n)])
    r = r + (r >= bos)
    return torch.cat([torch.full((n, 1), bos), r, r], 1)


def _check(scores: Sequence[str], conventions: Sequence[str]) -> None:
    for name, given, allowed in (("scores", scores, SCORES), ("conventions", conventions, CONVENTIONS)):
        if isinstance(given, str) or not given or any(one not in allowed for one in given):
            raise HeadScoreError(f"{name}={given!r} is not allowed; allowed: a list of {', '.join(map(repr, allowed))}")


def _repeated(tokens: Any) -> Tensor:
    tokens = torch.as_tensor(tokens)
    if tokens.ndim != 2 or tokens.shape[1] < 5 or tokens.shape[1] % 2 == 0:
        raise InputsError(f"tokens must be [n 1+2·length] with length 2 or more, got shape {tuple(tokens.shape)}")
    first, second = tokens[:, 1:].chunk(2, 1)
    if not torch.equal(first, second):
        row = int((first != second).any(1).nonzero()[0, 0])
        raise HeadScoreError(f"tokens must be BOS and the same sequence twice; example {row} is not")
    return tokens


def _attention_rows(model: Hookable, batches: list[Tensor], scores, conventions, seed) -> list[dict[str, Any]]:
    sites = output_sites("pattern", model.sites)
    if len(sites) != model.config.n_layers:
        raise UnsupportedModelError(f"attention scores need the site 'pattern' of every layer; this model offers "
                                    f"{len(sites)} of {model.config.n_layers}")  # fmt: skip
    caches = [(batch, run(model, batch, record=sites).cache) for batch in batches]
    rows = []
    for score in scores:
        for convention in conventions:
            for site in sites:
                each = torch.cat([_score(wide(cache[site]), batch, score, convention) for batch, cache in caches])
                rows += [
                    {"score": score, "convention": convention, "layer": site.layer, "head": head, "value": float(value),
                     "n_sequences": len(each), "seed": seed} for head, value in enumerate(each.mean(0))
                ]  # fmt: skip
    return rows


def _score(pattern: Tensor, tokens: Tensor, score: str, convention: str) -> Tensor:
    """pattern [n head query key] -> one number per sequence and head [n head]."""
    length = (tokens.shape[1] - 1) // 2
    if convention == "mean":
        back = {"previous token": 1, "duplicate token": length, "induction": length - 1}[score]
        edges = pattern.diagonal(-back, -2, -1)  # entry k: the query k + back
        first = 1 if score == "previous token" else length + 1
        return edges[..., first - back :].mean(-1)
    wanted = _edges(tokens, score).to(pattern)[:, None]
    if convention == "mul":
        return (pattern * wanted).sum((-2, -1)) / pattern.sum((-2, -1))
    return 1 - (pattern - wanted).abs().sum((-2, -1)) / tokens.shape[1]


def _edges(tokens: Tensor, score: str) -> Tensor:
    """Which key each query should look at, by the tokens alone [n query key] bool."""
    size = tokens.shape[1]
    if score == "previous token":
        return torch.eye(size, dtype=torch.bool).roll(-1, 1).tril(-1).expand(len(tokens), -1, -1)
    same = (tokens[:, :, None] == tokens[:, None, :]).cpu().tril(-1)
    if score == "duplicate token":
        return same
    return torch.nn.functional.pad(same, (1, 0))[..., :-1]  # the key after each earlier occurrence


def _copying_rows(model: Hookable) -> list[dict[str, Any]]:
    """Σλ/Σ|λ| per head: the eigenvalues of W_E W_V W_O W_U that can differ from 0 are those of W_O (W_U W_E) W_V."""
    require_head(model)
    [final] = norm_readings(model, "final")
    head = final.read(require_weight(model, "W_U").detach())
    ends = wide(head) @ wide(require_weight(model, "W_E").detach())  # [d_model d_model], shared by all heads
    rows = []
    for layer, norm in enumerate(norm_readings(model, "norm1")):
        weights = HeadWeights(model, layer, norm)
        for index in range(weights.n_heads):
            values = torch.linalg.eigvals(wide(weights.output(index)) @ ends @ wide(weights.values(index)))
            positivity = float(values.sum().real / values.abs().sum())
            rows.append({"score": "copying", "convention": "eigenvalues", "layer": layer, "head": index,
                         "value": positivity, "n_sequences": None, "seed": None})  # fmt: skip
    return rows
