"""F2: FFN parameters encode most of the factual knowledge. Asked as a fair question: against storage in proportion to size."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from interp.claims.calibration import calibrate
from interp.claims.claim import Claim, Hypothesis, Reading, Study, Tables
from interp.claims.storage import change, fine_tuned, interchange, recall
from interp.stats import paired_difference, sign_flip, t_interval, tost
from interp.tasks.toy_facts import ToyFacts
from interp.tasks.train_config import TrainConfig

SUBJECTS = 512
TRAINING = {"steps": 600, "batch_size": 128}
TUNING = {
    "adamw": {"optimizer": "adamw", "learning_rate": 3e-3, "steps": 300},
    "sgd": {"optimizer": "sgd", "learning_rate": 0.3, "steps": 300},
}
"""Fine-tunes that learn at least 99% of the changed facts on seeds 1000 and 1001 (measured; SGD with momentum 0.9)."""
ARMS = {
    "0.17": {"d_ff": 43, "d_head": 40}, "0.33": {"d_ff": 85, "d_head": 32}, "0.50": {"d_ff": 128, "d_head": 24},
    "0.67": {"d_ff": 171, "d_head": 16}, "0.83": {"d_ff": 213, "d_head": 8},
}  # fmt: skip
"""Share of the FFNs in the parameters of a block -> sizes; the total is 49,152 ± 100 a block."""
BOOK = "0.67"
"""The arm with the textbook's share of 2/3."""
TWINS = {
    "swiglu": {"d_ff": 171, "learning_rate": 4e-3}, "attention": {"ffn": "none", "n_heads": 12, "learning_rate": 8e-3},
    "relu": {"ffn": "relu", "d_ff": 256, "learning_rate": 4e-3},
}  # fmt: skip
"""Models of the same depth and number of parameters; each at the best of three learning rates on seeds 1000 and 1001."""


