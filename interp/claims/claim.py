"""What a claim is: sentences, the rule that decides each, and what came out.

A rule is written and committed before the run that tests it; `rule_hash` is what the results carry to show that.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd

Says = Literal["supported", "refuted", "undecided", "by construction"]
Outcome = Literal["supported", "refuted", "undecided", "by construction", "not run"]
Profile = Literal["quick", "standard", "full"]
PROFILES: tuple[Profile, ...] = ("quick", "standard", "full")
ALPHA = 0.05
Tables = Mapping[str, pd.DataFrame]
"""Study name -> its units' tables below each other."""


class ClaimError(ValueError):
    """A claim, study or profile that is not there; the message says what is."""


@dataclass(frozen=True)
class Study:
    """Independent units of measurement that one or more hypotheses are decided from.

    measure: `(config, scratch) -> tidy table`, one row per measurement with raw values and a column `seed`. units: profile ->
    unit name -> config (JSON values); a profile that is missing is one in which the study is not run. minutes: profile -> about
    how long on two cores.
    """

    name: str
    question: str
    measure: Callable[[Any, Path], pd.DataFrame]
    units: Mapping[str, Mapping[str, Mapping[str, Any]]]
    minutes: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Reading:
    """What a rule reads from the tables, before other hypotheses are considered.

    says: where the interval lies. estimate, low, high: in the hypothesis's unit (95%). n: units (trained seeds unless its text
    says otherwise). p: of the null, two-sided unless said; None where there is no test (identities, arithmetic).
    """

    says: Says
    estimate: float
    low: float
    high: float
    n: int
    p: float | None = None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Hypothesis:
    """One decidable sentence of a claim.

    id: "F2.necessary". quantity, unit: what is measured. prediction: what the claim says it will be. null: what it would be by
    chance. controls, statistic: how. smallest: the smallest effect of interest, in `unit`, where there is one. falsified: what
    would refute it. scope: models, task and sizes that the verdict is about. primary: decides the claim, and counts in Holm's
    correction whether it was run or not. studies: names of those that `rule` reads. figure: tables -> matplotlib figure.
    """

    id: str
    quantity: str
    unit: str
    prediction: str
    null: str
    statistic: str
    falsified: str
    scope: str
    rule: Callable[[Tables], Reading]
    studies: tuple[str, ...]
    controls: str = ""
    smallest: float | None = None
    primary: bool = False
    figure: Callable[[Tables], Any] | None = None
    shown: Callable[[Tables], pd.DataFrame] | None = None
    """tables -> the small table that a reader sees beside the verdict."""

    @property
    def claim(self) -> str:
        """The claim's id."""
        return self.id.partition(".")[0]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A sentence of the textbook, in our words, and the hypotheses that decide it.

    overall: False where only the hypotheses have verdicts (F2).
    """

    id: str
    sentence: str
    source: str
    hypotheses: tuple[Hypothesis, ...]
    overall: bool = True


@dataclass(frozen=True)
class Verdict:
    """A hypothesis, or a whole claim, with what came out. `p_corrected`: Holm over all primaries of the registry."""

    id: str
    outcome: Outcome
    primary: bool
    estimate: float
    low: float
    high: float
    n: int
    unit: str
    p: float | None
    p_corrected: float | None
    note: str
    rule: str
    registered: str
    """"before": the rule was committed, as it is, when the run began; else why that cannot be said."""

    def _repr_html_(self) -> str:
        colour = {"supported": "#1a7f37", "refuted": "#b3261e", "undecided": "#8a6d00", "by construction": "#1f5fa8"}
        shade = colour.get(self.outcome, "#666")
        return (f'<div><b>{self.id}</b> <span style="color:{shade}">{self.outcome}</span>: {self.words()}</div>')  # fmt: skip

    def words(self) -> str:
        """Estimate, interval, n, p and note in one line."""
        if self.outcome == "not run":
            return self.note or "not run"
        parts = [f"{self.estimate:.3g} [{self.low:.3g}, {self.high:.3g}] {self.unit}, n = {self.n}"]
        if self.p is not None:
            corrected = "" if self.p_corrected is None else f" (Holm {self.p_corrected:.2g})"
            parts.append(f"p = {self.p:.2g}{corrected}")
        return "; ".join([*parts, *([self.note] if self.note else [])])


def rule_hash(hypothesis: Hypothesis, studies: Mapping[str, Study]) -> str:
    """16 hex digits over what decides: the hypothesis's declared text, its rule's code with the helpers and constants of this
    package that it uses, and each study's code and units. Comments, docstrings and formatting do not count."""
    texts = (
        "id",
        "quantity",
        "unit",
        "prediction",
        "null",
        "statistic",
        "falsified",
        "scope",
        "controls",
        "smallest",
        "primary",
    )
    parts: list[Any] = [[getattr(hypothesis, name) for name in texts], _with_helpers(hypothesis.rule)]
    parts += [[name, _code(studies[name].measure), studies[name].units] for name in hypothesis.studies]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:16]


def _with_helpers(function: Callable[..., Any]) -> dict[str, str]:
    """Name -> code of the function and of what it uses of `interp.claims`, and the constants among them."""
    found: dict[str, str] = {}
    todo = [function]
    while todo:
        one = todo.pop()
        name = f"{one.__module__}.{one.__qualname__}"
        if name in found:
            continue
        found[name] = _code(one)
        for used in sorted(_names(one.__code__)):
            value = one.__globals__.get(used)
            if inspect.isfunction(value) and value.__module__.startswith("interp.claims"):
                todo.append(value)
            elif used.isupper() and isinstance(value, int | float | str | tuple):
                found[f"{one.__module__}.{used}"] = repr(value)
    return found


def _names(code: Any) -> set[str]:
    """Global names that a function uses, in its nested functions too."""
    inner = [constant for constant in code.co_consts if inspect.iscode(constant)]
    return set(code.co_names).union(*(_names(one) for one in inner))


def _code(function: Callable[..., Any]) -> str:
    """The function's source without comments, docstrings and formatting."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.unparse(tree)
