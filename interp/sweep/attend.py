"""Attention over rows that share a base run: every query reads the base run's keys and its own cell's new ones.

The keys and values that a cell leaves as they were are read where they lie, once per example; nothing of the base run is copied
per cell.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.model.attention import Attention, softmax_or_zero
from interp.model.tap import Tap
from interp.sweep.layout import Bucket, Padded


class Slots:
    """One bucket on the device: which rows and new keys its sequences have, and which edges the mask shuts.

    Scores are [example kv_head each group query key], keys first the base run's, up to `stop`, then the sequence's own.
    """

    def __init__(self, bucket: Bucket, edges: np.ndarray, cross: bool, device: torch.device) -> None:
        """edges [batch or 1, query, key] bool: who may read whom; cross: the new keys are the memory's."""
        queries, new = bucket.queries, bucket.memory if cross else bucket.new
        self.examples, self.each = bucket.examples, bucket.each
        self.rows, self.new = _span(queries, device), _span(new, device)
        real = np.flatnonzero(queries.real)  # the entries of the rectangle that are rows
        self.real = None if queries.real.all() else torch.from_numpy(real).to(device)
        self.first, self.count = int(queries.index[0, 0]), len(real)
        example = bucket.example[:, None] if len(edges) > 1 else np.zeros((len(queries.real), 1), dtype=np.int64)
        base = edges[example, queries.position]  # [sequence query key]: what the mask lets it read
        mine = np.take_along_axis(base, new.position[:, None], 2) & new.real[:, None]
        theirs = np.ones((len(base), base.shape[2]), dtype=bool)
        theirs[np.nonzero(new.real)[0], new.position[new.real]] = False  # a new key stands instead of the base run's
        base &= theirs[:, None]
        self.stop = int(np.flatnonzero(base.any((0, 1)))[-1]) + 1 if base.any() else 0
        closed = ~np.concatenate([base[..., : self.stop], mine], -1)
        self.empty = bool(closed.all(-1).any())  # padding: a query without any edge
        self.closed = self.split(torch.from_numpy(closed).to(device))[:, None, :, None]  # [example 1 each 1 query key]
        self.key, self.length = torch.from_numpy(new.position).to(device), base.shape[2]

    def split(self, x: Tensor) -> Tensor:
        """[sequence …] -> [example each …]."""
        return x.unflatten(0, (len(self.examples), self.each))

    def rows_of(self, x: Tensor) -> Tensor:
        """[sequence query …] -> the rows that are real [row …]."""
        x = x.flatten(0, 1)
        return x if self.real is None else x.index_select(0, self.real)

    def of(self, base: Tensor) -> Tensor:
        """The base run's tensor [batch pos …] of the bucket's examples up to `stop`; a view when they are all."""
        if len(self.examples) != len(base) or (self.examples != np.arange(len(base))).any():
            base = base[torch.from_numpy(self.examples).to(base.device)]
        return base[:, : self.stop]


