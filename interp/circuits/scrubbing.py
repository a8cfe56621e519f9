"""Causal scrubbing (Chan et al. 2022): if a node depends only on what a hypothesis says, another input that agrees there will do.

A hypothesis maps senders to features of the input. Every receiver gets each sender's output from another example that agrees
with its own on that sender's feature; that output was itself made of scrubbed inputs. If the behaviour survives, the
hypothesis accounts for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.circuits.flow import Stage, stages_of
from interp.circuits.graph import CircuitError, Graph
from interp.hookable import require_head
from interp.metrics import Metric, evaluate
from interp.model.inputs import Inputs
from interp.run import check_weights, prepare

Feature = Tensor | Sequence[int] | Callable[[Inputs], Tensor] | str | None


@torch.no_grad()
def causal_scrub(
    model: Any,
    inputs: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    hypothesis: Mapping[str, Feature],
    samples: int = 10,
    seed: int = 0,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The metric when every sender's output comes, receiver by receiver, from an example that agrees on the sender's feature.

    hypothesis: sender ("input", "a0.h1", "m1") -> what it may depend on: a label per example [batch], a function of the
    inputs that gives them, "all" (its own input, nothing resampled), or None (nothing). Senders that are not named may depend
    on nothing. An output is made once per example and sample, and shared by all whom it is given to. Columns: sample,
    example, value, clean (the model's own), random (every sender from any example). `scrubbing_loss` sums it up. Raises
    CircuitError, UnsupportedModelError."""
    graph = Graph.of(model)
    require_head(model)
    check_weights(model)
    inputs = prepare(model, inputs, tokenizer, prefix)
    if inputs.batch < 2:
        raise CircuitError("1 example is not allowed; allowed: 2 or more, to take outputs from")
    if inputs.mask is not None and not bool((inputs.mask == inputs.mask[:1]).all()):
        raise CircuitError(
            "examples of different length are not allowed; allowed: one length, or each takes what another has not"
        )
    labels = _labels(graph, hypothesis, inputs)
    stages, start = stages_of(model, inputs), model.embed(inputs)
    generator, rows = torch.Generator().manual_seed(seed), []
    value = lambda classes: evaluate(metric, model.unembed(_scrubbed(start, stages, graph, classes, generator)), inputs)  # noqa: E731
    everything = ["all"] * len(graph.senders)
    clean = value(everything)
    for sample in range(samples):
        columns = {"value": value(labels), "clean": clean, "random": value([None] * len(labels))}
        rows.append(
            pd.DataFrame(
                {"sample": sample, "example": range(inputs.batch), **{k: v.tolist() for k, v in columns.items()}}
            )
        )
    return pd.concat(rows, ignore_index=True)


def scrubbing_loss(table: pd.DataFrame) -> float:
    """The share of the behaviour that is lost: (clean − value)/(clean − random), a ratio of means; 0 = the hypothesis
    accounts for it."""
    means = table[["value", "clean", "random"]].mean()
    span = float(means["clean"] - means["random"])
    if abs(span) < 1e-12:
        raise CircuitError(f"the clean and the fully resampled model have the same mean metric, {float(means['clean']):.4g}: a "
                           "loss has no unit")  # fmt: skip
    return float(means["clean"] - means["value"]) / span


def _labels(graph: Graph, hypothesis: Mapping[str, Feature], inputs: Inputs) -> list[Any]:
    """Per sender its classes [batch], "all" or None."""
    for name in hypothesis:
        if name not in graph.senders:
            raise CircuitError(f"sender {name!r} is not one of this model's; allowed: {', '.join(graph.senders)}")
    found: list[Any] = []
    for name in graph.senders:
        feature = hypothesis.get(name)
        if callable(feature):
            feature = feature(inputs)
        if isinstance(feature, str) and feature != "all":
            raise CircuitError(
                f"{name} may depend on {feature!r} is not allowed; allowed: labels [batch], a function, 'all', None"
            )
        if feature is not None and not isinstance(feature, str):
            feature = torch.as_tensor(feature).cpu()
            if feature.shape != (inputs.batch,):
                raise CircuitError(
                    f"{name}'s labels have shape {tuple(feature.shape)}; allowed: [batch] = ({inputs.batch},)"
                )
        found.append(feature)
    return found


def _scrubbed(start: Tensor, stages: Sequence[Stage], graph: Graph, labels: Sequence[Any], generator) -> Tensor:
    """What the head reads [batch pos d_model] when every receiver draws its own examples."""
    written, biases = start[None], torch.zeros_like(start[0, 0])
    for stage in stages:
        n = len(written)
        given = torch.stack([
            torch.stack([written[s, _draw(labels[s], start.shape[0], generator)] for s in range(n)]).sum(0) + biases
            for _ in range(stage.receivers.start, stage.receivers.stop)
        ])  # fmt: skip
        if stage is stages[-1]:
            return given[0]
        written = torch.cat([written, stage.run(given)])
        biases = biases if stage.bias is None else biases + stage.bias
    raise AssertionError("the last stage is the head's read")


def _draw(labels: Any, n: int, generator: torch.Generator) -> Tensor:
    """For each example one that agrees with it, itself included: a random order within every class."""
    if isinstance(labels, str):
        return torch.arange(n)
    order = torch.randperm(n, generator=generator)
    if labels is None:
        return order
    taken = torch.empty(n, dtype=torch.long)
    taken[labels.argsort(stable=True)] = order[labels[order].argsort(stable=True)]
    return taken
