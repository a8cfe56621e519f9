"""Edge attribution: the effect of patching every edge, to first order, by integrated gradients, or exactly.

EAP (Syed et al. 2023): gradient at the receiver · (source − base) of the sender, which is the gradient of the metric with
respect to the edge's dose at 0. EAP-IG (Hanna et al. 2024): that gradient averaged over inputs between the two prompts'
embeddings. "dose": averaged over doses of all edges together from 0 to 1. "exact": every edge patched alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from interp.circuits.flow import flow
from interp.circuits.graph import CircuitError, Graph
from interp.circuits.patching import Ablation, Direction, Study, study
from interp.metrics import Metric

Method = Literal["eap", "eap-ig", "dose", "exact"]


@dataclass(frozen=True)
class EdgeScores:
    """What patching each edge does to the metric: scores [receiver sender example], in the metric's unit.

    base, patched: the metric without and with every edge patched [example]. completeness: how far the scores that must add up
    to patched − base are from it, relative to it (means of sizes over examples): those of the edges out of "input" for "eap" and
    "eap-ig", all for "dose", nan for "exact", whose effects need not add up. Above 0.1 scores are a ranking only."""

    graph: Graph
    scores: Tensor
    base: Tensor
    patched: Tensor
    method: Method
    direction: Direction
    ablation: Ablation
    metric: str
    completeness: float
    seconds: float

    def __repr__(self) -> str:
        edges, n = self.scores.isfinite().all(-1)[self.graph.admitted].sum(), self.scores.shape[-1]
        return (f"EdgeScores({self.method} of {self.metric}, {self.direction}, {self.ablation}: {int(edges)} edges, "
                f"{n} examples, completeness error {self.completeness:.3g})")  # fmt: skip

    @property
    def mean(self) -> Tensor:
        """[receiver sender], the mean over examples."""
        return self.scores.mean(-1)

    @property
    def ranking_only(self) -> bool:
        """Whether the scores miss the sum that they should have by more than a tenth."""
        return self.completeness > 0.1

    def table(self) -> pd.DataFrame:
        """One row per edge × example: edge, sender, receiver, example, score, and method, direction, ablation, metric."""
        parts = [self.graph.table(score=scores).assign(example=i) for i, scores in enumerate(self.scores.unbind(-1))]
        about = {"method": self.method, "direction": self.direction, "ablation": self.ablation, "metric": self.metric,
                 "completeness_error": self.completeness}  # fmt: skip
        return pd.concat(parts, ignore_index=True).assign(**about)

    def top(self, n: int, by: Literal["absolute", "score"] = "absolute") -> Tensor:
        """The n edges [receiver sender] with the largest mean effect (of either sign, or downwards: noising an edge that
        helps)."""
        count = int(self.graph.admitted.sum())
        if not 1 <= n <= count:
            raise CircuitError(f"n={n} edges is not allowed; allowed: 1 … {count}")
        mean = self.mean if self.direction == "denoising" else -self.mean
        worth = mean.abs() if by == "absolute" else mean
        worth = worth.masked_fill(~self.graph.admitted.to(worth.device), float("-inf"))
        chosen = torch.zeros_like(self.graph.admitted).flatten()
        chosen[worth.flatten().topk(n).indices.cpu()] = True
        return chosen.view(self.graph.admitted.shape)


def edge_attribution(
    model: Any,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    method: Method = "eap-ig",
    steps: int = 5,
    direction: Direction = "noising",
    ablation: Ablation = "corrupted",
    edges: Tensor | None = None,
    seed: int = 0,
    progress: bool = False,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> EdgeScores:
    """What patching each edge does to the metric, for all edges at once ("exact": one run from the receiver on for each).

    steps: points of the average, at the middles of equal parts; ignored by "eap" and "exact". edges: for "exact", which to
    patch [receiver sender] (None: all); the others' scores are nan. One forward and one backward per step. The live reading
    of edges, as in `edge_patch`: for a single edge it is also path patching's. Raises CircuitError, UnsupportedModelError.
    """
    if method not in get_args(Method):
        raise CircuitError(f"method={method!r} is not allowed; allowed: {', '.join(map(repr, get_args(Method)))}")
    if not isinstance(steps, int) or steps < 1:
        raise CircuitError(f"steps={steps!r} is not allowed; allowed: 1 or more")
    if method == "eap-ig" and ablation != "corrupted":
        raise CircuitError(f"ablation={ablation!r} is not allowed with method='eap-ig', which walks between two prompts; "
                           "allowed: 'corrupted', or method='eap', 'dose' or 'exact'")  # fmt: skip
    began = time.perf_counter()
    found = study(model, clean, corrupted, metric, direction, ablation, seed, tokenizer, prefix)
    admitted = found.graph.admitted.to(found.source.device)
    ends = found.unpatched, found.value(admitted)
    if method == "exact":
        scores = _exact(found, found.graph.admitted if edges is None else edges, progress)
    else:
        shares = [0.0] if method == "eap" else [(step + 0.5) / steps for step in range(steps)]
        scores = (_dose if method == "dose" else _eap)(found, shares) * admitted[..., None]
    parts = scores if method == "dose" else scores[:, 0]
    wanted, sums = ends[1] - ends[0], parts.flatten(0, -2).sum(0)
    error = (
        float("nan")
        if method == "exact"
        else float((sums - wanted).abs().mean() / wanted.abs().mean().clamp(min=1e-12))
    )
    return EdgeScores(found.graph, scores, *ends, method, direction, ablation, found.metric_name, error,
                      time.perf_counter() - began)  # fmt: skip


def _eap(found: Study, shares: Sequence[float]) -> Tensor:
    """Gradient at every receiver, averaged over shares of the way between embeddings, · change of every sender
    [receiver sender example]."""
    change = found.source - found.base.written
    start, end = found.base.senders[0][0], found.source[0]
    total = torch.zeros(())
    for share in shares:
        total = total + receiver_gradients(found, start + share * (end - start)) / len(shares)
    return torch.einsum("rbpd,sbpd->rsb", total, change)


def receiver_gradients(found: Study, start: Tensor) -> Tensor:
    """The metric's gradient with respect to what each receiver reads [receiver batch pos d_model], in a run from these
    embeddings."""
    probe = start.new_zeros(len(found.graph.receivers), *start.shape, requires_grad=True)
    with torch.enable_grad():
        value = found.read(flow(start, found.stages, probe=probe)).sum()
    return torch.autograd.grad(value, probe)[0]


def _dose(found: Study, shares: Sequence[float]) -> Tensor:
    """The gradient with respect to every edge's dose, averaged along a common dose [receiver sender example]."""
    shape = (*found.graph.admitted.shape, found.inputs.batch, 1)
    total = torch.zeros(())
    for share in shares:
        mask = (share * found.graph.admitted.to(found.source)).view(*shape[:2], 1, 1).expand(shape).clone()
        mask.requires_grad_()
        with torch.enable_grad():
            value = found.read(found.run(mask)).sum()
        total = total + torch.autograd.grad(value, mask)[0][..., 0] / len(shares)
    return total


@torch.no_grad()
def _exact(found: Study, edges: Tensor, progress: bool) -> Tensor:
    """Every edge alone: nothing changes before its receiver, so each run starts there."""
    scores = torch.full((*edges.shape, found.inputs.batch), float("nan")).to(found.source)
    asked = (edges & found.graph.admitted).nonzero().tolist()
    stage_of = {
        row: i for i, stage in enumerate(found.stages) for row in range(stage.receivers.start, stage.receivers.stop)
    }
    for r, s in tqdm(asked, disable=not progress, desc="edges"):
        mask = torch.zeros_like(found.graph.admitted).to(found.source)
        mask[r, s] = 1
        scores[r, s] = found.read(found.run(mask, resume=(stage_of[r], found.base))) - found.unpatched
    return scores
