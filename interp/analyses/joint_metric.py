"""What a set of prompts is judged by: probability of the answer and logit difference, both of the same runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.hookable import Hookable
from interp.metrics import Metric, logit_difference, probability, wide
from interp.model.inputs import Inputs
from interp.run import prepare, run
from interp.tasks.facts import Prompts
from interp.tasks.task import Pairs

METRICS = ("probability", "logit_difference")
UNITS = {"probability": "probability", "logit_difference": "logits"}


class TraceError(ValueError):
    """A choice of causal tracing, knock-out or attribute reading that is not allowed, or prompts that lack what it needs."""


@dataclass(frozen=True, eq=False)
class Asked:
    """Prompts on the model's device: clean, corrupted (None without pairs), correct and wrong [example], one row of `table` each.

    predicted [example]: the model's most likely token. facts [example]: the table's column `fact`, else the example's number.
    """

    clean: Inputs
    corrupted: Inputs | None
    given: Tensor
    correct: Tensor
    wrong: Tensor | None
    predicted: Tensor
    facts: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """Whether the model's most likely token is the given answer [example]."""
        return (self.predicted == self.given).cpu().numpy()


def asked(model: Hookable, prompts: Prompts | Pairs, answers: str, metrics: Sequence[str] | str | None) -> Asked:
    """The prompts with the answer that is followed, "given" or "predicted" (the model's argmax). Raises TraceError."""
    if not isinstance(prompts, Prompts | Pairs):
        raise TraceError(
            f"prompts must be Prompts or Pairs (as replacement_pairs makes them), got {type(prompts).__name__}"
        )
    if answers not in ("given", "predicted"):
        raise TraceError(f"answers={answers!r} is not allowed; allowed: 'given', 'predicted'")
    pairs = isinstance(prompts, Pairs)
    clean = prepare(model, prompts.clean if pairs else prompts.inputs)
    given = (prompts.correct if pairs else prompts.answers).to(clean.tokens.device)
    missing = [role for role in ("subject", "subject_last") if role not in clean.roles]
    if missing:
        raise TraceError(f"the prompts have no role {missing[0]!r}; they have {', '.join(clean.roles) or 'none'}")
    found = [
        run(model, part).logits[torch.arange(part.batch), part.last()].argmax(-1)
        for part in (clean.select(slice(i, i + 32)) for i in range(0, clean.batch, 32))
    ]
    predicted = torch.cat(found)
    table = prompts.table if isinstance(prompts.table, pd.DataFrame) else pd.DataFrame(index=range(clean.batch))
    facts = table["fact"].to_numpy() if "fact" in table.columns else np.arange(clean.batch)
    return Asked(
        clean, prepare(model, prompts.corrupted) if pairs else None, given, given if answers == "given" else predicted,
        prompts.wrong.to(given.device) if pairs else None, predicted, facts,
    )  # fmt: skip


def metric_names(metrics: Sequence[str] | str | None, wrong: Tensor | None) -> tuple[str, ...]:
    """The metrics to record: by default both with pairs, probability alone without a wrong answer. Raises TraceError."""
    if metrics is None:
        return METRICS if wrong is not None else METRICS[:1]
    names = (metrics,) if isinstance(metrics, str) else tuple(metrics)
    if not names or len(set(names)) < len(names) or not set(names) <= set(METRICS):
        raise TraceError(
            f"metrics={metrics!r} is not allowed; allowed: different ones of {', '.join(map(repr, METRICS))}"
        )
    if wrong is None and "logit_difference" in names:
        raise TraceError(
            "metric 'logit_difference' needs a wrong answer; allowed: Pairs (replacement_pairs), or 'probability'"
        )
    return names


def joint_metric(names: Sequence[str], correct: Tensor, wrong: Tensor | None, position: Tensor) -> Metric:
    """The named metrics [metric × example] of the first `example` rows of a batch that holds every prompt once per metric.

    The sweep engine gives one number per row, and a changed run costs most where its blocks are computed. So the prompts stand
    in the batch once per metric, only the first copy is ever changed, and the rows of the others hand back another number of
    that copy. Unchanged rows cost the engine nothing. position [example]: where the answer is read.
    """
    if tuple(names) == ("logit_difference",):
        assert wrong is not None
        return logit_difference(correct, wrong, position)
    if tuple(names) == ("probability",):
        return probability(correct, position)
    n = len(correct)

    def function(x: Tensor) -> Tensor:
        first = x[:n, 0]
        found = {"probability": _at(first.softmax(-1), correct)}
        if wrong is not None:
            found["logit_difference"] = _at(first, correct) - _at(first, wrong)
        return torch.cat([found[name] for name in names])

    return Metric(" and ".join(names), function, position.repeat(len(names)), None, "")


def copies(inputs: Inputs, names: Sequence[str]) -> Inputs:
    """Every prompt once per metric, as `joint_metric` reads them."""
    return inputs.select(torch.arange(inputs.batch).repeat(len(names)).to(inputs.tokens.device))


def _at(values: Tensor, ids: Tensor) -> Tensor:
    return values.gather(-1, ids.to(values.device)[:, None])[:, 0]


def top_tokens(logits: Tensor, k: int) -> Tensor:
    """The k most likely tokens, in order [… k]."""
    return wide(logits).topk(k, -1).indices


def odd_window(window: Any, even: bool = False) -> int:
    """A checked number of layers around a centre. Raises TraceError for an even one unless `even`."""
    if not isinstance(window, int) or isinstance(window, bool) or window < 1 or (window % 2 == 0 and not even):
        raise TraceError(f"window={window!r} is not allowed; allowed: an odd number of layers, so that it has a centre "
                         "(even ones only with published='code' or 'paper')")  # fmt: skip
    return window


def layer_windows(n_layers: int, window: int, published: str | None = None) -> list[tuple[int, ...]]:
    """Per centre the layers of its window, cut off at the ends of the model.

    An even window has no centre. Meng et al. (2022) write [l − 4 … l + 5] for 10 layers; their code takes [l − 5 … l + 4].
    """
    before, after = window // 2, (window - 1) // 2  # the code's; equal for odd windows
    if published == "paper":
        before, after = after, before
    return [tuple(range(max(0, at - before), min(n_layers, at + after + 1))) for at in range(n_layers)]
