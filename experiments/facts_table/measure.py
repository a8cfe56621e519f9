"""Measure which facts SmolLM2-135M knows, in which template; run by hand, the tables are committed (about 3 minutes).

    python experiments/facts_table/measure.py

Writes recall.csv beside this file (top-1 and top-5 share of the answer's first token per relation × template × prefix) and
interp/data/real_recall.csv (rank and probability per fact × template, with the prefix). Templates in
interp/data/real_templates.csv are to stand best first; the script says so when they do not.
"""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import torch

from interp.bridges import SMOLLM2_PREFIX, smollm2
from interp.record import write_atomic
from interp.tasks.facts import DATA, Prompts, real_facts
from interp.training.train import read

HERE = Path(__file__).parent


@torch.no_grad()
def ranks(model, prompts: Prompts, batch_size: int = 64) -> pd.DataFrame:
    """The prompts' table with rank (0 = top) and probability of the answer's first token."""
    rank, probability = [], []
    for begin in range(0, len(prompts), batch_size):
        inputs = prompts.inputs.select(slice(begin, begin + batch_size))
        chance = read(model, inputs, inputs.last()[:, None])[:, 0].softmax(-1)
        answer = chance.gather(-1, prompts.answers[begin : begin + batch_size][:, None])
        rank += (chance > answer).sum(-1).tolist()
        probability += answer[:, 0].tolist()
    return prompts.table.assign(rank=rank, probability=probability)


def main() -> None:
    model, tokenizer = smollm2()
    facts, rows = real_facts(templates=None), []
    forms = facts.templates.assign(template_text=facts.templates["template"])
    forms["template"] = forms.groupby("relation", sort=False).cumcount()
    for prefix in (SMOLLM2_PREFIX, ()):
        measured = ranks(model, facts.prompts(tokenizer, prefix=prefix))
        by = measured.groupby(["relation", "template"], sort=False)["rank"]
        summary = by.agg(
            n="size", top1=lambda rank: (rank < 1).mean(), top5=lambda rank: (rank < 5).mean()
        ).reset_index()
        rows.append(summary.assign(prefix=" ".join(map(str, prefix)) or "none"))
        if prefix:
            kept = measured[["relation", "subject", "object", "template", "rank", "probability"]]
            kept = kept.sort_values(["template", "relation"], kind="stable").assign(
                probability=kept["probability"].round(4)
            )
            write_atomic(DATA / "real_recall.csv", lambda path, kept=kept: kept.to_csv(path, index=False))
    table = pd.concat(rows).merge(forms[["relation", "template", "template_text"]], on=["relation", "template"])
    table = table[["relation", "template_text", "prefix", "n", "top1", "top5"]].round(3)
    write_atomic(HERE / "recall.csv", lambda path: table.to_csv(path, index=False))
    print(table.to_string(index=False))
    with_prefix = table[table["prefix"] != "none"].groupby("relation", sort=False)["top1"]
    wrong = [relation for relation, top in with_prefix if not top.is_monotonic_decreasing]
    print(f"templates not in order of recall: {wrong}" if wrong else "templates are in order of recall")


if __name__ == "__main__":
    main()
