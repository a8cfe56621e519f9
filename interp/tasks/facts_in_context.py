"""The toy task "facts-in-context" (SCIENCE T4): the questions of "facts", answered by the context and not by heart.

A prompt states a few facts, each as "first last relation value" with a value drawn anew, and then asks for one of them
in one of the templates of "facts", with the same words. Recall is the same, storage is none: what an analysis finds here
as in `ToyFacts` is not about stored facts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from interp.model.config import ModelConfig
from interp.model.inputs import Inputs
from interp.tasks.facts import Prompts
from interp.tasks.task import Batch, Goal, Pairs, TaskError, held_out, stream
from interp.tasks.toy_facts import FIRST, LAST, TEMPLATES, VALUES, ToyFacts, as_batch
from interp.tasks.train_config import TrainConfig
from interp.tokens import Vocabulary

RELATIONS, N_VALUES, STATEMENT, QUESTION = list(VALUES), 32, 4, 6  # a statement has 4 tokens, a question 6
STATED = ("stated_subject", "stated_subject_last", "stated_relation", "stated_value")


@dataclass(frozen=True, eq=False)
class Drawn:
    """What prompts say, as numbers: first, last (name), relation, value [batch fact]; which fact is asked, template [batch]."""

    first: Tensor
    last: Tensor
    relation: Tensor
    value: Tensor
    asked: Tensor
    template: Tensor

    def of_asked(self, part: Tensor) -> Tensor:
        """The asked fact's entry of `part` [batch fact] -> [batch]."""
        return part.gather(1, self.asked[:, None])[:, 0]

    def select(self, rows: Tensor) -> Drawn:
        """The prompts at `rows`."""
        return Drawn(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


@dataclass(frozen=True)
class FactsInContext:
    """`n_facts` facts (2 … 8) and a question about one; the words and token ids are those of `ToyFacts`.

    The facts are different corners of two first names x two last names x two relations, drawn evenly, and any of them may
    be asked: neither names nor relation alone, nor the context without the question, tells which. Their values differ.

    Roles: those of `ToyFacts` in the question (`subject`, `subject_last`, `relation`, `final`), and where the asked fact
    stands in the context (`stated_subject`, `stated_subject_last`, `stated_relation`, `stated_value`: the answer).
    """

    n_facts: int = 4
    name: Literal["facts-in-context"] = "facts-in-context"

    def __post_init__(self) -> None:
        if not 2 <= self.n_facts <= 8:
            raise TaskError(f"n_facts={self.n_facts} is not allowed; allowed: 2 … 8")

    @property
    def vocabulary(self) -> Vocabulary:
        """The one of `ToyFacts`."""
        return ToyFacts().vocabulary

    def draw(self, size: int, generator: torch.Generator) -> Drawn:
        """`size` prompts."""
        two = (_two(size, len(words), generator) for words in (FIRST, LAST, RELATIONS))
        corner = _some(size, self.n_facts, 8, generator)
        first, last, relation = (x.gather(1, corner >> bit & 1) for bit, x in enumerate(two))
        value = _some(size, self.n_facts, N_VALUES, generator)
        asked = torch.randint(self.n_facts, (size,), generator=generator)
        return Drawn(first, last, relation, value, asked, torch.randint(len(TEMPLATES), (size,), generator=generator))

    def inputs(self, drawn: Drawn) -> Inputs:
        """Tokens [batch 4·n_facts+6]: the statements, then the question; with roles."""
        device, size = drawn.asked.device, len(drawn.asked)
        ids = _token_ids(device)
        words = [ids["first"][drawn.first], ids["last"][drawn.last], ids["relation"][drawn.relation]]
        context = torch.stack([*words, ids["value"][drawn.relation, drawn.value]], 2).flatten(1)
        place = ids["place"][drawn.template]
        question = ids["frame"][drawn.template].scatter(1, place, torch.stack([drawn.of_asked(x) for x in words], 1))
        start = context.shape[1]
        roles: dict[str, Tensor] = dict(zip(("subject", "subject_last", "relation"), (start + place).T, strict=True))
        roles["final"] = torch.full((size,), start + QUESTION - 1, device=device)
        roles |= {name: STATEMENT * drawn.asked + i for i, name in enumerate(STATED)}
        return Inputs(torch.cat([context, question], 1), roles=roles)

    def answers(self, drawn: Drawn) -> Tensor:
        """The token of the asked fact's value [batch]."""
        return _token_ids(drawn.asked.device)["value"][drawn.of_asked(drawn.relation), drawn.of_asked(drawn.value)]

    def prompts(self, drawn: Drawn) -> Prompts:
        """The same as `Prompts`, which what reads a set of facts reads: columns relation, subject, object, template, prompt."""
        inputs, words = self.inputs(drawn), self.vocabulary.words
        asked = {name: drawn.of_asked(getattr(drawn, name)).tolist() for name in ("first", "last", "relation", "value")}
        table = pd.DataFrame({
            "relation": [RELATIONS[r] for r in asked["relation"]],
            "subject": [f"{FIRST[f]} {LAST[n]}" for f, n in zip(asked["first"], asked["last"], strict=True)],
            "object": [VALUES[RELATIONS[r]][v] for r, v in zip(asked["relation"], asked["value"], strict=True)],
            "template": drawn.template,
            "prompt": [" ".join(words[token] for token in row) for row in inputs.tokens.tolist()],
        })  # fmt: skip
        return Prompts(inputs, self.answers(drawn), table)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Fresh prompts, asked for their answer at the final position."""
        drawn = self.draw(size, stream(seed, step))
        inputs = self.inputs(drawn)
        return Batch(inputs, inputs.roles["final"][:, None], self.answers(drawn)[:, None])

    @cached_property
    def splits(self) -> Mapping[str, Prompts]:
        """`held_out`: 2,048 prompts that training does not draw."""
        return {"held_out": self.prompts(self.draw(2048, held_out()))}

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        return {name: as_batch(prompts) for name, prompts in self.splits.items()}

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """Every prompt of `splits`."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """99% of fresh prompts."""
        return (Goal("held_out", "accuracy", 0.99),)

    def pairs(self, n: int = 64, seed: int = 0, differ: Literal["value", "subject"] = "value") -> Pairs:
        """Fresh prompts and their corrupted versions, which differ in one of two things.

        value: the asked fact is stated with a value that the context does not hold (one token, at `stated_value`).
        subject: the question is about another person whose same relation is stated too (at `subject`, `subject_last`, or
        both); the context is the same. Roles are the clean prompt's.
        """
        if differ not in ("value", "subject"):
            raise TaskError(f"differ={differ!r} is not allowed; allowed: 'value', 'subject'")
        generator = held_out(1 + seed)
        clean = self.draw(16 * n, generator)
        same = clean.relation == clean.of_asked(clean.relation)[:, None]
        same.scatter_(1, clean.asked[:, None], False)
        rows = torch.arange(16 * n) if differ == "value" else same.any(1).nonzero()[:, 0]
        clean, same = clean.select(rows[:n]), same[rows[:n]]
        if differ == "value":
            unused = torch.rand(n, N_VALUES, generator=generator).scatter(1, clean.value, -1.0).argmax(1)
            corrupted = dataclasses.replace(clean, value=clean.value.scatter(1, clean.asked[:, None], unused[:, None]))
        else:
            other = torch.where(same, torch.rand(same.shape, generator=generator), -1.0).argmax(1)
            corrupted = dataclasses.replace(clean, asked=other)
        a, b = self.prompts(clean), self.prompts(corrupted)
        table = a.table.assign(corrupted_subject=b.table["subject"], corrupted_object=b.table["object"])
        inputs = dataclasses.replace(b.inputs, roles=a.inputs.roles)
        return Pairs(a.inputs, inputs, a.answers, b.answers, table.assign(corrupted_prompt=b.table["prompt"]))

    def model_config(self, **changes: Any) -> ModelConfig:
        """The model of `ToyFacts`, with room for the context."""
        return ToyFacts().model_config(**{"n_ctx": STATEMENT * self.n_facts + QUESTION, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """A start, not shown to reach the goal: 1,750 such steps find the relation (50%), not the person; `changes` override."""
        defaults: dict[str, Any] = {"steps": 10000, "batch_size": 128, "learning_rate": 3e-3}
        return TrainConfig(**{**defaults, **changes})


def _two(size: int, of: int, generator: torch.Generator) -> Tensor:
    """Two different ints of 0 … of−1 per row [size 2]."""
    one, shift = torch.randint(of, (size,), generator=generator), torch.randint(1, of, (size,), generator=generator)
    return torch.stack([one, (one + shift) % of], 1)


def _some(size: int, n: int, of: int, generator: torch.Generator) -> Tensor:
    """`n` different ints of 0 … of−1 per row, in random order [size n]: `distinct`, by a top-k that is quicker than a sort."""
    return torch.rand(size, of, generator=generator).topk(n, 1).indices


@cache
def _token_ids(device: torch.device) -> dict[str, Tensor]:
    """On a device: ids of first, last, relation [n], value [relation value]; of the templates, the words and the places of
    first, last and relation, frame [template 6] and place [template 3]."""
    ids = ToyFacts().vocabulary.ids
    asked = {"FIRST": FIRST[0], "LAST": LAST[0], "RELATION": RELATIONS[0]}
    forms = [str(form).replace("{subject}", "FIRST LAST").split() for form in TEMPLATES]
    lists = {"first": ids(" ".join(FIRST)), "last": ids(" ".join(LAST)), "relation": ids(" ".join(RELATIONS)),
             "value": [ids(" ".join(values)) for values in VALUES.values()],
             "frame": [ids(" ".join(asked.get(word, word) for word in form)) for form in forms],
             "place": [[form.index(word) for word in asked] for form in forms]}  # fmt: skip
    return {name: torch.tensor(rows, device=device) for name, rows in lists.items()}
