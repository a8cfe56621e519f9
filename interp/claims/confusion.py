"""Planted truth for the verdicts themselves: the registered rules on tables whose truth is known, and how often they are wrong.

Where a model without the effect costs nothing (it is untrained) the whole pipeline reads real models; where training is too dear
the readings are drawn from a stated distribution, and the row says "simulated"."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from interp.claims.claim import ALPHA, Reading, Tables
from interp.claims.registry import hypothesis
from interp.claims.run import hypotheses
from interp.stats import clopper_pearson
from interp.tasks.task import Batch

SEEDS = 10


@dataclass(frozen=True)
class Truth:
    """Tables of one planted truth. hypothesis: whose rule reads them. effect: what was planted, in words. wrong: outcomes
    that would be errors. how: "simulated" readings or real "models". make: draw -> tables of `SEEDS` seeds."""

    hypothesis: str
    effect: str
    wrong: tuple[str, ...]
    how: str
    make: Callable[[int], Tables]


def outcome(reading: Reading, primaries: int) -> str:
    """The verdict after the worst case of Holm's correction, in which every other primary has a larger p."""
    weak = reading.says == "supported" and reading.p is not None and reading.p * primaries >= ALPHA
    return "undecided" if weak else reading.says


def confusion(
    truths: Sequence[Truth], draws: int = 59, progress: Callable[[str], object] = lambda line: None
) -> pd.DataFrame:
    """One row per truth: hypothesis, effect, how, draws, supported, refuted, undecided, wrong (verdicts that the truth forbids),
    wrong_high (Clopper-Pearson, one-sided 95%), power (share of the verdict that is right; nan where none is)."""
    primaries, rows = sum(one.primary for one in hypotheses()), []
    for truth in truths:
        rule = hypothesis(truth.hypothesis).rule
        found = [outcome(rule(truth.make(draw)), primaries) for draw in range(draws)]
        counts = {says: found.count(says) for says in ("supported", "refuted", "undecided")}
        wrong = sum(counts[says] for says in truth.wrong)
        right = [says for says in ("supported", "refuted") if says not in truth.wrong]
        high = clopper_pearson(wrong, draws, 0.9).high  # two-sided 90%: its upper end is the one-sided 95% bound
        rows.append({"hypothesis": truth.hypothesis, "planted": truth.effect, "how": truth.how, "draws": draws, **counts,
                     "wrong": wrong, "wrong_high": high,
                     "power": counts[right[0]] / draws if len(right) == 1 else np.nan})  # fmt: skip
        progress(f"{truth.hypothesis}, {truth.effect}: {counts}, wrong {wrong} of {draws}")
    return pd.DataFrame(rows)


def _rng(truth: int, draw: int) -> np.random.Generator:
    return np.random.default_rng([truth, draw])


def special_tables(excess: float, draw: int, spread: float = 0.1) -> Tables:
    """Allocation curves whose logit lies `excess` above that of storage in proportion to size; spread over seeds, in logits."""
    from interp.claims.registry.facts import ARMS

    rng, rows = _rng(1, draw), []
    for optimizer in ("adamw", "sgd"):
        for seed in range(SEEDS):
            own = rng.normal(0, spread)
            for arm in ARMS:
                rho = float(arm)
                value = np.log(rho / (1 - rho)) + excess + own + rng.normal(0, spread)
                rows.append(
                    {"optimizer": optimizer, "seed": seed, "arm": arm, "rho": rho, "phi": 1 / (1 + np.exp(-value))}
                )
    return {"F2.curve": pd.DataFrame(rows)}


def most_tables(share: float, draw: int, slope: float = 0.85, intercept: float = 0.08) -> Tables:
    """A localiser that reads intercept + slope · s on planted mixtures, and models of which `share` lies in the FFNs."""
    rng = _rng(2, draw)
    planted = [{"localiser": "weight interchange", "kind": "storage", "seed": seed, "share": s,
                "reading": intercept + slope * s + rng.normal(0, 0.03)} for seed in range(6)
               for s in (0, 0.25, 0.5, 0.75, 1)]  # fmt: skip
    curve = [{"optimizer": "adamw", "arm": "0.67", "rho": 2 / 3, "seed": seed,
              "phi": intercept + slope * share + rng.normal(0, 0.02)} for seed in range(SEEDS)]  # fmt: skip
    return {"F2.planted": pd.DataFrame(planted), "F2.curve": pd.DataFrame(curve)}


