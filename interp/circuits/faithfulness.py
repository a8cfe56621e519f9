"""How much of a model's behaviour its best k edges carry: faithfulness curves and the two areas of the MIB circuit track."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.circuits.attribution import EdgeScores
from interp.circuits.graph import CircuitError
from interp.circuits.patching import Ablation, study
from interp.metrics import Metric

FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)  # of all edges (Mueller et al. 2025)


def faithfulness(
    model: Any,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    ranked: EdgeScores | Mapping[str, EdgeScores],
    fractions: Sequence[float] = FRACTIONS,
    by: str = "absolute",
    ablation: Ablation = "corrupted",
    seed: int = 0,
    random: int = 1,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> pd.DataFrame:
    """The metric with only the best edges left and every other patched, beside as many edges drawn at random.

    ranked: scores, or several by name. fractions: of all edges. by: "absolute", or "score", which leaves out edges that hurt.
    random: how many random orders. Prompts should be others than those that the scores were made from. Columns: method,
    fraction, edges, example, value, clean, corrupted (the metric with no edge and with every edge patched), ablation, metric.
    `curve_areas` makes faithfulness of it. Raises CircuitError."""
    found = study(model, clean, corrupted, metric, "noising", ablation, seed, tokenizer, prefix)
    admitted, count = found.graph.admitted, int(found.graph.admitted.sum())
    bad = [one for one in fractions if not 0 < one <= 1]
    if bad or not fractions:
        raise CircuitError(f"fractions={bad or list(fractions)} is not allowed; allowed: shares of the edges in (0, 1]")
    orders = {"scores" if isinstance(ranked, EdgeScores) else name: scores
              for name, scores in ({"": ranked} if isinstance(ranked, EdgeScores) else ranked).items()}  # fmt: skip
    everything = found.clean, found.value(admitted.to(found.source))
    generator, frames = torch.Generator().manual_seed(seed), []
    draws = [torch.rand(admitted.shape, generator=generator).masked_fill(~admitted, -1.0) for _ in range(random)]
    for fraction in sorted(set(fractions)):
        n = max(1, round(fraction * count))
        left = [(name, scores.top(n, by)) for name, scores in orders.items()]  # type: ignore[arg-type]
        left += [("random", _first(draw, n)) for draw in draws]
        for name, kept in left:
            value = found.value((admitted & ~kept).to(found.source))
            frames.append(pd.DataFrame({
                "method": name, "fraction": fraction, "edges": n, "example": range(len(value)), "value": value.tolist(),
                "clean": everything[0].tolist(), "corrupted": everything[1].tolist(),
            }))  # fmt: skip
    return pd.concat(frames, ignore_index=True).assign(ablation=ablation, metric=found.metric_name)


def _first(order: Tensor, n: int) -> Tensor:
    chosen = torch.zeros(order.numel(), dtype=torch.bool)
    chosen[order.flatten().topk(n).indices] = True
    return chosen.view(order.shape)


def faithfulness_curve(table: pd.DataFrame) -> pd.DataFrame:
    """From `faithfulness`: method, fraction, edges, faithfulness = (value − corrupted)/(clean − corrupted), a ratio of means."""
    means = table.groupby(["method", "fraction", "edges"], as_index=False)[["value", "clean", "corrupted"]].mean()
    span = means["clean"] - means["corrupted"]
    if bool((span.abs() < 1e-12).any()):
        raise CircuitError(f"clean and corrupted runs have the same mean metric, {means['clean'].iloc[0]:.4g}: faithfulness has "
                           "no unit")  # fmt: skip
    return means[["method", "fraction", "edges"]].assign(faithfulness=(means["value"] - means["corrupted"]) / span)


def curve_areas(table: pd.DataFrame) -> pd.DataFrame:
    """From `faithfulness`: method, CPR (area under the curve over the fraction: larger is better), CMD (area between it and 1:
    smaller is better), by the trapezoid rule between the smallest fraction and the largest (Mueller et al. 2025)."""
    rows = []
    for name, curve in faithfulness_curve(table).groupby("method", sort=False):
        x, y = curve["fraction"].to_numpy(), curve["faithfulness"].to_numpy()
        rows.append({"method": name, "CPR": float(np.trapezoid(y, x)), "CMD": float(np.trapezoid(np.abs(1 - y), x))})
    return pd.DataFrame(rows)
