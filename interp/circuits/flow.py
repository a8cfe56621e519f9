"""One forward in which any set of edges is patched.

Every receiver reads  live stream + Σ over its patched edges (source's sender output − live sender output): AutoCircuit's
reading (Miller et al. 2024), in which what flows through an edge that is not patched is what the partly patched run computes. A
mask between 0 and 1 is a dose, so its gradient is an attribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interp.circuits.graph import CircuitError, Graph
from interp.model.attention import Attention
from interp.model.inputs import Edges, Inputs, attention_edges, position_ids
from interp.model.positions import rotary_table
from interp.model.tap import NO_TAP
from interp.model.transformer import Transformer


@dataclass(frozen=True)
class Stage:
    """Receivers that read one stream, and the senders that they make: `run` takes [receiver batch pos d_model], or [1 …] where
    all read the same, and gives [sender batch pos d_model]. bias: what else is written [d_model], by no sender."""

    receivers: slice
    run: Callable[[Tensor], Tensor]
    bias: Tensor | None = None


@dataclass
class Flow:
    """A run seen as senders: what each wrote [sender batch pos d_model]; the stream before each stage; what the head reads."""

    senders: list[Tensor] = field(default_factory=list)  # one entry per stage and one for the input
    streams: list[Tensor] = field(default_factory=list)
    output: Tensor | None = None

    @property
    def written(self) -> Tensor:
        """All senders' outputs [sender batch pos d_model]."""
        return torch.cat(self.senders)


def flow(
    start: Tensor,
    stages: Sequence[Stage],
    mask: Tensor | None = None,
    source: Tensor | None = None,
    probe: Tensor | None = None,
    resume: tuple[int, Flow] | None = None,
) -> Flow:
    """Run the stages from `start` [batch pos d_model], the last of which is the head's read: it has a receiver and no sender.

    mask: the dose of every edge, [receiver sender], or with axes for batch and position behind (1 where all are the same).
    source: [sender batch pos d_model]. probe: added to what each receiver reads [receiver batch pos d_model]; its gradient is the
    metric's with respect to that input. resume: (stage, an earlier flow): no receiver before that stage has a patched edge.
    """
    first, done = (0, Flow([start[None]], [])) if resume is None else resume
    found = Flow(done.senders[: first + 1], done.streams[:first])
    changes = None if mask is None or source is None else _Changes(source, found.senders)
    stream = start if resume is None else done.streams[first]
    for stage in stages[first:]:
        found.streams.append(stream)
        given = stream[None]
        if mask is not None and changes is not None:
            given = given + _dosed(mask[stage.receivers], changes)
        if probe is not None:
            given = given + probe[stage.receivers]
        if stage is stages[-1]:
            found.output = given[0]
            break
        out = stage.run(given)
        found.senders.append(out)
        if changes is not None:
            changes.add(out)
        stream = stream + out.sum(0) if stage.bias is None else stream + out.sum(0) + stage.bias
    return found


class _Changes:
    """source − live of the senders so far, in one tensor that grows in place unless gradients pass through it."""

    def __init__(self, source: Tensor, senders: Sequence[Tensor]) -> None:
        self.source, self.n, self.parts = source, 0, list[Tensor]()
        self.whole = None if torch.is_grad_enabled() else torch.empty_like(source)
        for out in senders:
            self.add(out)

    def add(self, out: Tensor) -> None:
        here = slice(self.n, self.n + len(out))
        if self.whole is None:
            self.parts.append(self.source[here] - out)
        else:
            torch.sub(self.source[here], out, out=self.whole[here])
        self.n = here.stop

    def so_far(self) -> Tensor:
        """[sender batch pos d_model]."""
        return torch.cat(self.parts) if self.whole is None else self.whole[: self.n]


