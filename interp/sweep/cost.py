"""What a sweep costs: rows, bytes and floating-point operations, counted from its layout."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from interp.model.inputs import Inputs
from interp.sites import Site
from interp.sweep.layout import edges_of
from interp.sweep.reading import Reading


@dataclass(frozen=True)
class Cost:
    """Sizes of one model, inputs and metric.

    closure [batch or 1, pos, pos] bool: which positions a change at one can ever reach; None for full forwards, where a cell
    takes every row. bytes_per_row: peak bytes per row of a chunk.
    """

    config: Any
    batch: int
    length: int
    bytes_per_row: float
    most_rows: int
    enough_rows: float
    closure: np.ndarray | None

    @staticmethod
    def of(model: Any, inputs: Inputs, reading: Reading, sites: Sequence[Site], walks: bool) -> Cost:
        """The sizes; walks: the fast engine, which only takes the rows that a change reaches."""
        config = model.config
        length = inputs.length + (0 if inputs.source is None else inputs.encoder.length)
        most = inputs.batch * length
        closure = None
        if walks and inputs.source is None:
            closure = _closure(edges_of(config, inputs))
        parameter = next(iter(getattr(model, "parameters", list)()), torch.zeros(()))
        width = parameter.element_size()
        numbers = _numbers_per_row(config, length, {site.name for site in sites})
        read = (config.vocab if reading.entries is None else reading.entries.shape[1]) * reading.positions.shape[1]
        numbers += read / inputs.length if walks else config.vocab * 2
        enough = 1 << 17 if inputs.tokens.device.type == "cuda" else 1024
        return Cost(config, inputs.batch, length, numbers * width, most, enough, closure)

    def rows(self, touched: Mapping[Site, np.ndarray], cells: int) -> np.ndarray:
        """An upper bound of the rows of each cell in any layer [cell]."""
        full = self.batch * self.length
        if self.closure is None:
            return np.full(cells, full)
        first = np.zeros((cells, self.batch, self.length), dtype=bool)
        for mask in touched.values():
            first |= mask
        # [cell batch pos] of what is touched, times [batch or 1, pos, pos] of what each reaches.
        reached = np.einsum("cbp,bpq->cbq" if len(self.closure) > 1 else "cbp,xpq->cbq",
                            first.astype(np.float32), self.closure.astype(np.float32)) > 0  # fmt: skip
        return np.maximum(reached.sum((1, 2)), 1)

    def flops(self, executor: Any, cells: np.ndarray, touched: Mapping[Site, np.ndarray]) -> float:
        """Floating-point operations of some cells, from the layout that the executor would use."""
        if self.closure is None:
            return (
                len(cells)
                * self.batch
                * self.length
                * (self.per_token("full") * _layers(self.config) + self.unembedding)
            )
        work = executor.count(cells, touched)
        parts = {"token": "full", "key_value_token": "keys", "ffn_token": "ffn"}
        total = sum(work[f"{name}_layers"] * self.per_token(part) for name, part in parts.items())
        return total - work["reading_token_layers"] * self.per_token("qkv")

    @property
    def unembedding(self) -> float:
        """Operations of one token's whole unembedding."""
        return 2.0 * self.config.d_model * self.config.vocab

    def per_token(self, part: str) -> float:
        """Multiplications and additions of one token in one block: "full", only its "qkv", "keys" or "ffn"."""
        c = self.config
        d, head = c.d_model, getattr(c, "head_size", c.d_model // max(c.n_heads, 1))
        kv = getattr(c, "kv_heads", c.n_heads) * head
        ffn = 2.0 * d * getattr(c, "ffn_size", 4 * d) * (3 if getattr(c, "gated", False) else 2)
        attention = 2.0 * d * (2 * c.n_heads * head + 2 * kv) + 4.0 * c.n_heads * head * self.length
        return {
            "full": attention + ffn,
            "qkv": 2.0 * d * (c.n_heads * head + 2 * kv),
            "keys": 4.0 * d * kv,
            "ffn": ffn,
        }[part]


def _layers(config: Any) -> int:
    return config.n_layers + (getattr(config, "n_encoder_layers", None) or 0)


def _closure(edges: np.ndarray) -> np.ndarray:
    """From who reads whom [batch, query, key] to what a change at a position can reach [batch, position, reached]."""
    reach = edges.swapaxes(1, 2) | np.eye(edges.shape[1], dtype=bool)
    for _ in range(max(1, int(np.ceil(np.log2(edges.shape[1]))))):
        reach = np.matmul(reach.astype(np.float32), reach.astype(np.float32)) > 0
    return reach


def reached(config: Any, inputs: Inputs, changed: Any) -> np.ndarray:
    """Which tokens a change of some can reach in any layer, themselves included: bool [batch pos] of bool [batch pos]."""
    closure = _closure(edges_of(config, inputs))
    return (changed.cpu().numpy()[:, None].astype(np.float32) @ closure.astype(np.float32))[:, 0] > 0


def _numbers_per_row(config: Any, length: int, names: set[str]) -> float:
    """How many numbers a block holds at its peak for one row: stream, projections, scores, FFN."""
    d, heads = config.d_model, config.n_heads
    numbers = 10.0 * d + 3.0 * getattr(config, "ffn_size", 4 * d) * (2 if getattr(config, "gated", False) else 1)
    numbers += 4.0 * heads * length
    if names & {"head_out", "cross_head_out"}:
        numbers += 3.0 * heads * d
    return numbers


def matmul_rate(model: Any) -> float:
    """Floating-point operations per second of a matrix product of the model's size and type on its device."""
    parameter = next(iter(getattr(model, "parameters", list)()), torch.zeros(()))
    d = model.config.d_model
    a = torch.ones(512, d, dtype=parameter.dtype, device=parameter.device)
    w = torch.ones(d, 4 * d, dtype=parameter.dtype, device=parameter.device)
    times = []
    for _ in range(4):
        start = time.perf_counter()
        _ = float((a @ w)[0, 0])  # reading a number waits for the device
        times.append(time.perf_counter() - start)
    return 2.0 * 512 * d * 4 * d / min(times[1:])
