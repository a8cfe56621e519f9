"""Deciding: Holm over all primaries, run or not; rules that were committed; studies chosen, measured once and resumed."""

import json
from pathlib import Path

import pandas as pd
import pytest

from interp.claims import CLAIMS, STUDIES, ClaimError, confusion, decide, rule_hash
from interp.claims import run as run_claims  # the function, not the module
from interp.claims.claim import Reading
from interp.claims.run import chosen, hypotheses, overall
from interp.engines.results import read_about

RESULTS = Path(__file__).parents[2] / "experiments" / "results" / "claims"
TABLES = {**confusion.special_tables(0.4, 0), **confusion.alignment_tables(0.95, 0)}


def test_every_claim_of_the_textbook_is_registered_once_and_can_be_decided():
    ids = [claim.id for claim in CLAIMS]
    assert ids == [
        "R1",
        "R2",
        "R3",
        "R4",
        "R5",
        "R6",
        "F1",
        "F2",
        "F3",
        "F4",
        "N1",
        "N1b",
        "N2",
        "N3",
        "A1",
        "A2",
        "A3",
        "A4",
    ]
    names = [one.id for one in hypotheses()]
    assert len(set(names)) == len(names)
    for claim in CLAIMS:
        for one in claim.hypotheses:
            assert one.claim == claim.id
            assert set(one.studies) <= set(STUDIES)
            assert all(
                getattr(one, name)
                for name in ("quantity", "unit", "prediction", "null", "statistic", "falsified", "scope")
            )
    primaries = [one.id for one in hypotheses() if one.primary]
    assert primaries == ["R3.composition", "R4.overlap", "R5.language", "F2.most", "F2.special", "F2.necessary", "F3.agreement",
                         "F4.language", "N2.h1", "N2.h3", "N3.language", "A3.mass"]  # fmt: skip


def test_holm_counts_primaries_that_were_not_run():
    found = decide(TABLES)
    special, mass = found.verdicts["F2.special"], found.verdicts["A3.mass"]
    assert (special.outcome, mass.outcome) == ("supported", "supported")
    assert special.p == mass.p == 2 / 2**10
    assert special.p_corrected == pytest.approx(12 * 2 / 2**10)
    assert found.verdicts["F3.agreement"].outcome == "not run"
    assert found.claims["A3"] == "supported"
    assert found.claims["R3"] == "not run"
    assert "F2" not in found.claims  # three rows and no overall one
    assert len(found.table()) == len(hypotheses())


def test_an_interval_without_a_corrected_p_is_undecided():
    few = {name: table[table["seed"] < 6] for name, table in TABLES.items()}
    verdict = decide(few).verdicts["F2.special"]
    assert verdict.outcome == "undecided"
    assert "the corrected p does not" in verdict.note


def test_when_a_rule_was_committed():
    mark = {one.id: rule_hash(one, STUDIES) for one in hypotheses()}["F2.special"]
    about = {"rules": {"F2.special": mark}, "commit": "abc", "uncommitted": []}
    when = lambda **changes: decide(TABLES, {"F2.curve": {**about, **changes}}).verdicts["F2.special"].registered  # noqa: E731
    assert when() == "before"
    assert when(rules={"F2.special": "0" * 16}) == "no: the rule changed after F2.curve was run"
    assert (
        when(uncommitted=[" M interp/run.py"]) == "no: 1 files of the package were not committed when F2.curve was run"
    )
    assert when(commit="") == "unknown: not run in a git checkout"


def test_the_whole_claim_follows_its_primaries():
    claim = next(claim for claim in CLAIMS if claim.id == "N2")
    verdicts = dict(decide({}).verdicts)
    outcome = lambda **given: overall(claim, {**verdicts, **{f"N2.{name}": _with(verdicts[f"N2.{name}"], says)  # noqa: E731
                                                             for name, says in given.items()}})  # fmt: skip
    assert outcome() == "not run"
    assert outcome(h1="supported") == "undecided"
    assert outcome(h1="supported", h3="supported", h2="refuted") == "supported"
    assert outcome(h1="supported", h3="refuted") == "refuted"


def _with(verdict, says):
    from dataclasses import replace

    return replace(verdict, outcome=says)


def test_names_of_claims_hypotheses_and_studies_choose():
    assert chosen("standard", ["F2"]) == {"F2.curve", "F2.twins", "F2.planted"}
    assert chosen("standard", ["F2.special"]) == {"F2.curve"}
    assert chosen("quick", ["A3", "facts.reading"]) == {"A3", "facts.reading"}
    assert chosen("quick", []) == set(STUDIES)
    with pytest.raises(ClaimError, match=r"only='F7' is not allowed; allowed: "):
        chosen("quick", ["F7"])
    with pytest.raises(ClaimError, match="profile='slow' is not allowed; allowed: quick, standard, full"):
        chosen("slow", [])


def test_a_study_is_registered_before_its_units_and_not_measured_again(tmp_path):
    say: list[str] = []
    found = run_claims("quick", ["F1"], tmp_path, "serial", progress=False, say=say.append)
    assert found.verdicts["F1.blocks"].outcome != "not run"
    assert say and say[0].startswith("F1: ")
    about = json.loads((tmp_path / "F1" / "quick" / "registered.json").read_text())
    assert set(about["rules"]) == {"F1.blocks", "F1.total"}
    path = next((tmp_path / "F1" / "quick").glob("*.parquet"))
    before = path.stat().st_mtime_ns
    again = run_claims("quick", [], tmp_path, "serial", measure=False, progress=False)
    assert path.stat().st_mtime_ns == before
    pd.testing.assert_frame_equal(found.tables["F1"], again.tables["F1"])
    assert again.verdicts["A3.mass"].outcome == "not run"


def test_committed_results_carry_the_hash_of_the_committed_rule():
    registered = sorted(RESULTS.glob("*/*/registered.json"))
    rules = {one.id: rule_hash(one, STUDIES) for one in hypotheses()}
    for path in registered:
        about = json.loads(path.read_text())
        assert about["uncommitted"] == [], path
        assert about["commit"], path
        expected = {one.id: rules[one.id] for one in hypotheses() if about["study"] in one.studies}
        assert about["rules"] == expected, path
        for unit in path.parent.glob("*.parquet"):
            assert read_about(unit)["driver"]["commit"], unit
    assert registered, f"no committed results in {RESULTS}"


def test_a_rule_without_p_keeps_its_outcome():
    import sys

    module = sys.modules["interp.claims.run"]  # the package shows the function of that name

    one = next(one for one in hypotheses() if one.id == "R1.sum")
    reading = Reading("by construction", 1e-15, 1e-15, 1e-15, 60)
    verdict = module._verdict(one, reading, None, {})
    assert (verdict.outcome, verdict.p, verdict.p_corrected) == ("by construction", None, None)
