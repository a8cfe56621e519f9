"""Weight interchange over a change of facts: half of the facts get another answer, all blocks are fine-tuned from the common
ancestor, and the Shapley value of each group's change says which weights the change was written into."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from interp.analyses.shares import weight_shares
from interp.claims.planted import drawn
from interp.metrics import logit_difference
from interp.model.transformer import Transformer
from interp.run import run
from interp.stats import Shapley
from interp.tasks.facts import Prompts
from interp.tasks.toy_facts import ToyFacts
from interp.tasks.train_config import TrainConfig
from interp.training.ensemble import Ensemble


@dataclass(frozen=True, eq=False)
class Changed:
    """Prompts by split with the new answers; `old` the answers before, `changed` which prompts ask for a changed fact."""

    prompts: Mapping[str, Prompts]
    old: Mapping[str, torch.Tensor]
    changed: Mapping[str, torch.Tensor]


def change(task: ToyFacts, seed: int, share: float = 0.5) -> Changed:
    """`share` of the facts, drawn by the seed, with another value of their relation."""
    rng, facts = np.random.default_rng([seed, 13]), task.facts.facts
    chosen = rng.permutation(len(facts))[: round(share * len(facts))]
    new: dict[int, str] = {}
    values = {relation: sorted(rows["object"].unique()) for relation, rows in facts.groupby("relation")}
    for fact in sorted(chosen):
        row = facts.iloc[fact]
        new[int(fact)] = str(rng.choice([value for value in values[row["relation"]] if value != row["object"]]))
    ids = {word: task.vocabulary.ids(word)[0] for word in set(new.values())}
    prompts, old, changed = {}, {}, {}
    for split, one in task.splits.items():
        asked = one.table["fact"].to_numpy()
        hit = torch.tensor([int(fact) in new for fact in asked])
        answers = [
            ids[new[int(fact)]] if int(fact) in new else int(was) for fact, was in zip(asked, one.answers, strict=True)
        ]
        prompts[split] = Prompts(one.inputs, torch.tensor(answers), one.table)
        old[split], changed[split] = one.answers, hit
    return Changed(prompts, old, changed)


def fine_tuned(
    bases: Mapping[int, Transformer], changes: Mapping[int, Changed], config: TrainConfig
) -> dict[int, Transformer]:
    """Every base with its changed facts, seed by seed; what of the weights moves is `config.trainable`."""
    configs = [TrainConfig(**{**vars(config), "seed": seed}) for seed in bases]
    ensemble = Ensemble([bases[seed] for seed in bases], configs)
    for step in range(config.steps):
        ensemble.step([drawn(changes[seed].prompts["train"], step, config.batch_size, seed) for seed in bases], step)
    return dict(zip(bases, ensemble.unstack(), strict=True))


def interchange(
    base: Transformer,
    tuned: Transformer,
    one: Changed,
    players: Sequence[str] = ("ffn", "attention"),
    split: str = "held_out",
) -> tuple[Shapley, Shapley]:
    """Shapley values of each group's change on the changed facts' prompts: of logit(new) − logit(old), and of accuracy."""
    prompts = one.prompts[split].select(one.changed[split].numpy())
    old = one.old[split][one.changed[split]]
    difference = logit_difference(prompts.answers, old, "final")

    def accuracy(logits: torch.Tensor) -> torch.Tensor:
        last = logits[torch.arange(len(prompts)), prompts.inputs.roles["final"]]
        return (last.argmax(-1) == prompts.answers).double()

    return (weight_shares(base, tuned, prompts.inputs, difference, players),
            weight_shares(base, tuned, prompts.inputs, accuracy, players))  # fmt: skip


@torch.no_grad()
def recall(model: Transformer, one: Changed, split: str = "held_out") -> dict[str, float]:
    """Accuracy on changed and on unchanged facts."""
    prompts = one.prompts[split]
    logits = run(model, prompts.inputs).logits[torch.arange(len(prompts)), prompts.inputs.roles["final"]]
    right, hit = logits.argmax(-1) == prompts.answers, one.changed[split]
    return {"recall_changed": float(right[hit].double().mean()), "recall_unchanged": float(right[~hit].double().mean())}
