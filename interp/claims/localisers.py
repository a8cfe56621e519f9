"""Localisers under test: each reads the FFNs' share of some facts from a model, as its own method would.

Storage: what weights hold (weight interchange, relearning, read-out). Mediation: what carries the answer through a forward pass
(patching, causal tracing, ablation)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
import pandas as pd
import torch

from interp.analyses.causal_trace import causal_trace
from interp.analyses.logit_attribution import direct_logit_attribution
from interp.analyses.shares import site_shares, weight_shares
from interp.claims.planted import PARTS, Mixture, drawn
from interp.interventions import Zero
from interp.metrics import Metric, evaluate, logit_difference
from interp.run import run
from interp.sweep import run_many
from interp.tasks.facts import Prompts, replacement_pairs
from interp.tasks.task import Pairs
from interp.tasks.train_config import TrainConfig
from interp.training.ensemble import Ensemble

Kind = Literal["storage", "mediation"]
Reading = dict[str, float]


def _read(ffn: float, attention: float) -> Reading:
    """The FFNs' share of what the two add up to, and both."""
    return {"reading": ffn / (ffn + attention), "value_ffn": ffn, "value_attention": attention}


def _pairs(one: Mixture, prompts: int) -> tuple[Pairs, Metric]:
    """Pairs of planted facts in the template that was never seen with the fact, drawn by the mixture's seed."""
    rows = np.random.default_rng([one.seed, 7]).permutation(len(one.held_out))[:prompts]
    pairs = replacement_pairs(one.held_out.select(np.sort(rows)), seed=one.seed)
    return pairs, logit_difference(pairs.correct, pairs.wrong, pairs.clean.last())


def interchange(one: Mixture, prompts: int) -> Reading:
    """Weight interchange with the common ancestor: Shapley value of each group's change on the logit difference."""
    pairs, metric = _pairs(one, prompts)
    found = weight_shares(one.base, one.model, pairs.clean, metric, ("ffn", "attention"))
    return _read(*(float(value.mean()) for value in found.values))


def read_out(one: Mixture, prompts: int) -> Reading:
    """Direct logit attribution at the last token: what FFNs and what heads write towards the answer."""
    pairs, _ = _pairs(one, prompts)
    table = direct_logit_attribution(one.model, pairs.clean, pairs.correct, pairs.wrong, position="final")
    by = (
        table.assign(part=table["component"].str.extract(r"\.(ffn|attn)$", expand=False))
        .groupby("part")["attribution"]
        .sum()
    )
    return _read(float(by["ffn"]) / len(pairs), float(by["attn"]) / len(pairs))


def patching(one: Mixture, prompts: int) -> Reading:
    """Symmetric replacement, denoising: Shapley value of all FFN outputs and all attention outputs."""
    pairs, metric = _pairs(one, prompts)
    found = site_shares(
        one.model, pairs.clean, pairs.corrupted, metric, {"ffn": ["ffn_out"], "attention": ["attn_out"]}, check=0
    )
    return _read(*(float(value.mean()) for value in found.values))


def tracing(one: Mixture, prompts: int) -> Reading:
    """Causal tracing by noise: the mean restored logit difference of FFN and attention outputs at the subject's last token,
    summed over layers."""
    pairs, _ = _pairs(one, min(prompts, 60))
    table = causal_trace(
        one.model, pairs, corruption="noise", noise_seeds=3, sites=("ffn_out", "attn_out"), check=0
    ).table()
    mine = table[(table["metric"] == "logit_difference") & (table["role"] == "subject_last")]
    effect = (
        mine.assign(effect=mine["value"] - mine["corrupted"])
        .groupby(["site", "layer"])["effect"]
        .mean()
        .groupby("site")
        .sum()
    )
    return _read(float(effect["ffn_out"]), float(effect["attn_out"]))


def ablation(one: Mixture, prompts: int) -> Reading:
    """Zero ablation: what the logit difference loses without all FFNs, and without all attention, of its own."""
    pairs, metric = _pairs(one, prompts)
    layers = range(one.model.config.n_layers)
    cells = {name: [Zero(f"{layer}.{name}") for layer in layers] for name in ("ffn_out", "attn_out")}
    found = run_many(one.model, pairs.clean, cells, metric, check=0)
    lost = (found.clean - found.values["cells"]).mean(-1)
    return _read(*lost.tolist())


LOCALISERS: dict[str, tuple[Kind, Callable[[Mixture, int], Reading]]] = {
    "weight interchange": ("storage", interchange),
    "read-out": ("storage", read_out),
    "patching, replacement": ("mediation", patching),
    "causal tracing, noise": ("mediation", tracing),
    "zero ablation": ("mediation", ablation),
}
"""Name -> (kind, reading of one mixture from so many prompts); `relearning` reads many at once."""


def relearning(
    mixtures: Sequence[Mixture], steps: int = 60, learning_rate: float = 1e-3, batch_size: int = 128
) -> pd.DataFrame:
    """Every planted fact gets another answer, which is learned for `steps` steps with nothing but the FFNs trainable, or
    nothing but OV: the gain in logit difference, new − old, of each. Columns seed, share, reading, value_ffn,
    value_attention."""
    changed = [_changed(one) for one in mixtures]
    gains: dict[str, list[float]] = {}
    for part, groups in PARTS.items():
        config = TrainConfig(
            steps=steps, batch_size=batch_size, learning_rate=learning_rate, weight_decay=0.0, trainable=groups
        )
        ensemble = Ensemble([one.model for one in mixtures], [replace(config, seed=one.seed) for one in mixtures])
        for step in range(steps):
            ensemble.step(
                [drawn(new, step, batch_size, one.seed) for new, one in zip(changed, mixtures, strict=True)], step
            )
        gains[part] = [
            _gain(one, after, new) for one, after, new in zip(mixtures, ensemble.unstack(), changed, strict=True)
        ]
    rows = [{"seed": one.seed, "share": one.share, **_read(ffn, attention)}
            for one, ffn, attention in zip(mixtures, gains["ffn"], gains["attention"], strict=True)]  # fmt: skip
    return pd.DataFrame(rows)


def _changed(one: Mixture) -> Prompts:
    """The planted training prompts with other answers: in each relation the answers of another fact, by the mixture's seed."""
    old, rng = one.train.answers.numpy(), np.random.default_rng([one.seed, 11])
    new = old.copy()
    for _, rows in one.train.table.groupby("relation"):
        values = np.unique(old[rows.index.to_list()])
        for _, mine in rows.groupby("fact"):
            at = mine.index.to_list()
            new[at] = rng.choice(values[values != old[at[0]]])
    return Prompts(one.train.inputs, torch.from_numpy(new), one.train.table)


@torch.no_grad()
def _gain(one: Mixture, after, new: Prompts) -> float:
    metric = logit_difference(new.answers, one.train.answers, "final")
    values = [evaluate(metric, run(model, new.inputs).logits, new.inputs).mean() for model in (after, one.model)]
    return float(values[0] - values[1])