def allocation(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """One arm: base models, half of the facts changed, fine-tunes of all blocks, and what each group of weights took of it.

    Columns: arm, rho (FFNs' share of the blocks' parameters), seed, optimizer, phi (their share of the change, logit difference),
    phi_accuracy, value_ffn, value_attention, interaction, recall_base, recall_changed, recall_unchanged."""
    from interp.training.many import train_many

    task, seeds = ToyFacts(config["subjects"]), list(config["seeds"])
    model = task.model_config(d_ff=config["d_ff"], d_head=config["d_head"])
    configs = [task.train_config(seed=seed, **config["training"]) for seed in seeds]
    folder = scratch / "bases"
    found = train_many(model, task, configs, folder, "stacked", folder.exists(), progress=False)
    bases = {run.config.seed: run.model for run in found.values() if run.config is not None}
    learned = {
        run.config.seed: float(run.last.loc["held_out", "accuracy"])  # type: ignore[arg-type]
        for run in found.values()
        if run.config is not None  # type: ignore[arg-type]
    }  # type: ignore[arg-type]
    changes = {seed: change(task, seed) for seed in seeds}
    rows = []
    for name, options in config["tuning"].items():
        tuning = TrainConfig(
            batch_size=config["training"]["batch_size"], weight_decay=0.0, trainable=("attention", "ffn"), **options
        )
        for seed, tuned in fine_tuned(bases, changes, tuning).items():
            logits, right = interchange(bases[seed], tuned, changes[seed])
            ffn, attention = logits.values.mean(-1)
            counts = {group: bases[seed].weights.count(group) for group in ("ffn", "attention")}
            rows.append({"arm": config["arm"], "rho": counts["ffn"] / sum(counts.values()), "seed": seed, "optimizer": name,
                         "phi": ffn / (ffn + attention), "phi_accuracy": float(right.share()[0]), "value_ffn": ffn,
                         "value_attention": attention, "interaction": float(logits.interactions[0, 1].mean()),
                         "recall_base": learned[seed], **recall(tuned, changes[seed])})  # fmt: skip
    return pd.DataFrame(rows)


def twins(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """One architecture: its recall along training. Columns: arm, parameters (of the blocks), seed, step, exposures (of each
    fact), split, accuracy, nats."""
    from interp.training.many import train_many

    task = ToyFacts(config["subjects"])
    model = task.model_config(**{"d_head": 16, **config["model"]})
    configs = [task.train_config(seed=seed, **config["training"]) for seed in config["seeds"]]
    folder = scratch / "runs"
    found = train_many(model, task, configs, folder, "stacked", folder.exists(), progress=False)
    tables = []
    for run in found.values():
        assert run.config is not None
        parameters = sum(run.model.weights.count(group) for group in ("attention", "ffn")
                         if group == "attention" or model.ffn != "none")  # fmt: skip
        facts = len(task.facts.facts)
        tables.append(run.curves[["step", "split", "accuracy", "nats"]].assign(
            arm=config["arm"], parameters=parameters, seed=run.config.seed,
            exposures=run.curves["step"] * run.config.batch_size / facts))  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def calibration(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """Planted mixtures: the localiser's reading beside the share of the facts that was trained into the FFNs.

    Columns: localiser, kind, seed, share, reading, recall."""
    from interp.claims.localisers import interchange as planted_interchange
    from interp.claims.planted import SomeFacts, bases, plant

    task = SomeFacts(config["subjects"], config["base"])
    folder = scratch / "bases"
    models = bases(config["seeds"], task, folder, progress=False)
    changes = {} if "steps" not in config else {"steps": config["steps"]}
    mixtures = plant(models, config["shares"], task, _planting(changes), progress=False)
    rows = [{"localiser": "weight interchange", "kind": "storage", "seed": one.seed, "share": one.share,
             "recall": float(np.mean([value for name, value in one.recall.items() if name.startswith("held_out")])),
             **planted_interchange(one, config["prompts"])} for one in mixtures]  # fmt: skip
    return pd.DataFrame(rows)


def _planting(changes: Mapping[str, Any]) -> TrainConfig | None:
    from dataclasses import replace

    from interp.claims.planted import CONFIG

    return replace(CONFIG, **changes) if changes else None


def _curve_units(seeds: list[int], arms: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    return {f"rho_{arm}": {"arm": arm, **ARMS[arm], "subjects": SUBJECTS, "seeds": seeds, "training": TRAINING, "tuning": TUNING}
            for arm in arms}  # fmt: skip


def _twin_units(seeds: list[int], steps: int) -> dict[str, dict[str, Any]]:
    units = {}
    for arm, options in TWINS.items():
        model = {name: value for name, value in options.items() if name != "learning_rate"}
        training = {"steps": steps, "batch_size": 128, "learning_rate": options["learning_rate"]}
        units[arm] = {"arm": arm, "model": model, "subjects": SUBJECTS, "seeds": seeds, "training": training}
    return units


def _planted_units(groups: Mapping[str, list[int]], shares: list[float]) -> dict[str, dict[str, Any]]:
    return {name: {"seeds": seeds, "shares": shares, "subjects": SUBJECTS, "base": 384, "prompts": 300}
            for name, seeds in groups.items()}  # fmt: skip


CURVE = Study(
    "F2.curve", "into which weights is a change of facts written, for five shares of FFN parameters?", allocation,
    {"quick": _curve_units([0, 1], ("0.33", "0.67")), "standard": _curve_units(list(range(10)), tuple(ARMS))},
    {"quick": 3, "standard": 25},
)  # fmt: skip
TWIN = Study(
    "F2.twins", "does a model without FFNs, of the same size and depth, learn the same facts?", twins,
    {"quick": _twin_units([0, 1], 600), "standard": _twin_units(list(range(10)), 800)}, {"quick": 2, "standard": 12},
)  # fmt: skip
PLANTED = Study(
    "F2.planted", "does the localiser read the share that was planted?", calibration,
    {"quick": _planted_units({"a": [0], "b": [1]}, [0.0, 0.5, 1.0]),
     "standard": _planted_units({"a": [0, 1, 2], "b": [3, 4, 5]}, [0.0, 0.25, 0.5, 0.75, 1.0])},
    {"quick": 4, "standard": 30},
)  # fmt: skip
STUDIES = (CURVE, TWIN, PLANTED)


def logit(share: np.ndarray) -> np.ndarray:
    """ln(p / (1 − p))."""
    return np.log(share / (1 - share))


def excess(curve: pd.DataFrame) -> pd.DataFrame:
    """Per optimizer and seed: the mean over arms of logit φ_F − logit ρ_F. Shares outside (0, 1) have no logit and are
    dropped, with how many (column dropped)."""
    valid = curve[(curve["phi"] > 0) & (curve["phi"] < 1)]
    mine = valid.assign(excess=logit(valid["phi"].to_numpy()) - logit(valid["rho"].to_numpy()))
    table = mine.groupby(["optimizer", "seed"])["excess"].mean().reset_index()
    return table.assign(dropped=len(curve) - len(valid))


def special(tables: Tables) -> Reading:
    """Above 0 under both optimizers: supported; below 0, or within ±.2, under either: refuted. Estimate: AdamW's."""
    table = excess(tables["F2.curve"])
    found = {name: rows["excess"].to_numpy() for name, rows in table.groupby("optimizer")}
    intervals = {name: t_interval(values) for name, values in found.items()}
    same = {name: tost(values, -0.2, 0.2) for name, values in found.items()}
    adam = intervals["adamw"]
    note = "; ".join(f"{name} {one.estimate:+.2f} [{one.low:+.2f}, {one.high:+.2f}], TOST ±.2 p = {same[name]:.2g}"
                     for name, one in intervals.items())  # fmt: skip
    if all(one.low > 0 for one in intervals.values()):
        says = "supported"
    elif any(one.high < 0 for one in intervals.values()) or any(p < 0.05 for p in same.values()):
        says = "refuted"
    else:
        says = "undecided"
    p = max(sign_flip(values) for values in found.values())
    return Reading(says, adam.estimate, adam.low, adam.high, adam.n, p, note)


def most(tables: Tables) -> Reading:
    """ŝ = (φ_F − intercept) / slope at ρ_F = 2/3, the fit's error propagated over seeds; above .5 supported, below refuted."""
    planted, curve = tables["F2.planted"], tables["F2.curve"]
    fit = calibrate(planted).iloc[0]
    phi = curve[(curve["arm"] == BOOK) & (curve["optimizer"] == "adamw")].groupby("seed")["phi"].mean()
    lines = [np.polyfit(one["share"], one["reading"], 1) for _, one in planted.groupby("seed")]
    # ŝ of every pair of a measured model and a planted seed's line; the two sources of error are independent
    estimates = np.array([[(value - line[1]) / line[0] for line in lines] for value in phi])
    center = float(estimates.mean())
    spread = np.sqrt(estimates.mean(1).var(ddof=1) / len(phi) + estimates.mean(0).var(ddof=1) / len(lines))
    n = min(len(phi), len(lines))
    half = float(spread * _t(n))
    low, high = center - half, center + half
    if not bool(fit["calibrated"]):
        return Reading("undecided", center, low, high, n, 1.0, f"the localiser is not calibrated: {fit['why']}")
    says = "supported" if low > 0.5 else "refuted" if high < 0.5 else "undecided"
    p = float(2 * _survival(abs(center - 0.5) / spread, n)) if spread > 0 else 0.0
    note = f"φ_F = {phi.mean():.3f} as measured; slope {fit['slope']:.2f}, intercept {fit['intercept']:.2f} on planted mixtures"
    return Reading(says, center, low, high, n, p, note)


def _t(n: int) -> float:
    from scipy import stats

    return float(stats.t.ppf(0.975, n - 1))


def _survival(t: float, n: int) -> float:
    from scipy import stats

    return float(stats.t.sf(t, n - 1))


def last_recall(table: pd.DataFrame, split: str = "held_out") -> pd.DataFrame:
    """Accuracy in percent at the last step [seed × arm]."""
    last = table[(table["step"] == table["step"].max()) & (table["split"] == split)]
    return 100 * last.pivot_table(index="seed", columns="arm", values="accuracy")


def necessary(tables: Tables) -> Reading:
    """Gap of held-out recall in points, SwiGLU minus attention-only; above 3 supported, below 3 refuted."""
    recall_of = last_recall(tables["F2.twins"])
    gap = (recall_of["swiglu"] - recall_of["attention"]).to_numpy()
    found = t_interval(gap)
    says = "supported" if found.low > 3 else "refuted" if found.high < 3 else "undecided"
    note = ", ".join(f"{arm} {recall_of[arm].mean():.2f}%" for arm in recall_of)
    return Reading(says, found.estimate, found.low, found.high, found.n, sign_flip(gap, 3.0), note)


def faster(tables: Tables) -> Reading:
    """Difference of training recall, in points, where the gated model first passes 50%: SwiGLU minus attention-only."""
    return _early(tables["F2.twins"], "attention")


def gating(tables: Tables) -> Reading:
    """The same place: SwiGLU minus ReLU at matched parameters."""
    return _early(tables["F2.twins"], "relu")


def _early(table: pd.DataFrame, other: str) -> Reading:
    train = table[table["split"] == "train"]
    mean = train[train["arm"] == "swiglu"].groupby("step")["accuracy"].mean()
    step = int(mean.index[(mean > 0.5).to_numpy().argmax()])  # type: ignore[arg-type, call-overload]
    at = 100 * train[train["step"] == step].pivot_table(index="seed", columns="arm", values="accuracy")
    found = paired_difference(at["swiglu"].to_numpy(), at[other].to_numpy())
    one = found.interval
    says = "supported" if one.low > 0 else "refuted" if one.high < 0 else "undecided"
    exposures = float(train[train["step"] == step]["exposures"].iloc[0])
    note = f"after {step} steps, {exposures:.0f} exposures of each fact: " + ", ".join(
        f"{arm} {at[arm].mean():.1f}%" for arm in at
    )
    return Reading(says, one.estimate, one.low, one.high, one.n, found.p, note)


def curve_figure(tables: Tables) -> Any:
    """The allocation curve."""
    from interp.plots.allocation import allocation_curve

    return allocation_curve(tables["F2.curve"])


def twins_figure(tables: Tables) -> Any:
    """Recall along training."""
    from interp.plots.allocation import twin_curves

    return twin_curves(tables["F2.twins"])


def planted_figure(tables: Tables) -> Any:
    """Reading against planted share."""
    from interp.plots import calibration_curves

    return calibration_curves(tables["F2.planted"], calibrate(tables["F2.planted"]))


def curve_table(tables: Tables) -> pd.DataFrame:
    """Means over seeds per optimizer and arm."""
    columns = ["rho", "phi", "phi_accuracy", "interaction", "recall_base", "recall_changed", "recall_unchanged"]
    return tables["F2.curve"].groupby(["optimizer", "arm"])[columns].mean().reset_index()


def twins_table(tables: Tables) -> pd.DataFrame:
    """Final recall per arm, in percent."""
    table = tables["F2.twins"]
    held, train = last_recall(table), last_recall(table, "train")
    parameters = table.groupby("arm")["parameters"].first()
    return pd.DataFrame([{"arm": arm, "block "
                                      "parameters": parameters[arm], "train": train[arm].mean(), "held out": held[arm].mean(),  # type: ignore[arg-type, call-overload]
                          "lowest seed": held[arm].min()} for arm in held])  # fmt: skip


_SCOPE = "decoders of two layers, d_model 64, 2,048 made-up facts of 5 bits seen some 38 times each (task facts), AdamW"
_FFN = "FFN parameters encode most of the factual knowledge."
CLAIMS = (
    Claim(
        id="F2", sentence=_FFN, source="SLP3 7.2, after Geva 2021 and Meng 2022", overall=False,
        hypotheses=(
            Hypothesis(
                id="F2.most", primary=True, quantity="calibrated share of a change of facts that is written into FFN weights",
                unit="share", prediction="above 1/2 in a model whose FFNs hold 2/3 of the blocks' parameters",
                null="half; storage in proportion to size predicts 2/3, so that this alone says nothing about FFNs as such",
                controls="the localiser is calibrated on planted mixtures: slope above .25, reading rising with every share",
                statistic="Shapley share of the FFNs' change on the logit difference, 95% t interval over seeds with the "
                          "calibration's error", smallest=0.0, falsified="an interval below 1/2", scope=_SCOPE, rule=most,
                studies=("F2.curve", "F2.planted"), figure=planted_figure, shown=None,
            ),
            Hypothesis(
                id="F2.special", primary=True,
                quantity="logit of the FFNs' share of a change of facts minus logit of their share of parameters, mean of "
                         "all arms",
                unit="logits of a share", prediction="above 0 under AdamW and under SGD: FFNs hold more than their size",
                null="0: storage in proportion to size",
                controls="Adam's equal-sized steps alone favour proportional storage, so SGD is the second arm",
                statistic="95% t interval over seeds, exact sign flips, TOST ±.2", smallest=0.2,
                falsified="an interval below 0, or equivalence to 0 within ±.2, under either "
                          "optimizer", scope=_SCOPE, rule=special,
                studies=("F2.curve",), figure=curve_figure, shown=curve_table,
            ),
            Hypothesis(
                id="F2.necessary", primary=True, quantity="held-out recall, with FFNs minus without, at equal parameters "
                                                          "and depth",
                unit="points of accuracy", prediction="above 3 points", null="3 points",
                controls="width of attention raised until the parameters match; each arm at the best of three learning rates",
                statistic="95% t interval of the paired difference over seeds, exact sign flips", smallest=3.0,
                falsified="an interval below 3 points", scope=_SCOPE, rule=necessary, studies=("F2.twins",), figure=twins_figure,
                shown=twins_table,
            ),
            Hypothesis(
                id="F2.faster", quantity="training recall where the gated model first passes 50%, with FFNs minus without",
                unit="points of accuracy", prediction="above 0: FFNs learn facts from fewer exposures", null="0",
                statistic="95% t interval of the paired difference over seeds, exact sign flips", falsified="an interval below 0",
                scope=_SCOPE, rule=faster, studies=("F2.twins",), figure=twins_figure,
            ),
        ),
    ),
)  # fmt: skip
F4_FACTS = Hypothesis(
    id="F4.facts", quantity="training recall where SwiGLU first passes 50%, SwiGLU minus ReLU at equal parameters",
    unit="points of accuracy", prediction="above 0: a gated FFN learns facts from fewer exposures",
    null="0 (two-sided: published results at low exposure have the other sign)",
    statistic="95% t interval of the paired difference over seeds, exact sign flips", falsified="an interval below 0",
    scope=_SCOPE, rule=gating, studies=("F2.twins",), figure=twins_figure, shown=twins_table,
)  # fmt: skip
