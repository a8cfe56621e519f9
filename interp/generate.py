"""Autoregressive generation: the output is appended to the input, with keys and values of earlier positions kept (A4)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from interp.hookable import require_head
from interp.model.inputs import Inputs, InputsError, KVCache
from interp.model.transformer import Transformer
from interp.run import prepare


class CacheError(RuntimeError):
    """A cache of keys and values that did not grow by the positions that were run."""


@torch.no_grad()
def generate(
    model: Transformer,
    inputs: Any,
    max_new: int = 20,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop: int | Sequence[int] = (),
    seed: int = 0,
    use_cache: bool = True,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> Tensor:
    """New token ids [batch n], n <= max_new: greedy at temperature 0, else sampled from softmax(logits/temperature).

    top_k keeps the k likeliest tokens, top_p the smallest set whose probability reaches p. A sequence that has
    produced a `stop` token repeats it; generation ends when all have. Prompts of different length: pad with a mask.
    The same tokens with and without the cache. Raises InputsError (too long, bad ids, bad options).
    """
    require_head(model)
    inputs = prepare(model, inputs, tokenizer, prefix)
    _check_options(model, inputs, max_new, temperature, top_k, top_p)
    generator = torch.Generator().manual_seed(seed)
    stops = torch.tensor([stop] if isinstance(stop, int) else list(stop), device=inputs.tokens.device).long()
    cache, new, step = KVCache() if use_cache else None, [], inputs
    done = torch.zeros(inputs.batch, dtype=torch.bool, device=inputs.tokens.device)
    for _ in range(max_new):
        logits = _last_logits(model, step, cache)
        token = _choose(logits, temperature, top_k, top_p, generator)
        if new:
            token = torch.where(done, new[-1], token)
        new.append(token)
        done = done | torch.isin(token, stops)
        if bool(done.all()):
            break
        inputs = _append(inputs, token)
        step = inputs if cache is None else Inputs(token[:, None], prefix_length=inputs.prefix_length)
    return torch.stack(new, 1)


def _last_logits(model: Transformer, step: Inputs, cache: KVCache | None) -> Tensor:
    before = 0 if cache is None else cache.length
    logits = model(step, kv_cache=cache)
    if cache is not None and (cache.length != before + step.length or _held(cache) != cache.length):
        raise CacheError(f"the cache holds {_held(cache)} positions after {before} and {step.length} new ones")
    return logits[torch.arange(step.batch, device=logits.device), step.last()]


def _held(cache: KVCache) -> int:
    return min((keys.shape[1] for keys in cache.keys.values()), default=0)


def _append(inputs: Inputs, token: Tensor) -> Inputs:
    mask = inputs.mask
    if mask is not None:
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], 1)
    return Inputs(torch.cat([inputs.tokens, token[:, None]], 1), mask=mask, prefix_length=inputs.prefix_length)


def _choose(logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, generator) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    logits = logits.double().cpu() / temperature
    if top_k is not None:
        kth = logits.topk(min(top_k, logits.shape[-1]), -1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if top_p is not None:
        ordered, index = logits.sort(-1, descending=True)
        chances = ordered.softmax(-1)
        cut = chances.cumsum(-1) - chances >= top_p  # the likeliest token always stays
        logits = logits.masked_fill(cut.gather(-1, index.argsort(-1)), float("-inf"))
    return torch.multinomial(logits.softmax(-1), 1, generator=generator)[:, 0]


def _check_options(model, inputs: Inputs, max_new: int, temperature: float, top_k, top_p) -> None:
    if model.config.kind == "encoder":
        raise InputsError("kind='encoder' sees both sides of a position and cannot generate; allowed: a decoder")
    if inputs.embeddings is not None or inputs.segments is not None:
        raise InputsError("generation appends token ids: embeddings= and segments= are not allowed")
    if max_new < 1 or inputs.length + max_new - 1 > model.config.n_ctx:
        room = model.config.n_ctx - inputs.length + 1
        raise InputsError(f"max_new={max_new} after {inputs.length} tokens is not allowed; allowed: 1 … {room}")
    if temperature < 0:
        raise InputsError(f"temperature={temperature} is not allowed; allowed: 0 (greedy) or more")
    if top_k is not None and top_k < 1:
        raise InputsError(f"top_k={top_k} is not allowed; allowed: 1 or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise InputsError(f"top_p={top_p} is not allowed; allowed: 0 < top_p <= 1")
