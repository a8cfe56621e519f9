"""Planted mixtures: models in which it is known what share of some facts lies in the FFNs and what share in attention's OV.

A base model learns routing (who is meant, what is asked, where the answer goes) on some people. The facts of the others are then
planted: a share s of them is trained with nothing but the FFNs trainable, the rest with nothing but W_V and W_O, in turn and on
the same weights, everything else frozen. A localiser that is to say where facts lie must read s from such a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from tqdm.auto import tqdm

from interp.model.transformer import Transformer
from interp.tasks.facts import Prompts
from interp.tasks.task import Batch, Goal, stream
from interp.tasks.toy_facts import ToyFacts, as_batch
from interp.tasks.train_config import TrainConfig
from interp.training.ensemble import Ensemble
from interp.training.judge import judge
from interp.training.many import train_many

PARTS = {"ffn": ("ffn",), "attention": ("ov",)}
"""Part of a mixture -> the weight groups that its facts are trained in."""
CONFIG = TrainConfig(steps=800, batch_size=128, learning_rate=1e-3, weight_decay=0.0)
"""How facts are planted: measured on seed 1000 (at 3e-3 two parts undo each other: 35% of attention's facts are kept)."""


class PlantedError(ValueError):
    """Shares or facts that make no mixture; the message says what is allowed."""


@dataclass(frozen=True)
class SomeFacts:
    """A task of some people of `ToyFacts`: the first `n_base` in its order of facts (planted=False) or all others."""

    n_subjects: int = 512
    n_base: int = 384
    planted: bool = False
    name: str = "some-facts"

    def __post_init__(self) -> None:
        if not 0 < self.n_base < self.n_subjects:
            raise PlantedError(f"n_base={self.n_base} is not allowed; allowed: 1 … {self.n_subjects - 1}")

    @cached_property
    def whole(self) -> ToyFacts:
        """The task that the people come from."""
        return ToyFacts(self.n_subjects)

    @cached_property
    def splits(self) -> Mapping[str, Prompts]:
        """`train`: three templates of each fact; `held_out`: the fourth."""
        people = self.whole.facts.facts["subject"].drop_duplicates()
        chosen = set(people[self.n_base :] if self.planted else people[: self.n_base])
        return {name: prompts.select(prompts.table["subject"].isin(chosen).to_numpy())
                for name, prompts in self.whole.splits.items()}  # fmt: skip

    @cached_property
    def others(self) -> SomeFacts:
        """The task of the people whose facts are planted in a base of this one."""
        return replace(self, planted=True)

    @cached_property
    def evaluation(self) -> Mapping[str, Batch]:
        """Every prompt of `splits`."""
        return {name: as_batch(prompts) for name, prompts in self.splits.items()}

    @property
    def goals(self) -> tuple[Goal, ...]:
        """As those of the whole task; new people's facts need a template that holds."""
        return Goal("train", "accuracy", 0.99), Goal("held_out", "accuracy", 0.95)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Training prompts drawn with replacement."""
        return drawn(self.splits["train"], step, size, seed)

    def model_config(self, **changes):
        """The whole task's."""
        return self.whole.model_config(**changes)

    def train_config(self, **changes) -> TrainConfig:
        """The whole task's."""
        return self.whole.train_config(**changes)


def drawn(prompts: Prompts, step: int, size: int, seed: int) -> Batch:
    """`size` prompts, with replacement: a function of (step, size, seed) alone."""
    return as_batch(prompts, torch.randint(len(prompts), (size,), generator=stream(seed, step)))


@dataclass(frozen=True, eq=False)
class Mixture:
    """base: the common ancestor, without the planted facts. model: with them. train, held_out: their prompts, whose table says in
    a column `part` where each fact was planted. recall: accuracy by (split, part), and of the base's own facts under "base"."""

    seed: int
    share: float
    base: Transformer
    model: Transformer
    train: Prompts
    held_out: Prompts
    recall: Mapping[str, float]


def bases(
    seeds: Sequence[int], task: SomeFacts | None = None, folder: str | Path | None = None, progress: bool = True
) -> dict[int, Transformer]:
    """One base model per seed, trained on the base's people; with a folder, resumed from it."""
    task = task or SomeFacts()
    configs = [task.train_config(seed=seed) for seed in seeds]
    resume = folder is not None and Path(folder).exists()
    found = train_many(task.model_config(), task, configs, folder, "stacked", resume, progress)  # type: ignore[arg-type]
    return {run.config.seed: run.model for run in found.values() if run.config is not None}


def plant(
    models: Mapping[int, Transformer],
    shares: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    task: SomeFacts | None = None,
    config: TrainConfig | None = None,
    progress: bool = True,
) -> list[Mixture]:
    """Every base with every share of the other people's facts planted in its FFNs and the rest in its OV.

    Facts are dealt to the parts at random, by (seed, share). config: of both trainings (its `trainable` and seed are set here).
    Raises PlantedError.
    """
    if not shares or any(not 0 <= share <= 1 for share in shares) or not models:
        raise PlantedError(f"shares={list(shares)!r} of {len(models)} bases are not allowed; allowed: numbers from 0 to 1, and "
                           "one base or more")  # fmt: skip
    task = task or SomeFacts()
    config = config or CONFIG
    cells = [(seed, share) for share in shares for seed in models]
    dealt = {cell: deal(task, *cell) for cell in cells}
    found: list[Mixture] = []
    for inside in (
        lambda s: s == 0,
        lambda s: 0 < s < 1,
        lambda s: s == 1,
    ):  # those in which the same parts are trained
        some = [cell for cell in cells if inside(cell[1])]
        if some:
            found += _trained(some, models, dealt, config, task, progress)
    return sorted(found, key=lambda one: cells.index((one.seed, one.share)))


def deal(task: SomeFacts, seed: int, share: float) -> dict[str, Prompts]:
    """The prompts of the facts that are planted, by split, with a column `part`; task: the base's."""
    facts = np.unique(task.others.splits["train"].table["fact"])
    order = np.random.default_rng([seed, round(1000 * share)]).permutation(facts)
    inside = set(order[: round(share * len(order))])
    mark = lambda prompts: prompts.table["fact"].map(lambda fact: "ffn" if fact in inside else "attention")  # noqa: E731
    return {
        name: Prompts(one.inputs, one.answers, one.table.assign(part=mark(one)))
        for name, one in task.others.splits.items()
    }


def _trained(cells, models, dealt, config: TrainConfig, task: SomeFacts, progress: bool) -> list[Mixture]:
    parts = [part for part in PARTS if all((dealt[cell]["train"].table["part"] == part).any() for cell in cells)]
    configs = {part: [_config(config, part, seed) for seed, _ in cells] for part in parts}
    first = Ensemble([models[seed] for seed, _ in cells], configs[parts[0]])
    turns = {part: first if part == parts[0] else first.also(configs[part]) for part in parts}
    sets = [dealt[cell]["train"] for cell in cells]
    pools = {part: [one.select((one.table["part"] == part).to_numpy()) for one in sets] for part in parts}
    for step in tqdm(range(config.steps), disable=not progress, desc=f"planting {len(cells)} × {' + '.join(parts)}"):
        for part, ensemble in turns.items():
            batches = [
                drawn(pool, step, config.batch_size, seed) for pool, (seed, _) in zip(pools[part], cells, strict=True)
            ]
            ensemble.step(batches, step)
    base_facts = task.evaluation["held_out"]
    found = []
    for cell, model in zip(cells, first.unstack(), strict=True):
        recall = {"base": judge(model, base_facts)["accuracy"]}
        for split, prompts in dealt[cell].items():
            for part in parts:
                chosen = prompts.select((prompts.table["part"] == part).to_numpy())
                recall[f"{split} {part}"] = judge(model, as_batch(chosen))["accuracy"]
        seed, share = cell
        found.append(Mixture(seed, share, models[seed], model, dealt[cell]["train"], dealt[cell]["held_out"], recall))
    return found


def _config(config: TrainConfig, part: str, seed: int) -> TrainConfig:
    return replace(config, trainable=PARTS[part], seed=seed)
