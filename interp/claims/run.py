"""Run what is missing, decide by the registered rules, correct for how many there are."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from interp.claims.claim import (
    ALPHA,
    PROFILES,
    Claim,
    ClaimError,
    Hypothesis,
    Outcome,
    Reading,
    Study,
    Verdict,
    rule_hash,
)
from interp.claims.registry import CLAIMS, STUDIES
from interp.engines import run_units
from interp.record import provenance, write_json
from interp.stats import StatsError, holm

REGISTERED = "registered.json"
Say = Callable[[str], Any]


@dataclass(frozen=True)
class Findings:
    """Verdicts by hypothesis and by claim, and the tables that they were decided from."""

    profile: str
    verdicts: Mapping[str, Verdict]
    """Hypothesis id -> verdict."""
    claims: Mapping[str, Outcome]
    """Claim id -> outcome of the whole; claims without an overall one are left out."""
    tables: Mapping[str, pd.DataFrame]
    """Study -> its table, of those that were run."""

    def table(self) -> pd.DataFrame:
        """One row per hypothesis: claim, id, outcome, primary, estimate, low, high, n, unit, p, p_corrected, note, rule,
        registered."""
        rows = [{"claim": name.partition(".")[0], **asdict(verdict)} for name, verdict in self.verdicts.items()]
        return pd.DataFrame(rows)


def run(
    profile: str = "quick",
    only: Sequence[str] = (),
    folder: str | Path = "runs/claims",
    engine: str = "local",
    workers: int | None = None,
    measure: bool = True,
    progress: bool = True,
    say: Say = lambda line: None,
) -> Findings:
    """Measure the profile's studies that are missing in `folder`/<study>/<profile>, then decide.

    only: ids of claims or hypotheses, or names of studies; others are decided from what is there. measure=False decides from
    what is there alone. engine, workers: of `run_units`. A stopped run goes on where it was. Raises ClaimError.
    """
    folder, wanted = Path(folder), chosen(profile, only)
    tables: dict[str, pd.DataFrame] = {}
    registered: dict[str, dict[str, Any]] = {}
    for name, study in STUDIES.items():
        place = folder / name / profile
        units = study.units.get(profile)
        if not units:
            continue
        if measure and name in wanted:
            say(
                f"{name}: {study.question} ({len(units)} units, about {study.minutes.get(profile, 1):g} min on two cores)"
            )
            _register(place, study)
            tables[name] = run_units(study.measure, units, place, engine, workers, progress=progress)
        elif all((place / f"{unit}.parquet").exists() for unit in units):
            tables[name] = run_units(study.measure, units, place, "serial", progress=False)
        if (place / REGISTERED).exists():
            registered[name] = json.loads((place / REGISTERED).read_text())
    return decide(tables, registered, profile)


def chosen(profile: str, only: Iterable[str]) -> set[str]:
    """Names of the studies that are wanted. Raises ClaimError for a name that is none of claim, hypothesis or study."""
    if profile not in PROFILES:
        raise ClaimError(f"profile={profile!r} is not allowed; allowed: {', '.join(PROFILES)}")
    only = list(only)
    if not only:
        return set(STUDIES)
    by_name: dict[str, set[str]] = {name: {name} for name in STUDIES}
    for claim in CLAIMS:
        for hypothesis in claim.hypotheses:
            for name in (claim.id, hypothesis.id):
                by_name[name] = by_name.get(name, set()) | set(hypothesis.studies)
    if unknown := [name for name in only if name not in by_name]:
        raise ClaimError(f"only={unknown[0]!r} is not allowed; allowed: {', '.join(by_name)}")
    return set().union(*(by_name[name] for name in only))


def _register(place: Path, study: Study) -> None:
    """Before the first unit: the hash of every rule that will read the study, the commit, and what of the package differs."""
    if (place / REGISTERED).exists():
        return
    here = provenance()
    changed = [line for line in here["uncommitted"] if line[3:].strip('"').startswith("interp/")]
    rules = {one.id: rule_hash(one, STUDIES) for one in hypotheses() if study.name in one.studies}
    about = {"started": here["finished"], "versions": here["versions"], "machine": here["machine"]}
    write_json(
        place / REGISTERED,
        {"study": study.name, "rules": rules, "commit": here["commit"], "uncommitted": changed, **about},
    )


def hypotheses() -> list[Hypothesis]:
    """All registered hypotheses."""
    return [hypothesis for claim in CLAIMS for hypothesis in claim.hypotheses]


def decide(
    tables: Mapping[str, pd.DataFrame],
    registered: Mapping[str, Mapping[str, Any]] | None = None,
    profile: str = "standard",
) -> Findings:
    """Verdicts from tables alone: every rule, then Holm over all primaries (one that was not run counts with p = 1)."""
    readings: dict[str, Reading | None] = {}
    for one in hypotheses():
        readings[one.id] = _read(one, tables) if set(one.studies) <= set(tables) else None
    ps = {one.id: _p(readings[one.id]) for one in hypotheses() if one.primary}
    corrected = holm(ps)
    verdicts = {
        one.id: _verdict(one, readings[one.id], corrected.get(one.id), registered or {}) for one in hypotheses()
    }
    claims: dict[str, Outcome] = {claim.id: overall(claim, verdicts) for claim in CLAIMS if claim.overall}
    return Findings(profile, verdicts, claims, tables)


def _read(one: Hypothesis, tables: Mapping[str, pd.DataFrame]) -> Reading:
    """The rule's reading; undecided, with the reason, where its statistic is not defined (too few seeds, a run that diverged)."""
    try:
        return one.rule(tables)
    except StatsError as error:
        return Reading("undecided", math.nan, math.nan, math.nan, 0, None, f"cannot be read: {error}")


