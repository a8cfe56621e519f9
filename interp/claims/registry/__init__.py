"""Every claim of the textbook with its hypotheses, and the studies that they are decided from."""

from __future__ import annotations

from interp.claims.claim import Claim, ClaimError, Hypothesis, Study
from interp.claims.registry import alignment, facts, gating, identities, norms, parameters, stream

_MODULES = (stream, parameters, facts, gating, norms, identities, alignment)
ORDER = ("R1", "R2", "R3", "R4", "R5", "R6", "F1", "F2", "F3", "F4", "N1", "N1b", "N2", "N3", "A1", "A2", "A3", "A4")


def _in_order(claims: list[Claim]) -> tuple[Claim, ...]:
    ids = [claim.id for claim in claims]
    if sorted(ids) != sorted(ORDER):
        raise ClaimError(f"the registry holds {sorted(ids)}; it must hold {sorted(ORDER)}, each once")
    return tuple(sorted(claims, key=lambda claim: ORDER.index(claim.id)))


CLAIMS: tuple[Claim, ...] = _in_order([claim for module in _MODULES for claim in module.CLAIMS])
"""In the textbook's order."""
STUDIES: dict[str, Study] = {study.name: study for module in _MODULES for study in module.STUDIES}
"""By name."""


def hypothesis(name: str) -> Hypothesis:
    """One by its id. Raises ClaimError."""
    found = {one.id: one for claim in CLAIMS for one in claim.hypotheses}
    if name not in found:
        raise ClaimError(f"no hypothesis {name!r}; there are {', '.join(found)}")
    return found[name]
