"""Clean and corrupted runs seen as senders and receivers, and the metric with any set of edges patched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from interp.circuits.flow import Flow, Stage, check_mask, flow, stages_of
from interp.circuits.graph import CircuitError, Graph
from interp.hookable import require_head
from interp.metrics import Metric, evaluate
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.run import check_weights, prepare

Ablation = Literal["corrupted", "zero", "mean", "resample"]
Direction = Literal["noising", "denoising"]


@dataclass(frozen=True)
class Study:
    """Two runs of one model and what its edges are patched with.

    noising: the base is the clean run and a patched edge carries `ablation`; a circuit is what is left unpatched. denoising:
    the base is the corrupted run and a patched edge carries the clean run's value. ablation: the corrupted run's values
    ("corrupted"), zeros, the mean over the corrupted run's examples ("mean"), or another example's clean value ("resample", a
    derangement drawn from `seed`): published results turn on this choice, so every result names it."""

    model: Transformer
    graph: Graph
    inputs: Inputs
    metric: Metric | Callable[[Tensor], Tensor]
    stages: tuple[Stage, ...]
    base: Flow
    source: Tensor
    direction: Direction
    ablation: Ablation
    clean: Tensor
    corrupted: Tensor

    def run(self, mask: Tensor | None = None, **more: Any) -> Flow:
        """The base run with these edges patched: see `flow`."""
        return flow(self.base.senders[0][0], self.stages, mask, self.source, **more)

    def read(self, found: Flow) -> Tensor:
        """The metric of a run [batch]."""
        assert found.output is not None
        return evaluate(self.metric, self.model.unembed(found.output), self.inputs)

    @torch.no_grad()
    def value(self, mask: Tensor | None = None, **more: Any) -> Tensor:
        """The metric [batch] with these edges patched."""
        if mask is not None:
            check_mask(self.graph, mask, self.inputs.batch, self.inputs.length)
        return self.read(self.run(mask, **more))

    @property
    def unpatched(self) -> Tensor:
        """The metric of the base run [batch]."""
        return self.clean if self.direction == "noising" else self.corrupted

    @property
    def metric_name(self) -> str:
        """For tables and axes."""
        return str(getattr(self.metric, "name", getattr(self.metric, "__name__", "metric")))


@torch.no_grad()
def study(
    model: Any,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    direction: Direction = "noising",
    ablation: Ablation = "corrupted",
    seed: int = 0,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> Study:
    """The two runs, recorded. corrupted: None with ablation "zero" or "resample", which need no second prompt.

    Raises CircuitError, UnsupportedModelError.
    """
    graph = Graph.of(model)
    require_head(model)
    check_weights(model)
    for name, value, kind in (("direction", direction, Direction), ("ablation", ablation, Ablation)):
        if value not in get_args(kind):
            raise CircuitError(f"{name}={value!r} is not allowed; allowed: {', '.join(map(repr, get_args(kind)))}")
    if direction == "denoising" and ablation != "corrupted":
        raise CircuitError(f"ablation={ablation!r} is not allowed with direction='denoising', which patches the clean run in; "
                           "allowed: 'corrupted'")  # fmt: skip
    if corrupted is None and ablation in ("corrupted", "mean"):
        raise CircuitError(f"ablation={ablation!r} needs corrupted prompts; allowed without them: 'zero', 'resample'")
    clean = prepare(model, clean, tokenizer, prefix)
    other = clean if corrupted is None else _fitting(clean, prepare(model, corrupted, tokenizer, prefix))
    stages = tuple(stages_of(model, clean))
    flows = [flow(model.embed(inputs), stages) for inputs in (clean, other)]
    a, b = flows if direction == "noising" else flows[::-1]
    values = [evaluate(metric, model.unembed(found.output), clean) for found in flows]  # type: ignore[arg-type]
    source = _ablated(b.written, a.written, ablation, seed)
    return Study(model, graph, clean, metric, stages, a, source, direction, ablation, *values)


def _fitting(clean: Inputs, corrupted: Inputs) -> Inputs:
    if clean.tokens.shape != corrupted.tokens.shape:
        raise CircuitError(f"clean and corrupted prompts have shapes {tuple(clean.tokens.shape)} and "
                           f"{tuple(corrupted.tokens.shape)}; allowed: one shape")  # fmt: skip
    masks = [x.mask if x.mask is not None else torch.ones_like(x.tokens, dtype=torch.bool) for x in (clean, corrupted)]
    if not torch.equal(*masks):
        raise CircuitError("clean and corrupted prompts are padded differently; allowed: one mask for both")
    return corrupted


def _ablated(source: Tensor, base: Tensor, ablation: Ablation, seed: int) -> Tensor:
    if ablation == "zero":
        return torch.zeros_like(source)
    if ablation == "mean":
        return source.mean(1, keepdim=True).expand_as(source)
    if ablation == "corrupted":
        return source
    n = source.shape[1]
    if n < 2:
        raise CircuitError(
            "ablation='resample' with 1 example is not allowed; allowed: 2 or more, each takes another's value"
        )
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    taken = torch.empty(n, dtype=torch.long)
    taken[order] = order.roll(1)  # one cycle: nobody gets its own
    return base[:, taken.to(base.device)]


def edge_patch(
    model: Any,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    edges: Iterable[str] | Tensor,
    direction: Direction = "noising",
    ablation: Ablation = "corrupted",
    seed: int = 0,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> Tensor:
    """The metric [batch] when these edges and no others carry the other run's value, all in one forward.

    edges: names such as "a0.h1->a1.h0<k>", or a mask [receiver sender (batch pos)] of doses between 0 and 1. Senders are
    live: what an unpatched edge carries is what the patched run computes (path patching freezes it instead: `path_patch`).
    Raises CircuitError, UnsupportedModelError."""
    found = study(model, clean, corrupted, metric, direction, ablation, seed, tokenizer, prefix)
    return found.value(edges if isinstance(edges, Tensor) else found.graph.mask(edges))
