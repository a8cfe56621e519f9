"""Attention over rows that share a base run: every query reads the base run's keys and its own cell's new ones.

The keys and values that a cell leaves as they were are read where they lie, once per example; nothing is copied per cell.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.model.attention import Attention, softmax_or_zero
from interp.model.tap import Tap
from interp.sweep.layout import Group


@dataclass(frozen=True)
class Reader:
    """Reads for one layer. base_keys, base_values [batch pos kv_head d_head]; closed [row key] bool: edges that the mask shuts.

    extra: keys and values of tokens that are no rows of this layer. cross: the new keys are the memory's.
    """

    base_keys: Tensor
    base_values: Tensor
    closed: Tensor | None
    groups: Sequence[Group]
    extra: tuple[Tensor, Tensor] | None = None
    cross: bool = False

    def __call__(self, attention: Attention, q: Tensor, k: Tensor, v: Tensor, tap: Tap) -> Tensor:
        """q [1 row head d_head], k and v [1 new_key kv_head d_head] -> z [1 row head d_head]."""
        q, k, v, s = q[0], k[0], v[0], attention.sites
        n, kv_heads = len(q), k.shape[1]
        scale = attention.config.attention_scale
        assert scale is not None  # the config resolves it
        q = (q * scale).unflatten(1, (kv_heads, -1))  # [row kv_head group d_head]
        length = self.base_keys.shape[1]
        scores = q.new_zeros(n, kv_heads, q.shape[2], length)
        for group in self.groups:
            self._score(group, q, k, scores)
        scores = scores.flatten(1, 2)  # [row head key]
        scores = tap(s.scores, self._shut(scores, float("-inf"))[None])[0]
        if tap.wants(s.scores):  # again: no change of scores may open an edge that the mask closes
            scores = self._shut(scores, float("-inf"))
        pattern = tap(s.pattern, softmax_or_zero(scores)[None])[0]
        if tap.wants(s.pattern):
            pattern = self._shut(pattern, 0.0)
        pattern = pattern.unflatten(1, (kv_heads, -1))
        z = torch.empty_like(q)
        for group in self.groups:
            self._mix(group, pattern, v, z)
        return z.flatten(1, 2)[None]

    def _shut(self, x: Tensor, value: float) -> Tensor:
        return x if self.closed is None else x.masked_fill(self.closed[:, None], value)

    def _own(self, group: Group, new: Tensor, which: int) -> list[tuple[Tensor, np.ndarray]]:
        """The group's new keys (which=0) or values (1), [sequence key kv_head d_head], with their positions."""
        if self.cross:
            found = [(new[group.memory_rows], group.memory)]
        else:
            found = [(new[group.rows], group.queries)]
            if self.extra is not None:
                found.append((self.extra[which][group.extra_rows], group.extra))
        return [(rows.unflatten(0, (group.count, -1)), positions) for rows, positions in found if len(positions)]

    def _score(self, group: Group, q: Tensor, k: Tensor, scores: Tensor) -> None:
        base = self._base(group)
        mine, out = q[group.rows], scores[group.rows]
        if base:
            keys = _of(self.base_keys, group.examples)[:, :base].permute(0, 2, 3, 1)
            _by_example(group, out)[..., :base] = _turn_back(_turn(_by_example(group, mine)) @ keys, mine.shape[2])
        for keys, positions in self._own(group, k, 0):
            found = _turn(_by_sequence(group, mine)) @ keys.permute(0, 2, 3, 1)
            _by_sequence(group, out)[..., _index(positions)] = _turn_back(found, mine.shape[2])

    def _mix(self, group: Group, pattern: Tensor, v: Tensor, z: Tensor) -> None:
        base, mine, out = self._base(group), pattern[group.rows], z[group.rows]
        total: Any = 0.0
        own = self._own(group, v, 1)
        if base:
            weights = mine[..., :base]
            inside = np.concatenate([positions[positions < base] for _, positions in own] or [np.zeros(0, int)])
            if len(inside):  # these tokens are new: their base values are not read
                weights = weights.clone()
                weights[..., _index(inside)] = 0
            values = _of(self.base_values, group.examples)[:, :base].transpose(1, 2)
            total = _turn_back(_turn(_by_example(group, weights)) @ values, mine.shape[2]).reshape(out.shape)
        for values, positions in own:
            found = _turn(_by_sequence(group, mine[..., _index(positions)])) @ values.transpose(1, 2)
            total = total + _turn_back(found, mine.shape[2]).reshape(out.shape)
        out.copy_(torch.as_tensor(total, dtype=out.dtype, device=out.device))

    def _base(self, group: Group) -> int:
        return self.base_keys.shape[1] if self.cross else group.base


def _of(base: Tensor, examples: np.ndarray) -> Tensor:
    """The base run's tensor of some examples; a view when they are all."""
    if len(examples) == len(base) and (examples == np.arange(len(base))).all():
        return base
    return base[torch.from_numpy(examples).to(base.device)]


def _index(positions: np.ndarray) -> Any:
    """Positions as a slice where they are a run, which saves a copy."""
    if len(positions) and positions[-1] - positions[0] == len(positions) - 1:
        return slice(int(positions[0]), int(positions[-1]) + 1)
    return positions


def _by_example(group: Group, x: Tensor) -> Tensor:
    return x.unflatten(0, (len(group.examples), -1))


def _by_sequence(group: Group, x: Tensor) -> Tensor:
    return x.unflatten(0, (group.count, -1))


def _turn(x: Tensor) -> Tensor:
    """[batch query kv_head group d] -> [batch kv_head group·query d], so that one product serves a key head's group."""
    return x.permute(0, 2, 3, 1, 4).flatten(2, 3)


def _turn_back(x: Tensor, per_key: int) -> Tensor:
    """The reverse of `_turn`."""
    return x.unflatten(2, (per_key, -1)).permute(0, 3, 1, 2, 4)
