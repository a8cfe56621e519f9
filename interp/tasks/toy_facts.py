"""The toy task "facts": made-up people with four relations to learn by heart; the truth is known.

A subject is two name tokens (first of 64, last of 64), so no single token identifies it. Each of 4 relations has 32
values (5 bits a fact, drawn uniformly). Four templates of six tokens place subject and relation differently, one with
the relation before the subject; one template per fact is held out of training, so that recall there shows a fact that
can be used and not just a string (Allen-Zhu & Li 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.model.config import ModelConfig
from interp.tasks.facts import FactSet, Prompts
from interp.tasks.task import Batch, Copies, Goal, TaskError, stream
from interp.tasks.train_config import TrainConfig
from interp.tokens import Vocabulary

ONSETS = ["B", "D", "F", "K", "L", "M", "N", "R"]
FIRST = [onset + rime for onset in ONSETS for rime in ["ana", "eli", "iro", "ora", "una", "alo", "ede", "imi"]]
LAST = [
    onset + rime for onset in ONSETS for rime in ["arsen", "ebert", "ikov", "olmer", "undal", "astor", "enzi", "ilson"]
]
VALUES = {
    "home": [
        "Athens",
        "Berlin",
        "Cairo",
        "Dublin",
        "Essen",
        "Florence",
        "Geneva",
        "Havana",
        "Istanbul",
        "Jakarta",
        "Kyoto",
        "Lisbon",
        "Madrid",
        "Nairobi",
        "Oslo",
        "Prague",
        "Quito",
        "Riga",
        "Seoul",
        "Tunis",
        "Utrecht",
        "Vienna",
        "Warsaw",
        "Xian",
        "York",
        "Zagreb",
        "Bergen",
        "Delhi",
        "Lima",
        "Malmo",
        "Osaka",
        "Turin",
    ],
    "job": [
        "actor",
        "baker",
        "carpenter",
        "dentist",
        "editor",
        "farmer",
        "gardener",
        "hunter",
        "inventor",
        "judge",
        "knitter",
        "lawyer",
        "miner",
        "nurse",
        "optician",
        "painter",
        "quarrier",
        "roofer",
        "sailor",
        "teacher",
        "umpire",
        "vet",
        "weaver",
        "brewer",
        "clerk",
        "diver",
        "florist",
        "grocer",
        "jeweller",
        "mason",
        "pilot",
        "tailor",
    ],
    "dish": [
        "bread",
        "curry",
        "dumpling",
        "eggs",
        "falafel",
        "gnocchi",
        "hummus",
        "icecream",
        "jam",
        "kebab",
        "lasagne",
        "muesli",
        "noodles",
        "omelette",
        "pizza",
        "quiche",
        "rice",
        "soup",
        "tacos",
        "udon",
        "waffles",
        "yoghurt",
        "beans",
        "cake",
        "fish",
        "ham",
        "lentils",
        "nuts",
        "pie",
        "ravioli",
        "salad",
        "tofu",
    ],
    "sport": [
        "archery",
        "boxing",
        "cricket",
        "diving",
        "fencing",
        "golf",
        "hockey",
        "judo",
        "karate",
        "lacrosse",
        "netball",
        "polo",
        "rowing",
        "sailing",
        "tennis",
        "volleyball",
        "wrestling",
        "badminton",
        "climbing",
        "cycling",
        "darts",
        "football",
        "gymnastics",
        "handball",
        "jogging",
        "rugby",
        "skating",
        "skiing",
        "squash",
        "surfing",
        "swimming",
        "yoga",
    ],
}
TEMPLATES = (
    "{subject} has the RELATION of",
    "the RELATION of {subject} is",
    "about {subject} : RELATION is",
    "we know {subject} by RELATION",
)


@dataclass(frozen=True)
class ToyFacts:
    """`n_subjects` people (at most 4,096), their facts drawn from `seed`.

    Ground truth: `facts.facts`. Prompts: `train` (three templates of each fact) and `held_out` (the fourth).
    """

    n_subjects: int = 512
    seed: int = 0
    name: Literal["facts"] = "facts"

    def __post_init__(self) -> None:
        if not 2 <= self.n_subjects <= len(FIRST) * len(LAST):
            raise TaskError(f"n_subjects={self.n_subjects} is not allowed; allowed: 2 … {len(FIRST) * len(LAST)}")

    @property
    def vocabulary(self) -> Vocabulary:
        """All words of the task, the same for every n_subjects and seed."""
        frame = [word for word in " ".join(TEMPLATES).split() if word not in ("{subject}", "RELATION")]
        return Vocabulary([*FIRST, *LAST, *VALUES, *chain(*VALUES.values()), *dict.fromkeys(frame)])

    @cached_property
    def facts(self) -> FactSet:
        """The facts and templates; a column `held_out` names the template kept from training."""
        rng = np.random.default_rng(self.seed)
        people = rng.permutation(len(FIRST) * len(LAST))[: self.n_subjects]
        names = [f"{FIRST[i // len(LAST)]} {LAST[i % len(LAST)]}" for i in people]
        rows = [
            (relation, name, VALUES[relation][rng.integers(32)], int(rng.integers(len(TEMPLATES))))
            for name in names
            for relation in VALUES
        ]
        facts = pd.DataFrame(rows, columns=["relation", "subject", "object", "held_out"])
        forms = [(relation, form.replace("RELATION", relation), relation) for relation in VALUES for form in TEMPLATES]
        return FactSet(facts, pd.DataFrame(forms, columns=["relation", "template", "cue"]))

    @cached_property
    def prompts(self) -> Prompts:
        """Every fact in every template."""
        return self.facts.prompts(self.vocabulary)

    @property
    def splits(self) -> Mapping[str, Prompts]:
        """`train`: three templates of each fact; `held_out`: the fourth."""
        return self._splits

    @cached_property
    def _splits(self) -> dict[str, Prompts]:
        out = (self.prompts.table["held_out"] == self.prompts.table["template"]).to_numpy()
        return {"train": self.prompts.select(~out), "held_out": self.prompts.select(out)}

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        return {name: as_batch(prompts) for name, prompts in self.splits.items()}

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """Every prompt of `splits`, asked for its answer at the final position."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """All but one in a thousand by heart, 99% in the template that was never seen with the fact."""
        return Goal("train", "accuracy", 0.999), Goal("held_out", "accuracy", 0.99)

    def model_config(self, **changes: Any) -> ModelConfig:
        """The textbook's pre-norm block with SwiGLU, two layers, d_model 64 (128 for over 1,024 subjects)."""
        defaults: dict[str, Any] = {
            "vocab": len(self.vocabulary), "n_layers": 2, "n_heads": 4, "n_ctx": 8, "norm": "rmsnorm",
            "d_model": 64 if self.n_subjects <= 1024 else 128, "ffn": "swiglu", "positions": "rotary", "bias": False,
        }  # fmt: skip
        return ModelConfig(**{**defaults, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """How this many facts are learned on two CPU cores (measured: see the README); `changes` override."""
        defaults: dict[str, Any] = {"steps": 600, "batch_size": 256, "learning_rate": 5e-3, "weight_decay": 0.3}
        if self.n_subjects > 1024:
            defaults |= {"steps": 1000, "batch_size": 1024, "learning_rate": 3e-3, "weight_decay": 0.01}
        return TrainConfig(**{**defaults, **changes})

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The training batch of a step: a function of (step, size, seed) alone, so a stream needs no state to resume.

        An epoch is as many whole batches as there are prompts for, in an order drawn from (seed, epoch); no prompt is seen
        twice in it, and those that fill no batch wait for another epoch.
        """
        train = self._train.on(torch.get_default_device())
        epoch, place = divmod(step, max(1, len(train) // size))
        order = torch.randperm(len(train), generator=stream(seed, epoch))
        rows = order[place * size : (place + 1) * size]
        return Batch(train.inputs.select(rows), train.positions[rows], train.targets[rows])

    @cached_property
    def _train(self) -> Copies[Batch]:
        """Every training prompt."""
        return Copies(as_batch(self.splits["train"]))


def as_batch(prompts: Prompts, rows: Tensor | None = None) -> Batch:
    """The prompts as a training batch that reads the answer at the final position."""
    rows = torch.arange(len(prompts)) if rows is None else rows
    inputs = prompts.inputs.select(rows)
    return Batch(inputs, inputs.roles["final"][:, None], prompts.answers[rows][:, None])
