"""The arithmetic that a patching sweep cannot avoid: floating-point operations counted from its definition.

A multiplication and an addition are two operations. Matrix products and attention only: norms, activations and softmax
are left out, so the true minimum is a little higher.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Of a causal decoder and of a sweep: prompts of `length` tokens whose corrupted ones differ at the positions `changed`."""

    n_layers: int
    d_model: int
    n_heads: int
    d_head: int
    n_kv_heads: int
    d_ff: int
    gated: bool
    prompts: int
    length: int
    changed: tuple[int, ...]

    @property
    def first(self) -> int:
        """Clean and corrupted runs are the same before."""
        return min(self.changed)

    @property
    def q(self) -> int:
        """Of one token: its query. Also of W_O."""
        return 2 * self.d_model * self.n_heads * self.d_head

    @property
    def kv(self) -> int:
        """Of one token: its key and its value."""
        return 4 * self.d_model * self.n_kv_heads * self.d_head

    @property
    def after(self) -> int:
        """Of one token: W_O and the feed-forward layer."""
        return self.q + self.ffn

    @property
    def ffn(self) -> int:
        """Of one token: two matrices, three if gated."""
        return 2 * self.d_model * self.d_ff * (3 if self.gated else 2)

    def attention(self, positions: range) -> int:
        """Scores and weighted sums of the queries at `positions`, each over the keys it sees."""
        return sum(4 * self.n_heads * self.d_head * (position + 1) for position in positions)


def shape_of(config: Any, prompts: int, length: int, changed: tuple[int, ...]) -> Shape:
    """From a ModelConfig."""
    return Shape(n_layers=config.n_layers, d_model=config.d_model, n_heads=config.n_heads, d_head=config.d_head,
                 n_kv_heads=config.n_kv_heads, d_ff=config.d_ff, gated=config.ffn in ("swiglu", "geglu", "reglu", "bilinear"),
                 prompts=prompts, length=length, changed=changed)  # fmt: skip


def runs(s: Shape) -> int:
    """The clean and the corrupted run: every token through every block, two entries unembedded at the last position.

    Not deducted: that both agree before `first`, and that their last block is read at its last position only.
    """
    block = s.length * (s.q + s.kv + s.after) + s.attention(range(s.length))
    return 2 * s.prompts * (s.n_layers * block + unembedding(s))


def unembedding(s: Shape) -> int:
    """Two entries at one position."""
    return 2 * 2 * s.d_model


def stream_cell(s: Shape, layer: int, position: int) -> int:
    """One prompt, resid_pre changed at one layer and position; layer = n_layers: what enters the unembedding.

    Positions before are those of the base run. In the entry block the positions after have the base's q, k and v; in the
    last block only the last position is read.
    """
    last, after = s.length - 1, range(position, s.length)
    if layer == s.n_layers:
        return unembedding(s) if position == last else 0
    total = unembedding(s)
    for block in range(layer, s.n_layers):
        new = range(position, position + 1) if block == layer else after  # positions whose input changed
        read = after if block < s.n_layers - 1 else range(last, s.length)
        total += len(new) * s.kv + len([p for p in read if p in new]) * s.q
        total += s.attention(read) + len(read) * s.after
    return total


def head_cell(s: Shape, layer: int, position: int) -> int:
    """One prompt, z of one head changed at one layer and position: one head's part of W_O, the feed-forward layer at
    that position, and the stream's change from the next layer on."""
    further = stream_cell(s, layer + 1, position)
    return 2 * s.d_head * s.d_model + s.ffn + further if further else 0


def cells(s: Shape, site: str) -> int:
    """Every cell of a layer × position sweep of "resid_pre" or a layer × head × position sweep of "z", all prompts.

    Cells whose two values are equal cost nothing (all before `first`; in layer 0's resid_pre all but `changed`), nor do those
    that the metric cannot see.
    """
    places = [(layer, position) for layer in range(s.n_layers) for position in range(s.first, s.length)]
    if site == "z":
        return s.prompts * s.n_heads * sum(head_cell(s, *place) for place in places)
    return s.prompts * sum(stream_cell(s, *place) for place in places if place[0] > 0 or place[1] in s.changed)


def counted(s: Shape, work: Mapping[str, int]) -> int:
    """What an engine's own counters of its cells come to, attention left out."""
    per_token = {"token_layers": s.q + s.kv + s.after, "key_value_token_layers": s.kv, "ffn_token_layers": s.ffn}
    return sum(work.get(name, 0) * operations for name, operations in per_token.items())


def floor(s: Shape, site: str) -> int:
    """Both runs and every cell."""
    return runs(s) + cells(s, site)
