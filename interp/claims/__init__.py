"""Claims of the textbook with verdicts, models whose truth is known, and what each localiser reads there."""

from interp.claims.claim import PROFILES, Claim, ClaimError, Hypothesis, Reading, Study, Verdict, rule_hash
from interp.claims.registry import CLAIMS, STUDIES, hypothesis
from interp.claims.run import Findings, decide, run

__all__ = [
    "CLAIMS", "PROFILES", "STUDIES", "Claim", "ClaimError", "Findings", "Hypothesis", "Reading", "Study", "Verdict", "decide",
    "hypothesis", "rule_hash", "run",
]  # fmt: skip
