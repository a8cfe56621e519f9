"""ACDC (Conmy et al. 2023): walk the graph from the head to the input and cut every edge whose loss costs less than a
threshold."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from interp.circuits.graph import CircuitError, Graph
from interp.circuits.patching import Ablation, Study, study
from interp.metrics import Metric, kl_divergence
from interp.run import prepare, run


@dataclass(frozen=True)
class Circuit:
    """The edges that stayed [receiver sender], what cutting each one cost when it was tried, and the damage of the whole.

    costs: rise of the mean damage [receiver sender], nan for an edge that was not tried. damage: the metric [example] of the
    circuit."""

    graph: Graph
    kept: Tensor
    costs: Tensor
    damage: Tensor
    threshold: float
    ablation: Ablation
    metric: str
    tried: int
    seconds: float

    def table(self) -> pd.DataFrame:
        """One row per edge: edge, sender, receiver, kept, cost (mean over examples), threshold, ablation, metric."""
        table = self.graph.table(kept=self.kept, cost=self.costs)
        return table.assign(threshold=self.threshold, ablation=self.ablation, metric=self.metric)


@torch.no_grad()
def acdc(
    model: Any,
    clean: Any,
    corrupted: Any,
    threshold: float,
    metric: Metric | Callable[[Tensor], Tensor] | None = None,
    ablation: Ablation = "corrupted",
    edges: Tensor | None = None,
    seed: int = 0,
    progress: bool = False,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> Circuit:
    """Every edge in turn, from the head's back to the first layer's, is patched and stays so unless that costs `threshold` or
    more.

    metric: a damage [batch], 0 for the whole model and larger the worse; None: KL from the clean run's prediction at the last
    position (nats), as published. Its mean over the examples is compared. edges: which may stay [receiver sender], such as
    those that EAP ranks first; all others are patched from the start. What an edge carries that is not cut is live
    (`edge_patch`), and so are senders when their value is replaced. Edges are tried receiver by receiver, later senders
    first. Raises CircuitError, UnsupportedModelError."""
    if not threshold >= 0:
        raise CircuitError(f"threshold={threshold!r} is not allowed; allowed: 0 or more, in the metric's unit")
    began = time.perf_counter()
    Graph.of(model)  # refuses what it must before the model runs
    if metric is None:
        clean = prepare(model, clean, tokenizer, prefix)
        metric = kl_divergence(run(model, clean).logits[range(clean.batch), clean.last()])
    found = study(model, clean, corrupted, metric, "noising", ablation, seed, tokenizer, prefix)
    graph = found.graph
    may_stay = graph.admitted if edges is None else edges & graph.admitted
    cut = (graph.admitted & ~may_stay).to(found.source)
    costs = torch.full(graph.admitted.shape, float("nan"), dtype=found.source.dtype)
    _check_damage(found, graph)
    values, tried = _walk(found, may_stay, cut, costs, threshold, progress)
    return Circuit(graph, graph.admitted & (cut.cpu() == 0), costs, values, threshold, ablation, found.metric_name, tried,
                   time.perf_counter() - began)  # fmt: skip


def _check_damage(found: Study, graph: Graph) -> None:
    """A logit difference falls where a damage rises: every edge would look harmless, and none would stay."""
    whole, nothing = (
        float(found.value(cut.to(found.source)).mean()) for cut in (torch.zeros_like(graph.admitted), graph.admitted)
    )
    if nothing < whole and whole > 1e-6:
        raise CircuitError(
            f"the metric falls from {whole:.3g} for the whole model to {nothing:.3g} with every edge cut, so it is no damage; "
            "allowed: None (KL from the clean run), or a metric that is 0 for the whole model and rises, such as the clean value "
            "minus yours"
        )


def _walk(found: Study, may_stay: Tensor, cut: Tensor, costs: Tensor, threshold: float, progress: bool):
    """Cuts edges in `cut` and notes `costs`, both in place; the metric of what is left, and how many edges were tried."""
    now = found.value(cut)
    bar = tqdm(total=int(may_stay.sum()), disable=not progress, desc="ACDC")
    for i in reversed(range(len(found.stages))):
        rows = found.stages[i].receivers
        # While this stage's edges are tried only later ones and those of no candidate are cut: the flow up to here is fixed.
        before = found.run(_until(cut, rows.start)) if bool(cut[: rows.start].any()) else found.base
        for r in reversed(range(rows.start, rows.stop)):
            for s in reversed(may_stay[r].nonzero()[:, 0].tolist()):
                cut[r, s] = 1
                then = found.read(found.run(cut, resume=(i, before)))
                costs[r, s] = float((then - now).mean())
                if costs[r, s] < threshold:
                    now = then
                else:
                    cut[r, s] = 0
                bar.update()
    bar.close()
    return now, int(may_stay.sum())


def _until(cut: Tensor, row: int) -> Tensor:
    """The cuts at receivers before `row`."""
    return torch.where(torch.arange(len(cut), device=cut.device)[:, None] < row, cut, 0.0)
