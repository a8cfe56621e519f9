"""A3: cross-attention aligns target with source, in three tasks whose true alignment is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from interp.analyses.attention_mass import attention_mass, permuted_keys
from interp.claims.claim import Claim, Hypothesis, Reading, Study, Tables
from interp.model.transformer import Transformer
from interp.stats import sign_flip, t_interval
from interp.tasks.rewriting import Rewriting

TASKS = ("copy", "reverse", "sort")


def alignment(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """Train one task's models until their goal is met, then read them: columns of `masses`, and task, seed, exact."""
    from interp.training.many import train_many

    task, tables = Rewriting(config["task"]), []
    configs = [task.train_config(seed=seed, stop="goals", **config["training"]) for seed in config["seeds"]]
    folder = scratch / "runs"
    found = train_many(None, task, configs, folder, "stacked", folder.exists(), progress=False)
    for one in found.values():
        assert one.config is not None
        exact = float(one.last.loc["held_out", "exact"])  # type: ignore[arg-type]
        tables.append(
            masses(one.model, task, one.config.seed).assign(task=task.name, seed=one.config.seed, exact=exact)
        )
    return pd.concat(tables, ignore_index=True)


def masses(model: Transformer, task: Rewriting, seed: int) -> pd.DataFrame:
    """Per half of the held-out examples × layer × head: attention on the true source position. Columns of `attention_mass`, half
    ("choose", "read") and permuted (mass on the true keys in another order)."""
    batch, tables = task.evaluation["held_out"], []
    for half, rows in (("choose", slice(0, None, 2)), ("read", slice(1, None, 2))):
        inputs = batch.inputs.select(torch.arange(len(batch))[rows])
        keys = task.alignment(inputs)
        null = attention_mass(model, inputs, permuted_keys(keys, seed), "cross_pattern")["mass"]
        tables.append(attention_mass(model, inputs, keys, "cross_pattern").assign(half=half, permuted=null))
    return pd.concat(tables, ignore_index=True)


def by_layer(heads: pd.DataFrame) -> pd.DataFrame:
    """Mean over heads per task × seed × layer on the half that is read; `best` marks the layer chosen on the other half."""
    keys = ["task", "seed", "layer"]
    means = heads.groupby(["half", *keys], sort=False)[["mass", "permuted", "chance"]].mean()
    table = means.loc["read"].reset_index()
    chosen = means.loc["choose"]["mass"].groupby(["task", "seed"]).idxmax()
    best = pd.MultiIndex.from_tuples(chosen.to_list())
    return table.assign(best=pd.MultiIndex.from_frame(table[keys]).isin(best))


def best_mass(tables: Tables) -> pd.DataFrame:
    """Mass on the true source position at the chosen layer [seed × task]."""
    layers = by_layer(tables["A3"])
    return layers[layers["best"]].pivot_table(index="seed", columns="task", values="mass")


def aligned(tables: Tables) -> Reading:
    """The weakest task's mass above .8: supported; below .8: refuted."""
    mass, layers = best_mass(tables), by_layer(tables["A3"])
    intervals = {task: t_interval(mass[task].dropna().to_numpy()) for task in mass}
    weakest = min(intervals, key=lambda task: intervals[task].estimate)
    one = intervals[weakest]
    null = layers[layers["best"]].groupby("task")["permuted"].mean()
    p = max(sign_flip((mass[task] - null[task]).dropna().to_numpy()) for task in mass)  # type: ignore[arg-type, call-overload]
    note = "; ".join(
        f"{task} {i.estimate:.2f} [{i.low:.2f}, {i.high:.2f}], permuted {null[task]:.2f}"  # type: ignore[arg-type, call-overload]
        for task, i in intervals.items()
    )
    says = "supported" if all(i.low > 0.8 for i in intervals.values()) else "refuted" if one.high < 0.8 else "undecided"
    return Reading(says, one.estimate, one.low, one.high, one.n, p, note)


def figure(tables: Tables) -> Any:
    """Mass per head, mean of seeds, one panel per task."""
    from interp.plots.stream import alignment_bars

    return alignment_bars(by_layer(tables["A3"]))


def shown(tables: Tables) -> pd.DataFrame:
    """Mass per task and layer, means over seeds."""
    return by_layer(tables["A3"]).groupby(["task", "layer"])[["mass", "permuted", "chance"]].mean().reset_index()


def _units(groups: list[list[int]]) -> dict[str, dict[str, Any]]:
    return {
        f"{task}_{seeds[0]}_{seeds[-1]}": {"task": task, "seeds": seeds, "training": {}}
        for task in TASKS
        for seeds in groups
    }


STUDY = Study(
    "A3", "does cross-attention look at the true source position?", alignment,
    {"quick": _units([[0, 1]]), "standard": _units([list(range(5)), list(range(5, 10))])}, {"quick": 6, "standard": 25},
)  # fmt: skip
STUDIES = (STUDY,)
CLAIMS = (
    Claim(
        id="A3", sentence="Cross-attention aligns the target with the source.", source="seed notes on architectures; "
                                                                                       "Bahdanau 2015",
        hypotheses=(
            Hypothesis(
                id="A3.mass", primary=True, rule=aligned, studies=("A3",), figure=figure,
                shown=shown,
                quantity="cross-attention on the true source position, mean over heads of the best layer (chosen on the "
                         "other half "
                         "of the examples), in the weakest of copy, reverse and sort",
                unit="of attention", prediction="above .8 in every task", null="the true positions in another order (about 1/n)",
                controls="layer chosen on one half of the examples and read on the other", smallest=0.8,
                statistic="95% t interval over seeds per task, exact sign flips against the permuted mass",
                falsified="the weakest task's interval below .8",
                scope="encoder-decoders of 2 + 2 layers, d_model 64, 8 to 12 symbols of 32, trained until 99% are exact",
            ),
        ),
    ),
)  # fmt: skip
