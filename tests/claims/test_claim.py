"""The hash of a rule, and a verdict's words."""

import math

import pytest

from interp.claims import STUDIES, Verdict, hypothesis, rule_hash
from interp.claims.claim import ClaimError, Hypothesis, Reading, Study

SMALL = 0.5


def measure(config, scratch):
    return None


def helper(x):
    return x > SMALL


def rule(tables):
    """What decides."""
    return Reading("supported" if helper(1) else "refuted", 1.0, 0.9, 1.1, 3)  # a comment


TEXTS = {"quantity": "q", "unit": "u", "prediction": "p", "null": "0", "statistic": "t", "falsified": "f", "scope": "s"}


def made(**changes):
    return Hypothesis(**{"id": "X.y", "rule": rule, "studies": ("S",), **TEXTS, **changes})


def study(units=None, function=measure):
    return {"S": Study("S", "?", function, units or {"quick": {"a": {"n": 1}}})}


def test_the_hash_changes_with_text_code_helpers_and_units_and_with_nothing_else():
    import interp.claims.registry.facts as facts

    mark = rule_hash(made(), study())
    assert len(mark) == 16
    assert mark == rule_hash(made(figure=print, shown=print), study())
    changed = [rule_hash(made(prediction="other"), study()), rule_hash(made(primary=True), study()),
               rule_hash(made(rule=facts.special), study()), rule_hash(made(), study({"quick": {"a": {"n": 2}}})),
               rule_hash(made(), study(function=helper))]  # fmt: skip
    assert len({mark, *changed}) == 6


def test_a_changed_helper_or_constant_of_the_package_changes_the_hash(monkeypatch):
    import interp.claims.registry.stream as stream

    before = rule_hash(hypothesis("R3.composition"), STUDIES)
    monkeypatch.setattr(stream, "LEAST", 0.1)
    assert rule_hash(hypothesis("R3.composition"), STUDIES) != before
    monkeypatch.undo()

    def composed(table):
        return table

    composed.__module__ = stream.__name__
    monkeypatch.setattr(stream, "composed", composed)
    assert rule_hash(hypothesis("R3.composition"), STUDIES) != before


def test_an_unknown_hypothesis_is_named():
    with pytest.raises(ClaimError, match=r"no hypothesis 'F9\.x'; there are R1"):
        hypothesis("F9.x")


def test_words_of_verdicts():
    one = Verdict("X.y", "supported", True, 0.5, 0.25, 0.75, 10, "points", 0.01, 0.04, "a note", "f" * 16, "before")
    assert one.words() == "0.5 [0.25, 0.75] points, n = 10; p = 0.01 (Holm 0.04); a note"
    assert "supported" in one._repr_html_()
    none = Verdict(
        "X.y", "not run", True, math.nan, math.nan, math.nan, 0, "points", None, None, "needs S", "", "not run"
    )
    assert none.words() == "needs S"
