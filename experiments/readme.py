"""Write the generated parts of README.md and docs/sites.md: block and site table come from the code, so they cannot drift.

python experiments/readme.py
"""

from __future__ import annotations

import inspect
import re
import textwrap
from functools import cache
from pathlib import Path

import pandas as pd

from interp.claims import CLAIMS, Findings, run
from interp.model.block import PreNormBlock
from interp.report.claims import cell, markdown
from interp.sites import symbol_table

ROOT = Path(__file__).parents[1]
PARTS = {
    "README.md": ("block", "claims"),
    "docs/claims.md": ("verdicts",),
    "docs/sites.md": ("sites",),
    "docs/training.md": ("tasks",),
}


def parts() -> dict[str, str]:
    """Name of each marked part -> its text."""
    halves = [textwrap.dedent(inspect.getsource(half)).strip() for half in (PreNormBlock.mix, PreNormBlock.feed)]
    block = "\n\n\n".join(halves)
    found = verdicts()
    return {"block": f"```python\n{block}\n```", "sites": symbol_table(), "tasks": task_table(),
            "verdicts": markdown(found).strip(), "claims": claims_table(found)}  # fmt: skip


@cache
def verdicts() -> Findings:
    """What the committed tables of the standard profile say."""
    return run("standard", folder=ROOT / "experiments" / "results" / "claims", measure=False, progress=False)


def claims_table(found: Findings) -> str:
    """One line per claim: the verdict of the whole, or of each primary where there is no overall one, with the numbers."""
    lines = ["| | the textbook says | verdict | measured |", "|---|---|---|---|"]
    for claim in CLAIMS:
        counted = [one for one in claim.hypotheses if one.primary] or list(claim.hypotheses)
        mine = [found.verdicts[one.id] for one in counted]
        each = "; ".join(f"{one.id.partition('.')[2]} {one.outcome}" for one in mine)
        measured = "; ".join(text + (f" ({one.note})" if one.primary and one.outcome == "refuted" else "")
                             for one in mine if (text := cell(one)))  # fmt: skip
        lines.append(f"| {claim.id} | {claim.sentence} | {found.claims.get(claim.id, each)} | {measured} |")
    return "\n".join(lines)


def task_table() -> str:
    """What experiments/bench/tasks.py measured, one line per task: median over seeds."""
    table = pd.read_csv(ROOT / "experiments/bench/results/tasks/tasks.csv")
    lines = ["| task | model | learned when | steps | minutes, one core | seeds |", "|---|---|---|---|---|---|"]
    for task, rows in table.groupby("task", sort=False):
        met = rows.dropna(subset=["steps"])
        steps = f"{met['steps'].median():,.0f}" if len(met) else f"not in {rows['steps_allowed'].iloc[0]:,}"
        minutes = f"{met['seconds'].median() / 60:.1f}" if len(met) else "–"
        first = rows.iloc[0]
        lines.append(f"| `{task}` | {first['model']} | {first['goals'].replace('_', ' ')} | {steps} | {minutes} | "
                     f"{len(met)} of {len(rows)} |")  # fmt: skip
    return "\n".join(lines)


def filled(file: str) -> str:
    """The file's text with every marked part replaced. ValueError when a part is not marked."""
    text = (ROOT / file).read_text(encoding="utf-8")
    for name in PARTS[file]:
        part = parts()[name]
        pattern = rf"(<!-- {name}: [^>]*-->\n).*?(<!-- end -->)"
        text, count = re.subn(pattern, lambda found, part=part: f"{found[1]}{part}\n{found[2]}", text, flags=re.DOTALL)
        if count != 1:
            raise ValueError(f"{file} marks the part {name!r} {count} times; it must once")
    return text


if __name__ == "__main__":
    for file in PARTS:
        (ROOT / file).write_text(filled(file), encoding="utf-8")