@dataclass(frozen=True)
class Reader:
    """Reads for one layer. base_keys, base_values [batch pos kv_head d_head]; extra: keys and values of tokens that are no
    rows of this layer [key kv_head d_head]; slots: the layer's rectangles. waiting: for rows without queries of their own, the
    base run's [row head d_head], and which rows have some [fresh row] and which not [row]."""

    base_keys: Tensor
    base_values: Tensor
    slots: list[Slots]
    extra: tuple[Tensor, Tensor] | None = None
    waiting: tuple[Tensor, Tensor, Tensor] | None = None

    def __call__(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, tap: Tap) -> Tensor:
        """q [1 row head d_head], k and v [1 new_key kv_head d_head] -> z [1 row head d_head]."""
        scale = attention.config.attention_scale
        assert scale is not None  # the config resolves it
        q, k, v = q[0], k[0], v[0]
        if self.waiting is not None:
            base, fresh, others = self.waiting
            both = q.new_empty(len(fresh) + len(others), *q.shape[1:])
            q = both.index_copy_(0, fresh, q).index_copy_(0, others, base)
        q = (q * scale).unflatten(1, (k.shape[1], -1))  # [row kv_head group d_head]
        if self.extra is not None:
            k, v = torch.cat([k, self.extra[0]]), torch.cat([v, self.extra[1]])
        scores = [self._scores(slots, q, k) for slots in self.slots]
        s, told = attention.sites, tap.wants(attention.sites.scores) or tap.wants(attention.sites.pattern)
        if told:  # only now are the scores of all keys put in one row per query
            scores = self._told(s.scores, scores, tap, float("-inf"))
        patterns = [
            softmax_or_zero(one) if told or slots.empty else one.softmax(-1)
            for slots, one in zip(self.slots, scores, strict=True)
        ]
        if told:
            patterns = self._told(s.pattern, patterns, tap, 0.0)
        z = torch.empty_like(q)
        for slots, pattern in zip(self.slots, patterns, strict=True):
            self._mix(slots, pattern, v, z)
        return z.flatten(1, 2)[None]

    def _scores(self, slots: Slots, q: Tensor, k: Tensor) -> Tensor:
        """q·k of one rectangle [example kv_head each group query key], −∞ where the mask shuts."""
        q = slots.split(_take(q, slots.rows)).permute(0, 3, 1, 4, 2, 5).contiguous()
        own = slots.split(_take(k, slots.new)).permute(0, 3, 1, 4, 2)  # [example kv_head each d_head key]
        scores = q.flatten(3, 4) @ own
        if slots.stop:
            keys = slots.of(self.base_keys).permute(0, 2, 3, 1)
            base = q.flatten(2, 4) @ keys
            scores = torch.cat([base.unflatten(2, (slots.each, -1)), scores], -1)
        scores = scores.unflatten(3, (q.shape[3], -1))
        return scores.masked_fill_(slots.closed, float("-inf"))

    def _mix(self, slots: Slots, pattern: Tensor, v: Tensor, z: Tensor) -> None:
        """z of one rectangle: α-weighted values of the base run and the sequence's own."""
        own = slots.split(_take(v, slots.new)).permute(0, 3, 1, 2, 4)  # [example kv_head each key d_head]
        mixed = pattern[..., slots.stop :].flatten(3, 4) @ own
        if slots.stop:
            values = slots.of(self.base_values).transpose(1, 2)
            base = pattern[..., : slots.stop].flatten(2, 4) @ values
            mixed = mixed + base.unflatten(2, (slots.each, -1))
        mixed = mixed.unflatten(3, (pattern.shape[3], -1)).permute(0, 2, 4, 1, 3, 5).flatten(0, 1)
        z[slots.first : slots.first + slots.count] = slots.rows_of(mixed)

    def _told(self, site: Any, parts: list[Tensor], tap: Tap, shut: float) -> list[Tensor]:
        """What `tap` makes of scores or pattern laid out in rows [1 row head key]; closed edges stay shut."""
        rows = [self._in_rows(slots, part, shut) for slots, part in zip(self.slots, parts, strict=True)]
        changed = tap(site, torch.cat(rows)[None])[0]
        found, start = [], 0
        for slots, part in zip(self.slots, parts, strict=True):
            found.append(self._from_rows(slots, changed[start : start + slots.count], part, shut))
            start += slots.count
        return found

    def _in_rows(self, slots: Slots, part: Tensor, shut: float) -> Tensor:
        """[example kv_head each group query key] -> [row head key], every key at its position."""
        wide = part.new_full((*part.shape[:-1], slots.length), shut)
        wide[..., : slots.stop] = part[..., : slots.stop]
        own = part[..., slots.stop :].masked_fill(slots.closed[..., slots.stop :], shut)
        keys = slots.split(slots.key)[:, None, :, None, None].expand_as(own)
        wide = wide.scatter_reduce(-1, keys, own, "amax") if shut else wide.scatter_add(-1, keys, own)
        wide = wide.permute(0, 2, 4, 1, 3, 5).flatten(0, 1).flatten(2, 3)  # [sequence query head key]
        return slots.rows_of(wide)

    def _from_rows(self, slots: Slots, rows: Tensor, like: Tensor, shut: float) -> Tensor:
        """The reverse of `_in_rows`."""
        shape = (len(slots.examples) * slots.each, like.shape[4])
        wide = rows.new_full((*shape, *rows.shape[1:]), shut)
        if slots.real is None:
            wide = rows.unflatten(0, shape)
        else:
            wide.view(-1, *rows.shape[1:])[slots.real] = rows
        wide = slots.split(wide.unflatten(2, (like.shape[1], -1))).permute(0, 3, 1, 4, 2, 5)
        keys = slots.split(slots.key)[:, None, :, None, None].expand(*wide.shape[:-1], -1)
        return torch.cat([wide[..., : slots.stop], wide.gather(-1, keys)], -1).masked_fill(slots.closed, shut)


def _span(padded: Padded, device: torch.device) -> Any:
    """Rows that lie one after another as a slice with a shape, which saves a copy; others as indices."""
    index = padded.index
    first = int(index[0, 0]) if index.size else 0
    if index.size and padded.real.all() and (index.reshape(-1) == np.arange(first, first + index.size)).all():
        return slice(first, first + index.size), index.shape
    return torch.from_numpy(index).to(device)


def _take(x: Tensor, span: Any) -> Tensor:
    """[row …] -> [sequence entry …]."""
    if isinstance(span, tuple):
        return x[span[0]].unflatten(0, span[1])
    return x.index_select(0, span.flatten()).unflatten(0, span.shape)
