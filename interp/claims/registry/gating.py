"""F4: a gated FFN works better than a plain one at matched parameters."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from interp.claims.claim import Claim, Hypothesis, Reading, Study, Tables
from interp.claims.registry.facts import F4_FACTS
from interp.stats import paired_difference
from interp.tasks import as_task

KINDS = ("relu", "gelu", "swish", "bilinear", "reglu", "swiglu")


def language(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """One kind of FFN at one learning rate: held-out loss of small language models. Columns: ffn, d_ff, parameters,
    learning_rate, seed, nats."""
    from interp.training import train

    task, rows = as_task(config["task"]), []
    model = task.model_config(ffn=config["ffn"], d_ff=config["d_ff"])  # type: ignore[attr-defined]
    for seed in config["seeds"]:
        training = task.train_config(seed=seed, learning_rate=config["learning_rate"], **config["training"])  # type: ignore[attr-defined]
        folder = scratch / f"seed_{seed}"
        one = train(model, task, training, folder, resume=folder.exists(), progress=False)
        rows.append({"ffn": config["ffn"], "d_ff": config["d_ff"], "parameters": sum(p.numel() for p in one.model.parameters()),
                     "learning_rate": config["learning_rate"], "seed": seed, "nats": float(one.last.loc["held_out", "nats"])})  # type: ignore[arg-type] # fmt: skip
    return pd.DataFrame(rows)


def best_rates(table: pd.DataFrame) -> pd.DataFrame:
    """Held-out loss at each kind's best learning rate, which is chosen on seeds 1000 and up [seed × kind]."""
    means = table[table["seed"] >= 1000].groupby(["ffn", "learning_rate"])["nats"].mean()
    columns = {}
    for kind in table["ffn"].unique():
        rate = means[kind].idxmin()
        mine = table[(table["ffn"] == kind) & (table["learning_rate"] == rate) & (table["seed"] < 1000)]
        columns[kind] = mine.set_index("seed")["nats"]
    return pd.DataFrame(columns)


def gated_wins(tables: Tables) -> Reading:
    """SwiGLU minus ReLU: below −.01 nats supported, above refuted."""
    nats = best_rates(tables["F4"])
    found = paired_difference(nats["swiglu"].to_numpy(), nats["relu"].to_numpy())
    one = found.interval
    says = "supported" if one.high < -0.01 else "refuted" if one.low > -0.01 else "undecided"
    note = ", ".join(f"{kind} {nats[kind].mean():.3f}" for kind in nats)
    return Reading(says, one.estimate, one.low, one.high, one.n, found.p, note)


def _units() -> dict[str, dict[str, Any]]:
    units = {}
    for kind in KINDS:
        width = 512 if kind in ("relu", "gelu", "swish") else 341
        for rate in (1.5e-3, 3e-3, 6e-3):
            units[f"{kind}_{rate:g}"] = {"task": "language", "ffn": kind, "d_ff": width, "learning_rate": rate,
                                         "seeds": [1000, 1001, *range(10)], "training": {}}  # fmt: skip
    return units


STUDY = Study(
    "F4", "which kind of FFN learns language best at equal size?", language, {"full": _units()}, {"full": 6000}
)
STUDIES = (STUDY,)
CLAIMS = (
    Claim(
        id="F4", sentence="A gated FFN (SwiGLU) works better than a plain ReLU one at matched parameters.",
        source="SLP3 7.22; Shazeer 2020",
        hypotheses=(
            Hypothesis(
                id="F4.language", primary=True, rule=gated_wins, studies=("F4",),
                quantity="held-out loss of SwiGLU minus ReLU, each at the best of three learning rates", unit="nats a token",
                prediction="below -.01 (published: -.04 to -.055)", null="0",
                controls="GELU, Swish, bilinear and ReGLU beside them: the gate or the activation?", smallest=0.01,
                statistic="95% t interval of the paired difference over seeds, exact sign flips", falsified="an interval "
                                                                                                            "above -.01",
                scope="decoders of four layers, d_model 128, 2,000 steps on Python's standard library (task language)",
            ),
            F4_FACTS,
        ),
    ),
)  # fmt: skip
