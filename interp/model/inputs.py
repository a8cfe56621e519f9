"""What a forward pass is given: tokens, masks, and the keys and values of an earlier pass.

Nothing here looks at the values of a tensor: a forward pass stays pure, so it compiles and maps.
Values are checked by `interp.run`, `interp.generate`, the data and the loading code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interp.model.config import ModelConfig


class InputsError(ValueError):
    """Inputs that a model cannot take; the message names the value received and the values allowed."""


@dataclass(frozen=True)
class Inputs:
    """A batch of sequences.

    tokens [batch pos] int. mask [batch pos] bool, True = real token, None = all real. source, source_mask
    [batch source_pos]: what an encoder-decoder's encoder reads (tokens are the decoder's). prefix_length [batch]: how
    many real tokens form a prefix decoder's prefix. embeddings [batch pos d_model]: used instead of the
    token embeddings. segments [batch pos] int.
    roles: names for per-example positions, name -> int tensor [batch]; `at` and metrics accept the names. source_roles: the
    same for positions of the source, which sites of the encoder and the keys of cross-attention have.
    """

    tokens: Tensor
    mask: Tensor | None = None
    source: Tensor | None = None
    source_mask: Tensor | None = None
    prefix_length: Tensor | None = None
    embeddings: Tensor | None = None
    segments: Tensor | None = None
    roles: Mapping[str, Tensor] = field(default_factory=dict)
    source_roles: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """How many sequences."""
        return self.tokens.shape[0]

    @property
    def length(self) -> int:
        """How many positions, padding included."""
        return self.tokens.shape[1]

    def last(self) -> Tensor:
        """Index of each sequence's last real token [batch]."""
        if self.mask is None:
            return torch.full((self.batch,), self.length - 1, device=self.tokens.device)
        index = torch.arange(self.length, device=self.tokens.device)
        return torch.where(self.mask, index, -1).amax(1)

    @property
    def encoder(self) -> Inputs:
        """What the encoder of an encoder-decoder reads: `source`, its mask and its roles."""
        if self.source is None:
            raise InputsError(
                "kind='encoder-decoder' needs source= [batch source_pos] beside the target's tokens; got None"
            )
        return Inputs(self.source, mask=self.source_mask, roles=self.source_roles)

    def to(self, device: torch.device | str) -> Inputs:
        """The same inputs on `device`."""
        return self._each(lambda value: value.to(device))

    def select(self, rows: Any) -> Inputs:
        """The sequences that `rows` (slice, list or int tensor) picks."""
        if isinstance(rows, list):
            rows = torch.tensor(rows, device=self.tokens.device)
        return self._each(lambda value: value[rows])

    def _each(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """Every tensor, roles too, passed through `function`."""
        values: dict[str, Any] = {}
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            if isinstance(value, Tensor):
                value = function(value)
            elif isinstance(value, Mapping):
                value = {role: function(positions) for role, positions in value.items()}
            values[name] = value
        return Inputs(**values)


def as_inputs(inputs: Any) -> Inputs:
    """Inputs from a tensor or nested list of token ids; one sequence without a batch axis becomes a batch of one."""
    if isinstance(inputs, Inputs):
        return inputs
    if isinstance(inputs, list | tuple) and inputs and not isinstance(inputs[0], str):
        inputs = torch.as_tensor(inputs)
    if not isinstance(inputs, Tensor):
        raise InputsError(
            f"inputs must be Inputs, a token-id tensor [batch pos] or a list of ids; got {type(inputs).__name__}"
            + (": strings also need tokenizer= and prefix=" if _is_text(inputs) else "")
        )
    if inputs.ndim not in (1, 2):
        raise InputsError(f"tokens must have axes [batch pos] or [pos], got shape {tuple(inputs.shape)}")
    return Inputs(inputs[None] if inputs.ndim == 1 else inputs)


def _is_text(inputs: Any) -> bool:
    return isinstance(inputs, str) or (isinstance(inputs, list | tuple) and bool(inputs) and isinstance(inputs[0], str))


def teacher_forced(targets: Tensor, bos: int, mask: Tensor | None = None, **fields: Any) -> Inputs:
    """Inputs for one parallel pass over known targets [batch pos]: shifted right, BOS first, so position i predicts target i.

    mask [batch pos]: which targets are real; BOS stands where the first real one is asked for, left padding or not. fields:
    the other fields of Inputs, such as source=.
    """
    if (
        not isinstance(targets, Tensor)
        or targets.ndim != 2
        or targets.dtype.is_floating_point
        or not isinstance(bos, int)
    ):
        found = f"{targets.dtype} {tuple(targets.shape)}" if isinstance(targets, Tensor) else type(targets).__name__
        raise InputsError(f"targets must be ints [batch pos] and bos a token id; got {found} and {bos!r}")
    if mask is not None and (mask.shape != targets.shape or mask.dtype != torch.bool):
        raise InputsError(f"mask must be bool {tuple(targets.shape)}, got {mask.dtype} {tuple(mask.shape)}")
    before = torch.ones_like(targets, dtype=torch.bool) if mask is None else mask.clone()
    before = torch.cat([torch.zeros_like(before[:, :1]), before[:, :-1]], 1)  # is there a target before this position?
    tokens = torch.where(before, torch.cat([targets[:, :1], targets[:, :-1]], 1), bos)
    return Inputs(tokens, mask=mask, **fields)


class KVCache:
    """Keys and values of the positions already computed, so that generation only computes new ones.

    `keys[l]`, `values[l]` are [batch pos kv_head d_head] as they enter the scores. One cache belongs to one
    sequence of calls; `model(inputs, kv_cache=cache)` extends it by the inputs' positions. A prefix decoder's first call must
    hold the whole prefix: its tokens see each other, and a later call cannot change what an earlier one computed.
    """

    def __init__(self) -> None:
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}
        self.cross: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> cross-attention's keys and values of the source
        self.memory: Memory | None = None  # an encoder-decoder's source, encoded once
        self.mask: Tensor | None = None  # [batch pos] of every cached position, None while all are real
        self.length = 0

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append a layer's new keys and values; returns all of them."""
        if layer in self.keys:
            k = torch.cat([self.keys[layer], k], 1)
            v = torch.cat([self.values[layer], v], 1)
        self.keys[layer], self.values[layer] = k, v
        return k, v

    def advance(self, inputs: Inputs) -> None:
        """Count the inputs' positions as cached; called once per forward pass, after the last block."""
        self.mask = joined_mask(inputs, self)
        self.length += inputs.length


