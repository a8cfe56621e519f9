"""Facts: a set of (subject, relation, object) with templates, toy or real, and where each part stands.

Toy and real facts are the same class, so every analysis of a trained toy model runs unchanged on a real one.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.model.inputs import Inputs
from interp.tasks.task import Pairs
from interp.tokens import Tokenizer, as_tokenizer, pad

ROLES: tuple[str, ...] = ("subject", "subject_last", "relation", "final")
DATA = Path(__file__).parent.parent / "data"


class FactsError(ValueError):
    """Facts or templates that cannot be turned into prompts; the message names the prompt."""


@dataclass(frozen=True, eq=False)
class Prompts:
    """Prompts ready to run: inputs with roles, the first token of each answer [batch], and one table row each.

    roles: `subject` (first token of the subject), `subject_last`, `relation` (last token of the template's cue word),
    `final` (last real token, where the answer is predicted). answer_ids: every token of each answer, one tuple per prompt;
    empty where only first tokens are known.
    """

    inputs: Inputs
    answers: Tensor
    table: pd.DataFrame
    answer_ids: tuple[tuple[int, ...], ...] = ()

    def __len__(self) -> int:
        return len(self.table)

    def select(self, rows: Any) -> Prompts:
        """The prompts at `rows` (boolean mask or integer indices)."""
        index = np.flatnonzero(rows) if np.asarray(rows).dtype == bool else np.asarray(rows)
        chosen = torch.as_tensor(index)
        whole = tuple(self.answer_ids[int(row)] for row in index) if self.answer_ids else ()
        table = self.table.iloc[index].reset_index(drop=True)
        return Prompts(self.inputs.select(chosen), self.answers[chosen], table, whole)


@dataclass(frozen=True, eq=False)
class FactSet:
    """facts: columns relation, subject, object. templates: columns relation, template, cue.

    A template holds "{subject}"; the answer comes next as " " + object. cue is the word of the template that states
    the relation.
    """

    facts: pd.DataFrame
    templates: pd.DataFrame

    def __post_init__(self) -> None:
        _need_columns(self.facts, ("relation", "subject", "object"), "facts")
        _need_columns(self.templates, ("relation", "template", "cue"), "templates")
        bad = [t for t in self.templates["template"] if t.count("{subject}") != 1]
        if bad:
            raise FactsError(f"template {bad[0]!r} must hold '{{subject}}' once")
        unknown = sorted(set(self.facts["relation"]) - set(self.templates["relation"]))
        if unknown:
            raise FactsError(f"no template for relation {unknown[0]!r}; templates exist for "
                             f"{sorted(set(self.templates['relation']))}")  # fmt: skip

    def prompts(self, tokenizer: Any, prefix: Sequence[int] | None = None) -> Prompts:
        """Every fact in every template of its relation, tokenized, with roles located. Raises FactsError."""
        tokenizer = as_tokenizer(tokenizer)
        joined = self.facts.rename_axis("fact").reset_index().merge(_numbered(self.templates), on="relation")
        joined = joined.sort_values(["fact", "template"], kind="stable").reset_index(drop=True)
        start = len(prefix or ())
        rows, places, answers, texts = [], [], [], []
        for row in joined.itertuples():
            ids, place = locate(str(row.text), str(row.subject), str(row.cue), tokenizer)
            rows.append([*(prefix or ()), *ids])
            places.append([start + p for p in place])
            answers.append(answer_ids(str(row.object), tokenizer))
            texts.append(str(row.text).replace("{subject}", str(row.subject)))
        if not rows:
            raise FactsError("no facts, no prompts")
        roles: dict[str, Tensor] = dict(zip(ROLES, torch.tensor(places).T, strict=True))
        padded = pad(rows)
        table = joined.drop(columns=["text"]).assign(prompt=texts)
        inputs = Inputs(padded.tokens, mask=padded.mask, roles=roles)
        return Prompts(inputs, torch.tensor([ids[0] for ids in answers]), table, tuple(answers))


def locate(template: str, subject: str, cue: str, tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Token ids of the filled template, and the index of each role in ROLES, found by tokenizing growing prefixes.

    Raises FactsError where a part does not begin and end at a token boundary.
    """
    text = template.replace("{subject}", subject)
    ids = tokenizer.ids(text)
    before = template.index("{subject}")
    first = _count(text, before, ids, tokenizer)
    last = _count(text, before + len(subject), ids, tokenizer) - 1
    found = re.search(rf"(?<!\w){re.escape(cue)}(?!\w)", template.replace("{subject}", "\0" * len("{subject}")))
    if found is None:
        raise FactsError(f"cue {cue!r} is not a word of template {template!r}")
    at = found.start()
    end = at + len(cue) + (len(subject) - len("{subject}") if at > before else 0)
    return ids, [first, last, _count(text, end, ids, tokenizer) - 1, len(ids) - 1]


def _count(text: str, end: int, ids: list[int], tokenizer: Tokenizer) -> int:
    """How many tokens text[:end] is, trailing spaces belonging to the next token."""
    part = tokenizer.ids(text[:end].rstrip(" ")) if text[:end].strip() else []
    if ids[: len(part)] != part:
        raise FactsError(f"{text[:end]!r} does not end at a token boundary of {text!r}")
    return len(part)


def answer_ids(word: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    """The token ids of an answer as it follows a prompt. Raises FactsError for one without tokens."""
    ids = tuple(tokenizer.ids(" " + word))
    if not ids:
        raise FactsError(f"answer {word!r} has no tokens")
    return ids


def _numbered(templates: pd.DataFrame) -> pd.DataFrame:
    numbered = templates.rename(columns={"template": "text"})
    return numbered.assign(template=numbered.groupby("relation", sort=False).cumcount())


def _need_columns(table: pd.DataFrame, names: Sequence[str], what: str) -> None:
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise FactsError(f"{what} lacks column(s) {missing}; it has {list(table.columns)}")


def replacement_pairs(prompts: Prompts, seed: int = 0) -> Pairs:
    """Symmetric token replacement: pair each prompt with one of the same template, relation, length and role positions
    but another answer.

    Each prompt that has a partner is clean once; partners are drawn from `seed`. FactsError when none has one.
    """
    inputs, roles = prompts.inputs, prompts.inputs.roles
    length = inputs.last()
    keys = [prompts.table["relation"], prompts.table["template"], length.numpy(), *(roles[r].numpy() for r in ROLES)]
    groups = pd.Series(range(len(prompts))).groupby([np.asarray(key) for key in keys], sort=False)
    rng, answers = np.random.default_rng(seed), prompts.answers.numpy()
    clean, corrupted = [], []
    for _, rows in groups:
        members = rows.to_numpy()
        for row in members:
            others = members[answers[members] != answers[row]]
            if len(others):
                clean.append(row)
                corrupted.append(rng.choice(others))
    if not clean:
        raise FactsError(f"none of the {len(prompts)} prompts has a partner of equal length with another answer")
    a, b = prompts.select(np.array(clean)), prompts.select(np.array(corrupted))
    table = a.table.assign(corrupted_subject=b.table["subject"], corrupted_object=b.table["object"])
    table["corrupted_prompt"] = b.table["prompt"]
    return Pairs(a.inputs, b.inputs, a.answers, b.answers, table)


def real_facts(relations: Sequence[str] | None = None, templates: int | None = 1) -> FactSet:
    """True facts that ship with the package (source per row), with their first `templates` templates per relation.

    Raises FactsError for an unknown relation.
    """
    facts = pd.read_csv(DATA / "real_facts.csv", keep_default_na=False)
    forms = pd.read_csv(DATA / "real_templates.csv", keep_default_na=False)
    known = list(dict.fromkeys(facts["relation"]))
    unknown = [name for name in relations or () if name not in known]
    if unknown:
        raise FactsError(f"unknown relation {unknown[0]!r}; allowed: {', '.join(known)}")
    if relations is not None:
        facts, forms = facts[facts["relation"].isin(relations)], forms[forms["relation"].isin(relations)]
    if templates is not None:
        forms = forms.groupby("relation", sort=False).head(templates)
    return FactSet(facts.reset_index(drop=True), forms.reset_index(drop=True))
