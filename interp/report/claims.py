"""The claims page: each sentence of the textbook with its verdict, what would have refuted it, and how to measure it again."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from interp.claims.claim import Claim, Hypothesis, Verdict
from interp.claims.registry import CLAIMS, STUDIES
from interp.claims.run import Findings, run
from interp.record import write_atomic, write_text
from interp.report.build import provenance_section
from interp.report.page import Section, render

TITLE = "What the textbook says, tested"
LEAD = (
    "Every sentence about the residual stream, facts in feed-forward layers, norms and architectures, with a verdict. The rule "
    "that decides each was written down and committed before the run that tested it. The unit is the trained seed unless a row "
    "says otherwise; intervals are 95%; p values of the primary hypotheses are corrected by Holm over all primaries of the "
    "registry, those that were not run included. Undecided is an honest answer."
)


def build(
    profile: str = "quick", only: Sequence[str] = (), folder: str | Path = "runs/claims", engine: str = "local",
    workers: int | None = None, measure: bool = True, say: Callable[[str], Any] = print,
) -> tuple[Path, Findings]:  # fmt: skip
    """Measure what is missing, decide, and write `folder`/<profile>.{html, csv, md} and figures; the page's path and what was
    found.

    Raises ClaimError."""
    started, folder = time.time(), Path(folder)
    found = run(profile, only, folder, engine, workers, measure, say=say)
    write_atomic(folder / f"{profile}.csv", lambda path: found.table().to_csv(path, index=False, float_format="%.6g"))
    write_text(folder / f"{profile}.md", markdown(found))
    sections = [_summary(found), *(_claim(claim, found, folder) for claim in CLAIMS), _not_run(found),
                provenance_section(folder / "pages" / profile, started,
                                   config={"profile": profile, "only": list(only)})]  # fmt: skip
    return render(folder / f"{profile}.html", TITLE, LEAD, sections), found


def lines(found: Findings) -> list[str]:
    """The verdicts as lines of text."""
    width = max(map(len, found.verdicts))
    return [f"{one.id:<{width}}  {one.outcome:<15}  {one.words()}" for one in found.verdicts.values()]


def markdown(found: Findings) -> str:
    """The verdicts as a Markdown table, for the README."""
    rows = ["| claim | hypothesis | verdict | estimate [95%] | n | p (Holm) |", "|---|---|---|---|---|---|"]
    for claim in CLAIMS:
        for one in claim.hypotheses:
            verdict = found.verdicts[one.id]
            p = "" if verdict.p_corrected is None else f"{verdict.p_corrected:.2g}"
            name = f"**{one.id}**" if one.primary else one.id
            rows.append(
                f"| {claim.sentence} | {name} | {verdict.outcome} | {cell(verdict)} | {verdict.n or ''} | {p} |"
            )
    return "\n".join(rows) + "\n"


def cell(verdict: Verdict) -> str:
    """`estimate` for a cell of a Markdown table, where a bar would end the cell."""
    return estimate(verdict).replace("|", "\\|")


def estimate(verdict: Verdict) -> str:
    """Estimate, interval and unit, or the one number of an identity; empty where nothing was run."""
    if verdict.outcome == "not run":
        return ""
    if verdict.low == verdict.high:
        return f"{verdict.estimate:.2g} {verdict.unit}"
    return f"{verdict.estimate:.3g} [{verdict.low:.3g}, {verdict.high:.3g}] {verdict.unit}"


def _summary(found: Findings) -> Section:
    section = Section("Verdicts")
    counts = pd.Series([one.outcome for one in found.verdicts.values()]).value_counts()
    section.finding(f"Profile {found.profile}: " + ", ".join(f"{n} {name}" for name, n in counts.items()) + ".")
    overall = [{"claim": claim.id, "sentence": claim.sentence, "overall": found.claims.get(claim.id, "no overall verdict")}
               for claim in CLAIMS]  # fmt: skip
    section.table(pd.DataFrame(overall), "Supported if every primary is, refuted if any is, else undecided.")
    rows = []
    for claim in CLAIMS:
        for one in claim.hypotheses:
            verdict = found.verdicts[one.id]
            rows.append({"claim": claim.id, "hypothesis": one.id.partition(".")[2] + (" (primary)" if one.primary else ""),
                         "verdict": verdict.outcome, "estimate": estimate(verdict), "n": verdict.n or None,
                         "Holm p": verdict.p_corrected, "rule committed": verdict.registered})  # fmt: skip
    section.table(pd.DataFrame(rows), "Primary hypotheses decide their claim; the others are beside it, uncorrected.")
    return section


def _claim(claim: Claim, found: Findings, folder: Path) -> Section:
    section = Section(f"{claim.id}: {claim.sentence}", short=claim.id)
    section.text(
        f"Source: {claim.source}. Overall: {found.claims.get(claim.id, 'its hypotheses stand for themselves')}."
    )
    shown: set[Any] = set()  # two hypotheses may share a figure
    for one in claim.hypotheses:
        verdict = found.verdicts[one.id]
        section.heading(f"{one.id}{' (primary)' if one.primary else ''}: {verdict.outcome}")
        section.finding(verdict.words())
        section.bullets(_asked(one, verdict))
        if verdict.outcome == "not run":
            continue
        tables = {name: found.tables[name] for name in one.studies}
        if one.figure is not None and (one.figure, one.studies) not in shown:
            shown.add((one.figure, one.studies))
            section.figure(
                one.figure(tables),
                folder / "pages" / found.profile / f"{one.id}.png",
                one.quantity[:1].upper() + one.quantity[1:],
            )
        if one.shown is not None:
            section.table(one.shown(tables), f"Behind {one.id}.")
    return section


def _asked(one: Hypothesis, verdict: Verdict) -> list[str]:
    parts = {
        "Measured": f"{one.quantity} ({one.unit})", "Predicted": one.prediction, "By chance": one.null, "Controls": one.controls,
        "Statistic": one.statistic, "Would have refuted it": one.falsified, "Scope": one.scope,
        "Rule": f"{verdict.rule}, committed: {verdict.registered}",
        "Again": f"interp claims --profile standard --only {one.id}",
    }  # fmt: skip
    return [f"{name}: {text}" for name, text in parts.items() if text]


def _not_run(found: Findings) -> Section:
    section = Section("What was not run")
    missing = {name: study for name, study in STUDIES.items() if name not in found.tables}
    if not missing:
        section.text("Nothing: every study of the registry was run.")
        return section
    rows = [{"study": name, "question": study.question, "profiles": ", ".join(study.units),
             "minutes on two cores": ", ".join(f"{profile} {n:g}" for profile, n in study.minutes.items())}
            for name, study in missing.items()]  # fmt: skip
    section.table(pd.DataFrame(rows), "Studies without a table in this profile; their hypotheses say not run.")
    return section
