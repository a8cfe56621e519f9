"""Which facts a model knows, and what an edit of one must be judged on: paraphrases, neighbours, whole answers, attributes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.hookable import Hookable, require_head
from interp.metrics import wide
from interp.model.inputs import Inputs
from interp.run import prepare, run
from interp.tasks.facts import FactsError, FactSet, Prompts, answer_ids
from interp.tokens import as_tokenizer


@dataclass(frozen=True, eq=False)
class KnownFacts:
    """facts: the known ones alone, with every template asked. prompts: every fact in every template; scores: one row each.

    Columns of scores: those of the prompts' table, and rank (0 = top), probability (of the answer's first token), tokens (of the
    answer), answer_probability (exp(−mean NLL) of the whole answer), right, known (its fact is). The properties count facts.
    """

    facts: FactSet
    prompts: Prompts
    scores: pd.DataFrame
    min_right: int

    @property
    def n(self) -> int:
        """How many facts were asked."""
        return int(self.scores["fact"].nunique())

    @property
    def n_known(self) -> int:
        """How many are known."""
        return int(self.scores.loc[self.scores["known"], "fact"].nunique())

    @property
    def excluded(self) -> int:
        """How many are not."""
        return self.n - self.n_known

    def __repr__(self) -> str:
        counts = f"{self.n_known} of {self.n} facts right in at least {self.min_right} templates"
        return f"KnownFacts({counts}, {self.excluded} excluded)"

    def right_prompts(self) -> Prompts:
        """The prompts that are answered right, of known facts only."""
        return self.prompts.select((self.scores["right"] & self.scores["known"]).to_numpy())

    def by_relation(self) -> pd.DataFrame:
        """One row per relation: n, known, excluded (facts), right (share of all prompts)."""
        each = self.scores.groupby(["relation", "fact"], sort=False).agg(
            known=("known", "first"), right=("right", "mean")
        )
        found = each.groupby("relation", sort=False).agg(
            n=("known", "size"), known=("known", "sum"), right=("right", "mean")
        )
        return found.assign(excluded=found["n"] - found["known"])[["n", "known", "excluded", "right"]].reset_index()


def known_facts(
    model: Hookable,
    facts: FactSet | Prompts,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
    templates: Sequence[int] | None = None,
    min_right: int = 1,
    rank: int = 0,
    batch: int = 32,
) -> KnownFacts:
    """What a model knows: a fact is known if its answer's first token has at most this rank in at least `min_right` templates.

    facts: a FactSet with tokenizer and prefix, or its prompts. templates: numbers
    within the relation, default all. rank: 0 asks for the top token. Analyses of the known facts alone are conditional on that:
    state `excluded`. Raises FactsError.
    """
    require_head(model)
    if min_right < 1 or rank < 0:
        raise FactsError(
            f"min_right={min_right!r}, rank={rank!r} are not allowed; allowed: min_right >= 1 and rank >= 0"
        )
    if isinstance(facts, FactSet) and tokenizer is None:
        raise FactsError("tokenizer=None is not allowed with a FactSet; allowed: a tokenizer or a Vocabulary")
    prompts = facts.prompts(tokenizer, prefix) if isinstance(facts, FactSet) else facts
    if templates is not None:
        kept = prompts.table["template"].isin(list(templates)).to_numpy()
        if not kept.any():
            raise FactsError(
                f"templates={list(templates)!r} is not allowed; allowed: {sorted(set(prompts.table['template']))}"
            )
        prompts = prompts.select(kept)
    forms = prompts.table.drop_duplicates(["relation", "template"]).sort_values(["relation", "template"], kind="stable")
    forms = forms.assign(template=[_form(row) for row in forms.itertuples()])[["relation", "template", "cue"]]
    about = prompts.table.drop(columns=["rank", "probability"], errors="ignore").reset_index(drop=True)
    scores = pd.concat([about, answer_scores(model, prompts, batch)], axis=1)
    scores["right"] = scores["rank"] <= rank
    scores["known"] = scores.groupby("fact")["right"].transform("sum") >= min_right
    known = scores[scores["known"]].drop_duplicates("fact")
    extra = [
        "fact",
        "tokens",
        "answer_probability",
        "rank",
        "probability",
        "right",
        "known",
        "template",
        "prompt",
        "cue",
    ]
    table = known.drop(columns=[name for name in extra if name in known.columns]).reset_index(drop=True)
    return KnownFacts(FactSet(table, forms.reset_index(drop=True)), prompts, scores, min_right)


def _form(row: Any) -> str:
    """A prompt as its template; no template of ours has the subject's words outside of it."""
    return str(row.prompt).replace(str(row.subject), "{subject}", 1)


def answer_scores(model: Hookable, prompts: Prompts, batch: int = 32) -> pd.DataFrame:
    """Rank and probability of each answer's first token, and the probability of the whole answer; one row per prompt.

    Columns: rank (0 = top), probability, tokens (how many the answer has), answer_probability: exp(−mean NLL) over its tokens,
    each given the prompt and the ones before it (Meng et al. 2022). Without `answer_ids` the first token is the answer.
    """
    whole = prompts.answer_ids or tuple((int(one),) for one in prompts.answers)
    ranks, chances = [], []
    for start in range(0, len(prompts), batch):
        inputs = prepare(model, prompts.inputs.select(slice(start, start + batch)))
        logits = wide(run(model, inputs).logits[torch.arange(inputs.batch), inputs.last()])
        first = prompts.answers[start : start + batch].to(logits.device)[:, None]
        ranks += (logits > logits.gather(-1, first)).sum(-1).tolist()
        chances += logits.softmax(-1).gather(-1, first)[:, 0].tolist()
    nats = answer_nats(model, prompts.inputs, whole, batch)
    mean = [float(one.mean()) for one in nats]
    return pd.DataFrame({"rank": ranks, "probability": chances, "tokens": [len(ids) for ids in whole],
                         "answer_probability": np.exp(-np.array(mean))})  # fmt: skip