def _dosed(mask: Tensor, changes: _Changes) -> Tensor:
    """Σ over senders of dose · (source − live): [receiver batch pos d_model], or 0 [1 1 1 1] where no edge has a dose."""
    if not mask.requires_grad and not bool(mask.any()):
        return changes.source.new_zeros(1, 1, 1, 1)
    change = changes.so_far()
    mask = mask[:, : len(change)].to(change.dtype)
    if mask.ndim == 2:
        return torch.tensordot(mask, change, 1)
    return torch.einsum("rsbp,sbpd->rbpd", mask.expand(-1, -1, *change.shape[1:3]), change)


def stages_of(model: Transformer, inputs: Inputs) -> list[Stage]:
    """A model's stages for some inputs, in order: attention, FFN, …, the head's read."""
    graph, config = Graph.of(model), model.config
    edges = attention_edges(config, inputs)
    dtype = model.W_E.dtype
    rotary = rotary_table(config, position_ids(inputs), dtype) if config.positions == "rotary" else None
    stages, at = [], 0
    blocks: Any = model.blocks
    for block in blocks:
        n = sum(n for _, n in graph.parts)
        heads = _heads(block, graph, edges, rotary)
        stages.append(Stage(slice(at, at + n), heads, block.attention.b_O))
        at += n
        if graph.feeds:
            stages.append(Stage(slice(at, at + 1), _feed(block)))
            at += 1
    return [*stages, Stage(slice(at, at + 1), lambda x: x)]


def _heads(block, graph: Graph, edges: Edges, rotary) -> Callable[[Tensor], Tensor]:
    attention: Attention = block.attention
    ends = (graph.n_heads, graph.n_heads + graph.kv_heads)

    def run(given: Tensor) -> Tensor:
        t1 = block.norm1(given, NO_TAP)
        parts = [t1] * 3 if len(t1) == 1 else t1.tensor_split(ends)
        weights = (attention.W_Q, attention.W_K, attention.W_V)
        biases = (attention.b_Q, attention.b_K, attention.b_V)
        q, k, v = (_projected(*part) for part in zip(parts, weights, biases, strict=True))
        if attention.config.rotates:
            q = attention._into_scores(q, attention.q_norm, rotary)
            k = attention._into_scores(k, attention.k_norm, rotary)
        z = attention._fused(q, k, v, edges)
        return torch.einsum("bphe,hed->hbpd", z, attention.W_O)

    return run


def _projected(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each head's own x [head or 1, batch pos d_model] by its matrix [head d_model d_head] -> [batch pos head d_head]."""
    y = torch.einsum("bpd,hde->bphe", x[0], weight) if len(x) == 1 else torch.einsum("hbpd,hde->bphe", x, weight)
    return y if bias is None else y + bias


def _feed(block) -> Callable[[Tensor], Tensor]:
    return lambda given: block.ffn(block.norm2(given, NO_TAP), NO_TAP)


def check_mask(graph: Graph, mask: Tensor, batch: int, length: int) -> Tensor:
    """The mask, if it fits: [receiver sender] or [receiver sender batch pos] (1 where all are the same). CircuitError."""
    shape = tuple(graph.admitted.shape)
    fits = mask.ndim == 2 or (mask.ndim == 4 and mask.shape[2] in (1, batch) and mask.shape[3] in (1, length))
    if tuple(mask.shape[:2]) != shape or not fits:
        raise CircuitError(f"a mask of shape {tuple(mask.shape)} is not allowed; allowed: [receiver sender] = {shape}, or with "
                           f"[batch pos] = ({batch}, {length}) behind")  # fmt: skip
    outside = (mask != 0).flatten(2).any(-1) if mask.ndim == 4 else mask != 0
    if bool((outside & ~graph.admitted.to(mask.device)).any()):
        r, s = (outside & ~graph.admitted.to(mask.device)).nonzero()[0].tolist()
        raise CircuitError(f"the mask has {graph.senders[s]}->{graph.receivers[r]}, which is no edge: the sender runs later; "
                           "allowed: graph.admitted")  # fmt: skip
    return mask