def joined_mask(inputs: Inputs, cache: KVCache | None) -> Tensor | None:
    """Which of the cached and the new positions are real [batch key]; None when all are."""
    old = None if cache is None else cache.mask
    if cache is None or cache.length == 0:
        return inputs.mask
    if old is None and inputs.mask is None:
        return None
    if old is None:
        old = torch.ones(inputs.batch, cache.length, dtype=torch.bool, device=inputs.tokens.device)
    new = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    return torch.cat([old, new], 1)


def position_ids(inputs: Inputs, cache: KVCache | None = None) -> Tensor:
    """Position of each new token [batch or 1, pos]: how many real tokens precede it, so left padding equals none.

    Padding itself gets the position of the last real token before it (0 if there is none); nothing reads it.
    """
    start = 0 if cache is None else cache.length
    mask = joined_mask(inputs, cache)
    if mask is None:
        return torch.arange(start, start + inputs.length, device=inputs.tokens.device)[None]
    return (mask.long().cumsum(1) - 1).clamp(min=0)[:, start:]


@dataclass(frozen=True)
class Edges:
    """Which key positions each query may read: `mask` [batch or 1, 1, query, key] bool, None = all or plain causal.

    causal: True when the edges are exactly the lower triangle, which fused attention kernels know.
    empty_rows: True when a query may have no edge at all (padding); its z is 0.
    read: how attention reads instead, where its queries are not rows of a rectangle (a sweep's): a function of
    (attention, q, k, v, tap) that returns z.
    """

    mask: Tensor | None
    causal: bool
    empty_rows: bool
    read: Callable[..., Tensor] | None = None

    def dense(self, n_query: int, n_key: int, device: torch.device) -> Tensor | None:
        """The same edges as a mask, also where a kernel would not need one."""
        if self.mask is None and self.causal:
            return torch.ones(n_query, n_key, dtype=torch.bool, device=device).tril(n_key - n_query)
        return self.mask


@dataclass(frozen=True)
class Memory:
    """What a decoder's cross-attention reads: the encoder's last states [batch source_pos d_model] and who may read them."""

    states: Tensor
    edges: Edges


def cross_edges(inputs: Inputs) -> Edges:
    """Every target position reads every real source position."""
    mask = inputs.source_mask
    return Edges(None if mask is None else mask[:, None, None], False, mask is not None)


def attention_edges(config: ModelConfig, inputs: Inputs, cache: KVCache | None = None) -> Edges:
    """The edges that a model's kind, window and padding admit (TEXTBOOK A2).

    decoder (also an encoder-decoder's): key <= query. encoder: all. prefix-decoder: key <= query, or key inside the prefix.
    """
    start = 0 if cache is None else cache.length
    n_key = start + inputs.length
    real = joined_mask(inputs, cache)
    window = None if config.window is None or config.window >= n_key else config.window
    if real is None and window is None and config.kind != "prefix-decoder":
        if config.kind == "encoder" or inputs.length == 1:  # one new query sees every key before it
            return Edges(None, False, False)
        if start == 0:
            return Edges(None, True, False)
    device = inputs.tokens.device
    query, key = torch.arange(start, n_key, device=device)[:, None], torch.arange(n_key, device=device)[None]
    edges = torch.ones_like(key <= query) if config.kind == "encoder" else key <= query
    edges = edges[None, None]
    # Positions count real tokens, so distances and prefixes do too.
    ids = torch.arange(n_key, device=device)[None] if real is None else (real.long().cumsum(1) - 1).clamp(min=0)
    if window is not None:
        edges = edges & ((ids[:, start:, None] - ids[:, None, :]).abs() < window)[:, None]
    if config.kind == "prefix-decoder" and inputs.prefix_length is not None:
        edges = edges | (ids < inputs.prefix_length[:, None])[:, None, None]
    if real is not None:
        edges = edges & real[:, None, None]
    return Edges(edges, False, real is not None)
