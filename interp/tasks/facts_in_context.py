"""The toy task "facts-in-context": the questions of "facts", answered by the context and not by heart.

A prompt states a few facts, each as "first last relation value" with a value drawn anew, and then asks for one of them
in one of the templates of "facts", with the same words. Recall is the same, storage is none: what an analysis finds here
as in `ToyFacts` is not about stored facts.

Learned from such prompts alone a model finds the relation and no more (experiments/LOG.md): to match a name takes heads in
two layers, neither of which is of use without the other. Training therefore begins with drills: many short questions per
prompt, each a last name alone, over few words at first, and all facts of one relation, so that nothing but the name tells
them apart."""

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
# Drills until a step: how many first and last names, values and relations they use. Then three steps in four are the task.
DRILLS = ((700, 16, 16, 1), (850, 32, 32, 1), (1000, 64, 32, 1), (1200, 64, 32, len(RELATIONS)))
SHORT = 8  # questions of a drill's prompt, before the one in a template
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
        return self._asked(first, last, relation, N_VALUES, generator)

    def _pairs(self, size: int, generator: torch.Generator) -> Drawn:
        """Prompts about two people with no name in common and two relations: names of one kind are enough."""
        corner = _some(size, self.n_facts, 4, generator)
        first, last, relation = (_two(size, len(words), generator) for words in (FIRST, LAST, RELATIONS))
        person, which = corner & 1, corner >> 1
        return self._asked(
            first.gather(1, person), last.gather(1, person), relation.gather(1, which), N_VALUES, generator
        )

    def _alike(self, size: int, names: int, values: int, relations: int, generator: torch.Generator) -> Drawn:
        """Prompts about different people with no name in common and one relation."""
        first, last = (_some(size, self.n_facts, names, generator) for _ in range(2))
        relation = torch.randint(relations, (size, 1), generator=generator).expand(-1, self.n_facts)
        return self._asked(first, last, relation, values, generator)

    def _asked(self, first: Tensor, last: Tensor, relation: Tensor, values: int, generator: torch.Generator) -> Drawn:
        """These facts with values drawn for them, and one of them asked for."""
        size = len(first)
        value = _some(size, self.n_facts, values, generator)
        asked = torch.randint(self.n_facts, (size,), generator=generator)
        return Drawn(first, last, relation, value, asked, torch.randint(len(TEMPLATES), (size,), generator=generator))

    def _drill(self, drawn: Drawn, both: bool, generator: torch.Generator) -> Batch:
        """The context, `SHORT` last names (or first ones as well) each asked for its fact's value, the question in a template."""
        whole, device = self.inputs(drawn), drawn.asked.device
        asked = torch.randint(self.n_facts, (len(drawn.asked), SHORT), generator=generator)
        values = _token_ids(device)["value"][drawn.relation, drawn.value]
        context, question = whole.tokens.split((STATEMENT * self.n_facts, QUESTION), 1)
        names = _token_ids(device)["last"][drawn.last.gather(1, asked)]
        if both:
            firsts = _token_ids(device)["first"][drawn.first.gather(1, asked)]
            names = torch.where(torch.rand(asked.shape, generator=generator) < 0.5, firsts, names)
        tokens = torch.cat([context, names, question], 1)
        places = torch.arange(context.shape[1], context.shape[1] + SHORT + 1, device=device)
        places[-1] = tokens.shape[1] - 1
        targets = torch.cat([values.gather(1, asked), self.answers(drawn)[:, None]], 1)
        return Batch(Inputs(tokens), places.expand(len(tokens), -1), targets)

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
        """Fresh prompts, asked for their answer at the final position; drills at first and every fourth step."""
        generator = stream(seed, step)
        stage = next((words for until, *words in DRILLS if step < until), None)
        if stage is not None or step % 4 == 0:
            names, values, relations = stage or (len(LAST), N_VALUES, len(RELATIONS))
            drawn = self._alike(size, names, values, relations, generator)
            return self._drill(drawn, names > DRILLS[0][1], generator)
        pairs = step % 4 == 2 and self.n_facts <= 4
        drawn = (self._pairs if pairs else self.draw)(size, generator)
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
        """The model of `ToyFacts`, with room for the context and for drills."""
        return ToyFacts().model_config(**{"n_ctx": STATEMENT * self.n_facts + SHORT + QUESTION, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """How it is learned on two CPU cores (measured: see docs/training.md); `changes` override."""
        defaults: dict[str, Any] = {"steps": 8000, "batch_size": 128, "learning_rate": 1e-3, "stop": "goals"}
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
