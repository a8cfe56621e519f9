"""Judging a model on a task's examples: how many asked tokens are right, at what cost, and what it says where."""

from __future__ import annotations

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.tasks.task import NOT_ASKED, Batch, Task
from interp.tokens import labels


def read(model: Transformer, inputs: Inputs, positions: Tensor) -> Tensor:
    """Logits at `positions` [batch n] only, [batch n vocab]: the head is not computed elsewhere."""
    stream = model.stream(inputs)
    index = positions[..., None].expand(-1, -1, stream.shape[-1])
    return model.unembed(stream.gather(1, index).flatten(0, 1)).unflatten(0, positions.shape)


@torch.no_grad()
def judge(model: Transformer, examples: Batch, batch_size: int = 1024) -> dict[str, float]:
    """accuracy, exact and nats (see `Goal`) over the examples' asked tokens, and n, how many examples ask any."""
    right, nats, asked = [], [], []
    for begin in range(0, len(examples), batch_size):
        part = examples.select(slice(begin, begin + batch_size)).to(model.device)
        logits = read(model, part.inputs, part.positions).float()
        nats.append(
            F.cross_entropy(logits.flatten(0, 1), part.targets.flatten(), reduction="none").view(part.targets.shape)
        )
        right.append(logits.argmax(-1) == part.targets)
        asked.append(part.targets != NOT_ASKED)
    hit, cost, wanted = (torch.cat(parts).cpu() for parts in (right, nats, asked))
    some = wanted.any(1)
    return {
        "accuracy": float(hit[wanted].float().mean()),
        "exact": float((hit | ~wanted).all(1)[some].float().mean()),
        "nats": float(cost[wanted].mean()),
        "n": int(some.sum()),
    }


def goals_met(task: Task, rows: list[dict]) -> bool:
    """Whether one evaluation's rows, one per split, meet every goal of the task."""
    found = {row["split"]: row for row in rows}
    return all(goal.met(float(found[goal.split][goal.quantity])) for goal in task.goals)


@torch.no_grad()
def samples(model: Transformer, task: Task, n: int = 8) -> pd.DataFrame:
    """What the model says on the first `n` examples of each split: split, example, prompt, wanted, said, probability.

    wanted, said: the asked tokens in order, as a person reads them. probability: of the wanted ones, multiplied.
    """
    words, rows = getattr(task, "vocabulary", None), []
    for split, examples in task.evaluation.items():
        part = examples.select(slice(0, n)).to(model.device)
        chances = read(model, part.inputs, part.positions).float().softmax(-1).cpu()
        part = part.to("cpu")
        for i in range(len(part)):
            asked = part.targets[i] != NOT_ASKED
            wanted, said = part.targets[i][asked], chances[i].argmax(-1)[asked]
            real = part.inputs if part.inputs.source is None else part.inputs.encoder
            tokens = real.tokens[i] if real.mask is None else real.tokens[i][real.mask[i]]
            chance = chances[i][asked].gather(1, wanted[:, None]).prod()
            text = [" ".join(labels(words, one)) for one in (tokens, wanted, said)]
            rows.append({"split": split, "example": i, "prompt": text[0], "wanted": text[1], "said": text[2],
                         "probability": float(chance)})  # fmt: skip
    return pd.DataFrame(rows)
