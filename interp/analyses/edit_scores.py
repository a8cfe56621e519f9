"""How good an edit is (CounterFact, Meng et al. 2022): does it hold, in other words too, and does it leave neighbours alone?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.analyses.edit_controls import edited_logits, together
from interp.analyses.editing import Edit, EditError, Rewrite
from interp.model.transformer import Transformer
from interp.stats import t_half_width
from interp.tasks.facts import Prompts


@dataclass(frozen=True, eq=False)
class EditCase:
    """A fact to rewrite and what it is judged by: the same fact in other templates (`paraphrases`), other subjects of the
    same true answer (`neighbours`), and the same subject's other facts (`subject`; not in the published score, and where
    edits at the subject show). Each is a `Prompts`; one without rows is left out of the scores."""

    rewrite: Rewrite
    paraphrases: Prompts
    neighbours: Prompts
    subject: Prompts


def edit_cases(
    prompts: Prompts, facts: Sequence[int], templates: Sequence[int] | str, seed: int = 0, neighbours: int = 10
) -> list[EditCase]:
    """Cases from a fact set's prompts (`FactSet.prompts`), one per fact id. templates: those that state the rewrite, the
    others are paraphrases; a column name says per row which template is the paraphrase instead (the toy facts' "held_out").
    The new answer is drawn from `seed` among other objects of the relation; `neighbours`: at most so many. Raises
    EditError."""
    table, rng, found = prompts.table, np.random.default_rng(seed), []
    ids = prompts.answers.numpy()
    for fact in facts:
        mine = (table["fact"] == fact).to_numpy()
        if not mine.any():
            raise EditError(
                f"fact {fact!r} is not among these prompts; allowed: {table['fact'].min()} … {table['fact'].max()}"
            )
        row = table[mine].iloc[0]
        stated = (
            (table["template"] != table[templates]) if isinstance(templates, str) else table["template"].isin(templates)
        )
        stated = stated.to_numpy()
        related = (table["relation"] == row["relation"]).to_numpy()
        true = int(ids[mine][0])
        others = sorted({int(i) for i in ids[related]} - {true})
        n = int((mine & stated).sum())
        if not others or not n:
            raise EditError(
                f"fact {fact!r} has {len(others)} other answers and {n} prompts that state it; allowed: 1 or more of both"
            )
        near = np.flatnonzero(related & ~mine & stated & (ids == true))
        near = near if len(near) <= neighbours else np.sort(rng.choice(near, neighbours, replace=False))
        same = ((table["subject"] == row["subject"]).to_numpy()) & ~related & stated
        given = prompts.select(np.flatnonzero(mine & stated))
        name = f"{row['subject']} · {row['relation']}"
        rewrite = Rewrite(given.inputs, int(rng.choice(others)), true, name=name)
        found.append(EditCase(rewrite, prompts.select(np.flatnonzero(mine & ~stated)), prompts.select(near),
                              prompts.select(np.flatnonzero(same))))  # fmt: skip
    return found


@torch.no_grad()
def edit_scores(
    model: Transformer,
    cases: Sequence[EditCase],
    edits: Sequence[Edit | Sequence[Edit] | None],
    method: str | None = None,
) -> pd.DataFrame:
    """One row per case and prompt: case, fact, method, kind ("rewrite", "paraphrase", "neighbour", "subject"), prompt,
    p_target, p_true (the probability of the new and of the prompt's true answer), success (rewrite, paraphrase: p_target >
    p_true; neighbour, subject: p_true > p_target), kept (whether the true answer is still the most likely). edits: one per
    case, or several applied together; None is the unedited model. Raises EditError."""
    if len(edits) != len(cases):
        raise EditError(f"{len(edits)} edits for {len(cases)} cases are not allowed; allowed: one entry per case")
    frames = []
    for i, (case, edit) in enumerate(zip(cases, edits, strict=True)):
        many = [] if edit is None else [edit] if isinstance(edit, Edit) else list(edit)
        weights = together(many, model)
        name = method or (many[0].method if many else "unedited")
        target, true = case.rewrite.target, torch.full((case.rewrite.inputs.batch,), case.rewrite.true)
        parts = {"rewrite": (case.rewrite.inputs, true)}
        further = {"paraphrase": case.paraphrases, "neighbour": case.neighbours, "subject": case.subject}
        parts |= {kind: (prompts.inputs, prompts.answers) for kind, prompts in further.items() if len(prompts)}
        for kind, (inputs, answers) in parts.items():
            p = edited_logits(model, weights, inputs).softmax(-1).cpu()
            frames.append(_rows(p, target, answers, kind).assign(case=i, fact=case.rewrite.name, method=name))
    columns = ["case", "fact", "method", "kind", "prompt", "p_target", "p_true", "success", "kept"]
    return pd.concat(frames, ignore_index=True)[columns]


def _rows(p: Tensor, target: int, answers: Tensor, kind: str) -> pd.DataFrame:
    new, old = p[:, target], p.gather(1, answers[:, None].cpu())[:, 0]
    success = new > old if kind in ("rewrite", "paraphrase") else old > new
    return pd.DataFrame({"kind": kind, "prompt": range(len(p)), "p_target": new.tolist(), "p_true": old.tolist(),
                         "success": success.tolist(), "kept": (p.argmax(-1) == answers.cpu()).tolist()})  # fmt: skip


def edit_summary(scores: pd.DataFrame) -> pd.DataFrame:
    """The published table, one row per method: S (harmonic mean of ES, PS, NS), ES, EM, PS, PM, NS, NM in percent (success,
    and magnitude P(new) − P(true), for neighbours P(true) − P(new)), and SS, SM for the subject's other facts, with half
    widths of 95% t intervals in columns of the same name with "±"; n facts. The unit is the fact: prompts are averaged within
    it first."""
    letters = {"rewrite": "E", "paraphrase": "P", "neighbour": "N", "subject": "S"}
    signed = scores.assign(gain=(scores["p_target"] - scores["p_true"])
                           * scores["kind"].map(lambda kind: 1 if kind in ("rewrite", "paraphrase") else -1))  # fmt: skip
    rows = []
    for method, part in signed.groupby("method", sort=False):
        row: dict[str, object] = {"method": method}
        for kind, letter in letters.items():
            facts = part[part["kind"] == kind].groupby("case")[["success", "gain"]].mean() * 100.0
            for column, suffix in (("success", "S"), ("gain", "M")):
                values = facts[column].to_numpy(dtype=float)
                row[letter + suffix] = float(values.mean()) if len(values) else float("nan")
                n = len(values)
                half = t_half_width(values.std(ddof=1), n) if n > 1 else np.nan
                row[f"{letter}{suffix} ±"] = float(half)
        three = np.array([row["ES"], row["PS"], row["NS"]], dtype=float)
        row["S"] = (
            float(3 / (1 / three).sum()) if (three > 0).all() else (float("nan") if np.isnan(three).any() else 0.0)
        )
        rows.append({**row, "n": part["case"].nunique()})
    front = ["method", "S", *(f"{letter}{suffix}" for letter in "EPNS" for suffix in "SM")]
    table = pd.DataFrame(rows)
    return table[[*front, *(column for column in table.columns if column not in front)]]