def _p(reading: Reading | None) -> float | None:
    return None if reading is None or reading.p is None or math.isnan(reading.p) else reading.p


def _verdict(
    one: Hypothesis, reading: Reading | None, corrected: float | None, registered: Mapping[str, Any]
) -> Verdict:
    mark = rule_hash(one, STUDIES)
    if reading is None:
        missing = ", ".join(one.studies)
        return Verdict(one.id, "not run", one.primary, math.nan, math.nan, math.nan, 0, one.unit, None, None,
                       f"needs {missing}", mark, "not run")  # fmt: skip
    outcome, note = reading.says, reading.note
    weak = one.primary and outcome == "supported" and (corrected is None or corrected >= ALPHA)
    if weak:
        outcome = "undecided"
        note = "; ".join(filter(None, [note, "the interval supports it, the corrected p does not"]))
    return Verdict(one.id, outcome, one.primary, reading.estimate, reading.low, reading.high, reading.n, one.unit, reading.p,
                   corrected if reading.p is not None else None, note, mark, _when(one, mark, registered))  # fmt: skip


def _when(one: Hypothesis, mark: str, registered: Mapping[str, Any]) -> str:
    """Whether each study's run began with this rule committed."""
    for name in one.studies:
        found = registered.get(name)
        if found is None or not found.get("commit"):
            return "unknown: not run in a git checkout"
        if found["rules"].get(one.id) != mark:
            return f"no: the rule changed after {name} was run"
        if found["uncommitted"]:
            return f"no: {len(found['uncommitted'])} files of the package were not committed when {name} was run"
    return "before"


def overall(claim: Claim, verdicts: Mapping[str, Verdict]) -> Outcome:
    """supported if every primary is, refuted if any is, else undecided; without primaries, by its only kind of outcome."""
    mine = [verdicts[one.id] for one in claim.hypotheses]
    counted = [one.outcome for one in mine if one.primary] or [one.outcome for one in mine]
    if "refuted" in counted:
        return "refuted"
    for outcome in ("by construction", "supported", "not run"):
        if all(one == outcome for one in counted):
            return outcome
    return "undecided"
