"""Which tokens of which cells a layer has to compute, decided from the mask alone.

A token is live when its stream may differ from the base run's. A layer computes the tokens that are live or read a live
one, if anything later reads them; all others keep the base run's values, which are not computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from interp.model.config import ModelConfig
from interp.sites import Site
from interp.sweep.cells import Rows


@dataclass(frozen=True)
class Group:
    """Sequences that compute the same positions, `each` for every one of `examples`: one rectangle of a layer's rows.

    queries, extra, memory: the positions computed, those of which only keys and values are, and of the source; rows, extra_rows,
    memory_rows: where they lie. base: how many of the base run's first keys any query reads.
    """

    examples: np.ndarray
    each: int
    queries: np.ndarray
    extra: np.ndarray
    memory: np.ndarray
    rows: slice
    extra_rows: slice
    memory_rows: slice
    base: int

    @property
    def count(self) -> int:
        """How many sequences."""
        return len(self.examples) * self.each


@dataclass(frozen=True)
class Layout:
    """What one layer computes: `rows` in full, `extra` only keys and values, `late` from the middle of the block on;
    `memory`: source tokens whose cross-attention keys and values are not the base run's."""

    rows: Rows
    extra: Rows
    late: Rows
    memory: Rows
    groups: tuple[Group, ...]


def parts(sites: tuple[Site, ...], layer: int, stack: str | None, middle: str) -> dict[Site, str]:
    """How far a change of each of a block's sites reaches within the block.

    "spread": to every token that reads this one; "memory": to every target token; "row": to its own token; "late": the
    same, and attention need not be computed.
    """
    mine = [site for site in sites if (site.layer, site.stack) == (layer, stack)]
    names = [site.name for site in mine]
    reach = {}
    for i, site in enumerate(mine):
        if site.name in ("cross_k", "cross_v"):
            reach[site] = "memory"
        elif i < names.index("scores") and site.name not in ("q", "q_rot"):
            reach[site] = "spread"
        else:
            reach[site] = "late" if i >= names.index(middle) and middle != "resid_post" else "row"
    return reach


class Reach:
    """The mask of one stack: who reads whom, and what is needed before each layer.

    edges [batch or 1, query, key] bool. needed [layer + 1][batch pos]: the tokens whose stream before that layer can reach
    what is read at the end, `last`.
    """

    def __init__(self, edges: np.ndarray, n_layers: int, last: np.ndarray) -> None:
        self.edges = edges
        self.needed = [last]
        for _ in range(n_layers):
            after = self.needed[0]
            self.needed.insert(0, after | self._any(edges.swapaxes(1, 2), after[:, None])[:, 0])

    @staticmethod
    def _any(edges: np.ndarray, live: np.ndarray) -> np.ndarray:
        """Which queries read a live key: edges [batch or 1, q, k], live [batch … k] -> [batch … q]."""
        return np.matmul(live.astype(np.float32), edges.swapaxes(-1, -2).astype(np.float32)) > 0

    def readers(self, live: np.ndarray, example: np.ndarray) -> np.ndarray:
        """live [sequence key] -> which queries of the same sequence read one [sequence query]."""
        if len(self.edges) == 1:
            return self._any(self.edges[0], live)
        found = np.zeros((len(live), self.edges.shape[1]), dtype=bool)
        for one in np.unique(example):
            found[example == one] = self._any(self.edges[one], live[example == one])
        return found


def lay_out(
    reach: Reach,
    layer: int,
    live: np.ndarray,
    touched: Mapping[str, np.ndarray],
    cell: np.ndarray,
    example: np.ndarray,
    memory: np.ndarray | None = None,
    readable: np.ndarray | None = None,
) -> Layout:
    """The rows of one layer. live [sequence pos]; touched: by reach ("spread", "row", "late", "memory") [sequence pos].

    cell, example [sequence]: what each sequence is. memory [sequence source_pos]: source tokens that are not the base run's;
    readable [batch source_pos]: which of them cross-attention may read.
    """
    nothing = np.zeros_like(live)
    before, after = reach.needed[layer][example], reach.needed[layer + 1][example]
    spread = live | touched.get("spread", nothing)
    rows = spread | touched.get("row", nothing) | reach.readers(spread, example)
    if memory is None or readable is None:
        memory = np.zeros((len(live), 0), dtype=bool)
    else:
        memory = (memory | touched["memory"] if "memory" in touched else memory) & readable[example]
        rows = rows | memory.any(1, keepdims=True)
    rows &= after
    late = touched.get("late", nothing) & ~rows & after
    extra = spread & ~rows & before & rows.any(1, keepdims=True)
    memory = memory & rows.any(1, keepdims=True)
    order, groups = _groups(reach, rows, extra, memory, example)
    tables = [_rows(mask[order], order, cell, example) for mask in (rows, extra, memory)]
    return Layout(tables[0], tables[1], _rows(late, np.arange(len(late)), cell, example), tables[2], groups)


def _rows(mask: np.ndarray, order: np.ndarray, cell: np.ndarray, example: np.ndarray) -> Rows:
    sequence, position = np.nonzero(mask)
    sequence = order[sequence]
    return Rows(sequence, cell[sequence], example[sequence], position)


def _groups(
    reach: Reach, rows: np.ndarray, extra: np.ndarray, memory: np.ndarray, example: np.ndarray
) -> tuple[np.ndarray, tuple[Group, ...]]:
    """Sequences sorted so that equal patterns stand together, by example within, and the rectangles that they form."""
    packed = np.packbits(np.concatenate([rows, extra, memory], 1), axis=1)
    keys = np.ascontiguousarray(packed).view(np.dtype((np.void, packed.shape[1])))[:, 0]
    _, pattern = np.unique(keys, return_inverse=True)
    order = np.lexsort((np.arange(len(rows)), example, pattern))
    order = order[rows[order].any(1)]
    groups, start = [], np.zeros(3, dtype=np.int64)
    pair = np.stack([pattern[order], example[order]], 1)
    cuts = np.flatnonzero((pair[1:] != pair[:-1]).any(1)) + 1
    runs = list(zip([0, *cuts], [*cuts, len(order)], strict=True)) if len(order) else []
    while runs:
        first, stop = runs.pop(0)
        members = [(first, stop)]
        while runs and pair[runs[0][0], 0] == pair[first, 0] and runs[0][1] - runs[0][0] == stop - first:
            members.append(runs.pop(0))
        one, count = order[first], (stop - first) * len(members)
        queries, keys, source = (np.flatnonzero(mask[one]) for mask in (rows, extra, memory))
        ends = start + count * np.array([len(queries), len(keys), len(source)])
        examples = np.array([example[order[member[0]]] for member in members])
        seen = reach.edges[examples if len(reach.edges) > 1 else [0]][:, queries].any((0, 1))
        base = max(set(np.flatnonzero(seen).tolist()) - set(queries) - set(keys), default=-1) + 1
        mine, others, read = (slice(int(a), int(b)) for a, b in zip(start, ends, strict=True))
        groups.append(Group(examples, int(stop - first), queries, keys, source, mine, others, read, base))
        start = ends
    return order, tuple(groups)


def middle_of(config: ModelConfig) -> str:
    """The site at which a block's attention part ends."""
    if config.ffn == "none":
        return "resid_post"
    return "resid_cross" if config.kind == "encoder-decoder" else "resid_mid"
