"""Which tokens of which cells a layer has to compute, decided from the mask alone.

A token is live when its stream may differ from the base run's. A layer computes the tokens that are live or read a live
one, if anything later reads them; all others keep the base run's values, which are not computed again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from interp.model.config import ModelConfig
from interp.model.inputs import Inputs, attention_edges
from interp.sites import Site
from interp.sweep.cells import Rows


class Padded(NamedTuple):
    """Entries of each sequence, left-aligned to one width [sequence entry]: their number, their position, which are real."""

    index: np.ndarray
    position: np.ndarray
    real: np.ndarray


@dataclass(frozen=True)
class Bucket:
    """Sequences of about equal size, as many of every example, padded to one rectangle: `examples`, `each` of them.

    queries: which of the layer's rows each sequence has. new: which of the new keys, the fresh rows' and then the extra
    ones'.
    memory: which of the memory's rows.
    """

    examples: np.ndarray
    each: int
    queries: Padded
    new: Padded
    memory: Padded

    @property
    def example(self) -> np.ndarray:
        """The example of each sequence."""
        return np.repeat(self.examples, self.each)


@dataclass(frozen=True)
class Layout:
    """What one layer computes: `rows`, `extra` only keys and values, `late` from the middle of the block on; `memory`: source
    tokens whose cross-attention keys and values are not the base run's.

    fresh: the numbers of the rows whose queries, keys and values are computed. The others only read: their input is still the
    base run's, and so are their queries, keys and values.
    """

    rows: Rows
    fresh: np.ndarray
    extra: Rows
    late: Rows
    memory: Rows
    buckets: tuple[Bucket, ...]


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
        self.reads = edges.swapaxes(1, 2).astype(np.float32)  # [batch or 1, key, query]: products of it count edges
        self.needed = [last]
        for _ in range(n_layers):
            after = self.needed[0]
            self.needed.insert(0, after | (after[:, None].astype(np.float32) @ self.reads.swapaxes(1, 2) > 0)[:, 0])

    def readers(self, live: np.ndarray, example: np.ndarray) -> np.ndarray:
        """live [sequence key] -> which queries of the same sequence read one [sequence query]."""
        keys = live.astype(np.float32)
        if len(self.reads) == 1:
            return keys @ self.reads[0] > 0
        found = np.zeros((len(live), self.reads.shape[2]), dtype=bool)
        for one in np.unique(example):
            found[example == one] = keys[example == one] @ self.reads[one] > 0
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
    idle: bool = False,
) -> Layout:
    """The rows of one layer. live [sequence pos]; touched: by reach ("spread", "row", "late", "memory") [sequence pos].

    cell, example [sequence]: what each sequence is. memory [sequence source_pos]: source tokens that are not the base run's;
    readable [batch source_pos]: which of them cross-attention may read. idle: rows may go without queries, keys and values.
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
    fresh = rows & (spread | touched.get("row", nothing)) if idle else rows
    late = touched.get("late", nothing) & ~rows & after
    extra = spread & ~rows & before & rows.any(1, keepdims=True)
    memory = memory & rows.any(1, keepdims=True)
    size = _size(rows)
    order = np.lexsort((example, size))  # by size class, then by example; only sequences that compute anything
    order = order[rows[order].any(1)]
    tables = [_rows(mask[order], order, cell, example) for mask in (rows, extra, memory)]
    buckets = _buckets(rows[order], fresh[order], extra[order], memory[order], size[order], example[order])
    computed = np.flatnonzero(fresh[order][rows[order]])
    return Layout(tables[0], computed, tables[1], _rows(late, np.arange(len(late)), cell, example), tables[2], buckets)


def _rows(mask: np.ndarray, order: np.ndarray, cell: np.ndarray, example: np.ndarray) -> Rows:
    sequence, position = np.nonzero(mask)
    sequence = order[sequence]
    return Rows(sequence, cell[sequence], example[sequence], position)


def _size(rows: np.ndarray) -> np.ndarray:
    """The size class of each sequence: its number of rows to the next power of two; up to eight are one class, because so
    small a rectangle costs less than another one."""
    return np.maximum(np.ceil(np.log2(np.maximum(rows.sum(1), 1))), 3).astype(np.int64)


def _buckets(
    rows: np.ndarray, fresh: np.ndarray, extra: np.ndarray, memory: np.ndarray, size: np.ndarray, example: np.ndarray
) -> tuple[Bucket, ...]:
    """Rectangles of sequences in their order; one per size class where it holds equally many of every example."""
    if not len(rows):
        return ()
    keys = np.stack([size, example], 1)
    cuts = np.flatnonzero((keys[1:] != keys[:-1]).any(1)) + 1
    runs = list(zip([0, *cuts.tolist()], [*cuts.tolist(), len(rows)], strict=True))
    ends = [np.concatenate([[0], np.cumsum(mask.sum(1))]) for mask in (rows, fresh, extra, memory)]
    buckets = []
    while runs:
        first, stop = runs.pop(0)
        examples, each = [example[first]], stop - first
        while runs and keys[runs[0][0], 0] == keys[first, 0] and runs[0][1] - runs[0][0] == each:
            examples.append(example[runs[0][0]])
            stop = runs.pop(0)[1]
        part = slice(first, stop)
        queries = _padded(rows[part], ends[0][first])
        own = _padded(fresh[part], ends[1][first])
        others = _padded(extra[part], ends[1][-1] + ends[2][first])
        new = Padded(*(np.concatenate(pair, 1) for pair in zip(own, others, strict=True))) if others.real.size else own
        buckets.append(Bucket(np.array(examples), each, queries, new, _padded(memory[part], ends[3][first])))
    return tuple(buckets)


def _padded(mask: np.ndarray, start: int) -> Padded:
    """The set entries of each row of a mask, numbered on from `start`."""
    counts = mask.sum(1)
    width = int(counts.max(initial=0))
    if not width:
        return Padded(*(np.zeros((len(mask), 0), dtype=kind) for kind in (np.int64, np.int64, bool)))
    real = np.arange(width)[None] < counts[:, None]
    number, column = np.full(real.shape, start), np.zeros(real.shape, dtype=np.int64)
    number[real] = start + np.arange(int(counts.sum()))
    column[real] = np.nonzero(mask)[1]
    return Padded(number, column, real)


def edges_of(config: Any, inputs: Inputs) -> np.ndarray:
    """Who reads whom in self-attention, spelled out: bool [batch or 1, query, key]."""
    n = inputs.length
    edges = attention_edges(config, inputs).dense(n, n, inputs.tokens.device)
    return np.ones((1, n, n), dtype=bool) if edges is None else edges.reshape(-1, n, n).cpu().numpy()


def middle_of(config: ModelConfig) -> str:
    """The site at which a block's attention part ends."""
    if config.ffn == "none":
        return "resid_post"
    return "resid_cross" if config.kind == "encoder-decoder" else "resid_mid"