def necessary_tables(gap: float, draw: int, spread: float = 0.8) -> Tables:
    """Twins whose held-out recall differs by `gap` points."""
    rng, rows = _rng(3, draw), []
    for seed in range(SEEDS):
        for arm, level in (("swiglu", 0.97), ("attention", 0.97 - gap / 100), ("relu", 0.97)):
            accuracy = float(level + rng.normal(0, spread / 100))
            rows += [{"arm": arm, "seed": seed, "step": 800, "exposures": 50.0, "split": split, "accuracy": accuracy}
                     for split in ("train", "held_out")]  # fmt: skip
    return {"F2.twins": pd.DataFrame(rows)}


def composition_tables(present: bool, draw: int) -> Tables:
    """Heads of two layers: one looks at the previous token and all of the next are induction heads; present: their
    K-composition is the largest, else every pair's is drawn alike."""
    rng, rows = _rng(4, draw), []
    for seed in range(SEEDS):
        rows.append({"what": "loss", "layers": 2, "seed": seed, "nats": 0.01})
        before = int(rng.integers(4))
        for earlier in range(4):
            for head in range(4):
                score = rng.normal(0.12, 0.01) + (0.1 if present and earlier == before else 0.0)
                rows.append({"what": "pair", "kind": "k", "seed": seed, "earlier_head": earlier, "head": head, "score": score,
                             "percentile": 100.0 if score > 0.15 else 50.0, "previous": 0.7 if earlier == before else 0.1,
                             "induction": 0.4, "nats": 0.01, "layers": 2})  # fmt: skip
    return {"R3": pd.DataFrame(rows)}


def depth_tables(present: bool, draw: int) -> Tables:
    """Shares of variance along nine places: falling and rising ones that cross, or noise."""
    rng, rows = _rng(5, draw), []
    for seed in range(SEEDS):
        for place in range(9):
            trend = place / 8 if present else 0.5
            rows.append({"place": place, "site": str(place), "seed": seed, "state": "trained",
                         "current": 1 - trend + rng.normal(0, 0.08), "next": trend + rng.normal(0, 0.08)})  # fmt: skip
    table = pd.DataFrame(rows)
    return {"R5.language": pd.concat([table, table.assign(state="untrained")])}


def agreement_tables(points: float, draw: int, neurons: int = 340) -> Tables:
    """Neurons whose values promote what follows their keys' prompt in `points` percent beyond the permuted pairing's .8%."""
    rng, rows = _rng(6, draw), []
    for state, extra in (("trained", points / 100), ("untrained", 0.0)):
        rows += [{"what": "agreement", "state": state, "seed": seed, "layer": 0, "sign": 1, "n": neurons, "null_mean": 0.008,
                  "agreement": rng.binomial(neurons, 0.008 + extra) / neurons} for seed in range(SEEDS)]  # fmt: skip
    return {"facts.reading": pd.DataFrame(rows)}


def alignment_tables(mass: float, draw: int) -> Tables:
    """Cross-attention of which `mass` lies on the true source position."""
    rng, rows = _rng(7, draw), []
    for task in ("copy", "reverse", "sort"):
        for seed in range(SEEDS):
            for half in ("choose", "read"):
                rows += [{"task": task, "seed": seed, "layer": layer, "head": 0, "half": half, "permuted": 0.1, "chance": 0.1,
                          "mass": float(np.clip((mass if layer else 0.1) + rng.normal(0, 0.02), 0, 1))}
                         for layer in (0, 1)]  # fmt: skip
    return {"A3": pd.DataFrame(rows)}


@torch.no_grad()
def untrained_overlaps(draw: int) -> Tables:
    """Real untrained models of the induction and the facts task: spaces that nobody has set apart."""
    from interp.claims.registry.stream import overlaps
    from interp.model.transformer import Transformer
    from interp.tasks import as_task
    from interp.tasks.toy_facts import ToyFacts

    configs = {
        "R3": as_task("induction").model_config(n_heads=4, positions="rotary"),  # type: ignore[call-overload]
        "facts.reading": ToyFacts(512).model_config(),
    }  # type: ignore[attr-defined]
    tables: dict[str, pd.DataFrame] = {}
    for study, config in configs.items():
        parts = []
        for seed in range(SEEDS):
            found = overlaps(Transformer(config, seed=1_000_000 + SEEDS * draw + seed))
            parts += [found.assign(what="overlap", state=state, seed=seed) for state in ("trained", "untrained")]
        tables[study] = pd.concat(parts)
    return tables