def answer_nats(model: Hookable, inputs: Inputs, answers: Sequence[Sequence[int]], batch: int = 32) -> list[Tensor]:
    """−ln P of every token of each answer after its prompt [token]: one pass over prompt and answer. Raises FactsError."""
    if len(answers) != inputs.batch or any(not len(ids) for ids in answers):
        raise FactsError(
            f"answers must hold at least one token id for each of {inputs.batch} prompts, got {len(answers)} entries"
        )
    if inputs.source is not None or inputs.embeddings is not None or inputs.segments is not None:
        raise FactsError("answers are appended to plain token prompts; these have a source, embeddings or segments")
    found: list[Tensor] = []
    for start in range(0, inputs.batch, batch):
        rows = range(start, min(start + batch, inputs.batch))
        part = prepare(model, _extended(inputs, answers, rows))
        last = inputs.select(list(rows)).last()
        scores = wide(run(model, part).logits).log_softmax(-1)
        for i, row in enumerate(rows):
            at = int(last[i]) + torch.arange(len(answers[row]))
            found.append(-scores[i, at, torch.tensor(answers[row])].cpu())
    return found


def _extended(inputs: Inputs, answers: Sequence[Sequence[int]], rows: Sequence[int]) -> Inputs:
    """The prompts with all but the last token of their answers appended, padded on the right."""
    last = inputs.last().tolist()
    length = max(last[row] + len(answers[row]) for row in rows)
    tokens = torch.zeros(len(rows), length, dtype=torch.long)
    mask = torch.zeros(len(rows), length, dtype=torch.bool)
    for i, row in enumerate(rows):
        n, more = last[row] + 1, list(answers[row])[:-1]
        tokens[i, : n + len(more)] = torch.tensor([*inputs.tokens[row, :n].tolist(), *more])
        mask[i, : n + len(more)] = True
        if inputs.mask is not None:
            mask[i, :n] = inputs.mask[row, :n].cpu()
    length_of = None if inputs.prefix_length is None else inputs.prefix_length[list(rows)]
    return Inputs(tokens, mask=None if bool(mask.all()) else mask, prefix_length=length_of)


def paraphrases(prompts: Prompts, row: int) -> Prompts:
    """The other templates of the fact asked in prompt `row`. FactsError when there is none."""
    about = _row(prompts, row)
    return _some(prompts, (prompts.table["fact"] == about["fact"]) & (prompts.table["template"] != about["template"]),
                 f"fact {about['fact']} has no other template")  # fmt: skip


def neighbours(
    prompts: Prompts, row: int, objects: Literal["same", "other"] = "same", n: int | None = None, seed: int = 0
) -> Prompts:
    """Prompts about other subjects with the relation and template of prompt `row`, which an edit of its fact must leave alone.

    objects: "same" (their answer is this fact's true answer, as in CounterFact) or "other". n: at most so many, drawn from
    `seed`. FactsError when there is none.
    """
    if objects not in ("same", "other"):
        raise FactsError(f"objects={objects!r} is not allowed; allowed: 'same', 'other'")
    about, table = _row(prompts, row), prompts.table
    alike = (
        (table["relation"] == about["relation"])
        & (table["template"] == about["template"])
        & (table["subject"] != about["subject"])
    )
    same = table["object"] == about["object"]
    found = np.flatnonzero(alike & (same if objects == "same" else ~same))
    if n is not None and len(found) > n:
        found = np.sort(np.random.default_rng(seed).choice(found, n, replace=False))
    chosen = np.isin(np.arange(len(table)), found)
    return _some(prompts, chosen, f"no other subject has the relation {about['relation']!r} and {objects} object")


def attribute_sets(facts: FactSet, tokenizer: Any, whole: bool = False) -> dict[str, tuple[int, ...]]:
    """Per subject the tokens of everything the facts say of it: first tokens of its values, with whole=True all their tokens."""
    tokenizer, found = as_tokenizer(tokenizer), dict[str, dict[int, None]]()
    for row in facts.facts.itertuples():
        ids = answer_ids(str(row.object), tokenizer)
        found.setdefault(str(row.subject), {}).update(dict.fromkeys(ids if whole else ids[:1]))
    return {subject: tuple(ids) for subject, ids in found.items()}


def _row(prompts: Prompts, row: int) -> pd.Series:
    missing = [
        name for name in ("fact", "template", "relation", "subject", "object") if name not in prompts.table.columns
    ]
    if missing:
        raise FactsError(f"the prompts' table lacks column(s) {missing}; it has {list(prompts.table.columns)}")
    if not isinstance(row, int | np.integer) or not 0 <= row < len(prompts):
        raise FactsError(f"row={row!r} is not allowed; allowed: 0 … {len(prompts) - 1}")
    return prompts.table.iloc[int(row)]


def _some(prompts: Prompts, chosen: Any, otherwise: str) -> Prompts:
    chosen = np.asarray(chosen, dtype=bool)
    if not chosen.any():
        raise FactsError(otherwise)
    return prompts.select(chosen)