class _Fewer:
    """A task's first held-out examples alone: an untrained model's attention hardly differs between examples."""

    def __init__(self, task: Any, n: int = 64) -> None:
        whole = task.evaluation["held_out"]
        inputs = whole.inputs.select(torch.arange(n))
        self.evaluation = {"held_out": Batch(inputs, whole.positions[:n], whole.targets[:n])}
        self.alignment, self.model_config = task.alignment, task.model_config


@torch.no_grad()
def untrained_alignment(draw: int) -> Tables:
    """Real untrained encoder-decoders, which align nothing, read at 64 examples."""
    from interp.claims.registry.alignment import TASKS, masses
    from interp.model.transformer import Transformer
    from interp.tasks.rewriting import Rewriting

    parts = []
    for name in TASKS:
        task = _Fewer(Rewriting(name))
        for seed in range(SEEDS):
            model = Transformer(task.model_config(), seed=1_000_000 + SEEDS * draw + seed)
            parts.append(
                masses(model, task, seed).assign(task=name, seed=seed)  # type: ignore[arg-type]
            )
    return {"A3": pd.concat(parts)}


TRUTHS: tuple[Truth, ...] = (
    Truth("F2.special", "storage in proportion to size", ("supported",), "simulated", lambda draw: special_tables(0.0, draw)),
    Truth("F2.special", "FFNs hold more: +.4 logits", ("refuted",), "simulated", lambda draw: special_tables(0.4, draw)),
    Truth("F2.special", "FFNs hold less: -.4 logits", ("supported",), "simulated", lambda draw: special_tables(-0.4, draw)),
    Truth("F2.most", "half in FFNs", ("supported", "refuted"), "simulated", lambda draw: most_tables(0.5, draw)),
    Truth("F2.most", "2/3 in FFNs", ("refuted",), "simulated", lambda draw: most_tables(2 / 3, draw)),
    Truth("F2.most", "1/3 in FFNs", ("supported",), "simulated", lambda draw: most_tables(1 / 3, draw)),
    Truth("F2.necessary", "a gap of exactly 3 "
                          "points", ("supported", "refuted"), "simulated", lambda draw: necessary_tables(3, draw)),
    Truth("F2.necessary", "no gap", ("supported",), "simulated", lambda draw: necessary_tables(0, draw)),
    Truth("F2.necessary", "a gap of 6 points", ("refuted",), "simulated", lambda draw: necessary_tables(6, draw)),
    Truth("R3.composition", "no pair composes more", ("supported",), "simulated", lambda draw: composition_tables(False, draw)),
    Truth("R3.composition", "the pair composes", ("refuted",), "simulated", lambda draw: composition_tables(True, draw)),
    Truth("R4.overlap", "untrained models", ("supported",), "models", untrained_overlaps),
    Truth("R5.language", "no trend with depth", ("supported",), "simulated", lambda draw: depth_tables(False, draw)),
    Truth("R5.language", "falling and rising", ("refuted",), "simulated", lambda draw: depth_tables(True, draw)),
    Truth("F3.agreement", "exactly one point", ("supported", "refuted"), "simulated", lambda draw: agreement_tables(1, draw)),
    Truth("F3.agreement", "no agreement", ("supported",), "simulated", lambda draw: agreement_tables(0, draw)),
    Truth("F3.agreement", "5 points", ("refuted",), "simulated", lambda draw: agreement_tables(5, draw)),
    Truth("A3.mass", "untrained models", ("supported",), "models", untrained_alignment),
    Truth("A3.mass", "mass of .95", ("refuted",), "simulated", lambda draw: alignment_tables(0.95, draw)),
    Truth("A3.mass", "mass of exactly .8", ("supported", "refuted"), "simulated", lambda draw: alignment_tables(0.8, draw)),
)  # fmt: skip
"""Nulls (the rule must not say supported), effects (it must not say refuted), and boundaries (it should say neither; each
side errs in at most 2.5% of draws, so 5% in all)."""


def chosen(names: Iterable[str]) -> tuple[Truth, ...]:
    """The truths of some hypotheses, or all."""
    names = set(names)
    return tuple(truth for truth in TRUTHS if not names or truth.hypothesis in names)
