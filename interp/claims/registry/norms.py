"""N1b, N2 and N3: where the norm stands, whether there is one, and which, at initialisation and in training."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from interp.claims.claim import ALPHA, Claim, Hypothesis, Reading, Study, Tables
from interp.device import device_named
from interp.model.config import ModelConfig
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.plots.claims import gradient_slopes, reached_grid
from interp.run import run
from interp.stats import sign_flip, t_interval, tost
from interp.tasks import restore
from interp.tasks.train_config import TrainConfig
from interp.training.folder import Trained
from interp.training.many import train_many

DEPTHS = (2, 4, 8, 16, 32)
TARGET = 0.99  # of the training prompts right: what counts as trained


def measure_start(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """Gradients and streams before training.

    Columns: seed, setting, arm ("pre", "post"), depth, layer, quantity, value. "gradient": the Frobenius norm of the gradient of
    one token's loss with respect to the last FFN's W_out, mean over tokens; "batch gradient": of the mean loss over all tokens,
    which also grows where the tokens' streams have become alike. "stream", of the deepest model: the mean over tokens of ‖x_l‖²/d
    after block l (of a post-norm block before its last norm, after which it is 1 by construction; layer 0 is what enters the
    first block)."""
    cells = itertools.product(config["seeds"], ("pre", "post"), config["depths"])
    rows = [
        row for seed, arm, depth in cells for row in _start(config["setting"], arm, depth, seed, max(config["depths"]))
    ]
    return pd.DataFrame(rows)


def _start(setting: str, arm: str, depth: int, seed: int, deepest: int) -> Iterator[dict[str, Any]]:
    model = starting_model(setting, arm, depth, seed)
    drawn = torch.Generator().manual_seed(seed)
    tokens, targets = (torch.randint(model.config.vocab, (16, 16), generator=drawn) for _ in range(2))
    behind = "resid_post" if arm == "pre" else "resid_post_sum"
    act, out = f"{depth - 1}.ffn_act", f"{depth - 1}.ffn_out"
    found = run(model, Inputs(tokens), record=["0.resid_pre", behind, act, out], grad=True)
    losses = torch.nn.functional.cross_entropy(found.logits.flatten(0, 1), targets.flatten(), reduction="none")
    # A token's loss reads the last FFN at that token alone: its gradient is the outer product of what W_out reads and this.
    behind_ffn = torch.autograd.grad(losses.sum(), found.cache[out])[0]
    read = found.cache[act].detach()
    about = {"seed": seed, "setting": setting, "arm": arm, "depth": depth}
    single = (read.norm(dim=-1) * behind_ffn.norm(dim=-1)).mean()
    batch = (read.flatten(0, 1).T @ behind_ffn.flatten(0, 1)).norm() / len(losses)
    yield {**about, "layer": depth - 1, "quantity": "gradient", "value": float(single)}
    yield {**about, "layer": depth - 1, "quantity": "batch gradient", "value": float(batch)}
    if depth == deepest:
        streams = [found.cache["0.resid_pre"], *found.cache.stack(behind)]
        for layer, stream in enumerate(streams):
            yield {**about, "layer": layer, "quantity": "stream", "value": float(stream.detach().square().mean())}


def starting_model(setting: str, arm: str, depth: int, seed: int) -> Transformer:
    """An untrained model. "paper": the setting of the theory (Xiong et al. 2020), one head that attends to all alike (W_Q = W_K =
    0), ReLU FFN with d_ff = d, no biases, all other matrices Xavier, embeddings N(0, 1). "default": ours, with SwiGLU."""
    if setting == "default":
        config = ModelConfig(vocab=64, n_layers=depth, n_heads=4, d_model=128, n_ctx=16, norm="layernorm", ffn="swiglu",
                             norm_position=arm, positions="rotary", bias=False)  # type: ignore[arg-type]  # fmt: skip
        return Transformer(config, seed=seed)
    config = ModelConfig(kind="encoder", vocab=64, n_layers=depth, n_heads=1, d_model=128, n_ctx=16, d_ff=128, ffn="relu",
                         norm_position=arm, positions="none", bias=False)  # type: ignore[arg-type]  # fmt: skip
    model, drawn = Transformer(config, seed=None), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            else:
                out, into = parameter.shape if "qkv" not in name else (config.d_model, config.d_model)
                std = 1.0 if name == "embedding.weight" else math.sqrt(2 / (out + into))
                parameter.copy_(torch.randn(parameter.shape, generator=drawn) * std)
        for block in model.blocks:
            block.attention.qkv.weight[: 2 * config.head_size] = 0.0  # type: ignore[union-attr]
    return model


def measure_cells(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """One arm at one depth, trained at every learning rate, warm-up and seed.

    Columns: seed, arm, depth, learning_rate, warmup, reached (0.99 of the training prompts right at some evaluation), step (of
    the first such), accuracy and nats (held-out, at the end; missing after divergence), note (why it ended early)."""
    task: Any = restore(config["task"])
    sizes = task.model_config(**config["model"])
    cells = list(itertools.product(config["rates"], config["warmups"], config["seeds"]))
    settings = {
        f"cell_{number:03d}": task.train_config(learning_rate=rate, warmup=warmup, seed=seed, **config["train"])
        for number, (rate, warmup, seed) in enumerate(cells)
    }
    starts = {name: usual_start(sizes, one.seed) for name, one in settings.items()}
    found = _trained(starts, task, settings, scratch / "runs", config.get("device", "cpu"))
    rows = []
    for (rate, warmup, seed), one in zip(cells, found.values(), strict=True):
        rows.append({"seed": seed, "arm": config["arm"], "depth": sizes.n_layers, "learning_rate": rate, "warmup": warmup,
                     **outcome(one)})  # fmt: skip
    return pd.DataFrame(rows)


def _trained(
    starts: Any, task: Any, settings: Mapping[str, TrainConfig], folder: Path, device: str
) -> Mapping[str, Trained]:
    return train_many(starts, task, settings, folder, "stacked", folder.exists(), False, device_named(device))


def usual_start(config: ModelConfig, seed: int) -> Transformer:
    """The model before training: ours for pre-norm; for post-norm without the factor 1/sqrt(2 n_layers) on what writes to the
    stream, which belongs to pre-norm."""
    model = Transformer(config, seed=seed)
    if config.norm_position == "post":
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(("attention.out.weight", "ffn.down.weight")):
                    parameter.mul_(math.sqrt(2 * config.n_layers))
    return model


def outcome(one: Trained) -> dict[str, Any]:
    """Whether and when the training prompts were learned, and the held-out ones' accuracy and nats at the end."""
    curves, last = one.curves, {"accuracy": math.nan, "nats": math.nan}
    steps: Any = []
    if len(curves):
        train = curves[curves["split"] == "train"]
        steps = train.loc[train["accuracy"] >= TARGET, "step"]
        if not one.note:
            end = curves[(curves["split"] == "held_out") & (curves["step"] == curves["step"].max())].iloc[0]
            last = {"accuracy": float(end["accuracy"]), "nats": float(end["nats"])}
    step = float(min(steps)) if len(steps) else math.nan
    return {"reached": bool(len(steps)) and not one.note, "step": step, **last, "note": one.note}


def measure_norm(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """One kind of norm: a learning rate chosen on seeds of its own, then the seeds that count.

    Columns: seed, arm (the norm), stage ("choice", "test"), learning_rate, accuracy, nats (held-out, at the end), note."""
    task: Any = restore(config["task"])
    sizes, device = task.model_config(norm=config["arm"]), config.get("device", "cpu")
    trials = list(itertools.product(config["rates"], config["choice_seeds"]))
    trial = {
        f"trial_{number:03d}": task.train_config(learning_rate=rate, seed=seed, **config["train"])
        for number, (rate, seed) in enumerate(trials)
    }
    tried = _rows(_trained(sizes, task, trial, scratch / "choice", device), config["arm"], "choice")
    quantity, sign = ("nats", 1) if config["better"] == "nats" else ("accuracy", -1)
    # A rate at which any seed diverges cannot be the best.
    means = {rate: part[quantity].mean(skipna=False) * sign for rate, part in tried.groupby("learning_rate")}
    usable = {rate: mean for rate, mean in means.items() if not math.isnan(mean)} or means
    best = min(usable, key=lambda rate: usable[rate])
    test = {
        f"seed_{seed:04d}": task.train_config(learning_rate=best, seed=seed, **config["train"])
        for seed in config["seeds"]
    }
    tested = _rows(_trained(sizes, task, test, scratch / "test", device), config["arm"], "test")
    return pd.concat([tried, tested], ignore_index=True)


def _rows(found: Mapping[str, Trained], arm: str, stage: str) -> pd.DataFrame:
    rows = []
    for one in found.values():
        assert one.config is not None
        end = outcome_at_end(one)
        rows.append(
            {"seed": one.config.seed, "arm": arm, "stage": stage, "learning_rate": one.config.learning_rate, **end}
        )
    return pd.DataFrame(rows)


def outcome_at_end(one: Trained) -> dict[str, Any]:
    """Held-out accuracy and nats at the end, and why a run ended early."""
    if one.note or not len(one.curves):
        return {"accuracy": math.nan, "nats": math.nan, "note": one.note}
    end: Any = one.last.loc["held_out"]
    return {"accuracy": float(end["accuracy"]), "nats": float(end["nats"]), "note": ""}


def slopes(rows: pd.DataFrame, x: str) -> np.ndarray:
    """Per seed the slope of log value on log `x`."""
    found = [np.polyfit(np.log(one[x]), np.log(one["value"]), 1)[0] if bool((one["value"] > 0).all()) else math.nan
             for _, one in rows.groupby("seed")]  # fmt: skip
    return np.array(found)


def two_regions(tables: Tables, setting: str) -> Reading:
    """Post-norm's slope inside 0 ± .15 and pre-norm's inside -.5 ± .15; the numbers are pre-norm's."""
    rows = tables["N2.gradients"]
    rows = rows[(rows["quantity"] == "gradient") & (rows["setting"] == setting)]
    found = {arm: slopes(rows[rows["arm"] == arm], "depth") for arm in ("post", "pre")}
    regions = {"post": (-0.15, 0.15), "pre": (-0.65, -0.35)}
    if any(np.isnan(values).any() or len(values) < 2 for values in found.values()):
        n = min(map(len, found.values()))
        return Reading(
            "undecided", math.nan, math.nan, math.nan, n, None, "a gradient is 0 or not finite, or one seed only"
        )
    intervals = {arm: t_interval(values) for arm, values in found.items()}
    inside = [regions[arm][0] < one.low and one.high < regions[arm][1] for arm, one in intervals.items()]
    outside = [one.high < regions[arm][0] or one.low > regions[arm][1] for arm, one in intervals.items()]
    p = max(float(tost(values, *regions[arm])) for arm, values in found.items())
    says = "supported" if all(inside) else "refuted" if any(outside) else "undecided"
    pre, post = intervals["pre"], intervals["post"]
    batch = tables["N2.gradients"]
    batch = batch[(batch["quantity"] == "batch gradient") & (batch["setting"] == setting)]
    other = {arm: slopes(batch[batch["arm"] == arm], "depth").mean() for arm in found if (batch["arm"] == arm).any()}
    note = f"pre-norm's slope; post-norm's is {post.estimate:.3g} [{post.low:.3g}, {post.high:.3g}]" + "".join(
        f"; of the whole batch's loss, {arm}-norm {slope:.2f}" for arm, slope in other.items()
    )
    return Reading(says, pre.estimate, pre.low, pre.high, pre.n, p, note)


def h1(tables: Tables) -> Reading:
    """N2.h1."""
    return two_regions(tables, "paper")


def h1b(tables: Tables) -> Reading:
    """N2.h1b."""
    return two_regions(tables, "default")


def h2(tables: Tables) -> Reading:
    """N2.h2: pre-norm's growth per layer inside (.5, 1.5), every layer's mean in the bounds, post-norm's growth inside ±.05."""
    rows = tables["N2.gradients"]
    rows = rows[(rows["quantity"] == "stream") & (rows["setting"] == "paper")]
    pre, post = rows[rows["arm"] == "pre"], rows[(rows["arm"] == "post") & (rows["layer"] > 0)]
    growth = {arm: np.array([np.polyfit(one["layer"], one["value"], 1)[0] for _, one in part.groupby("seed")])
              for arm, part in (("pre", pre), ("post", post))}  # fmt: skip
    if any(np.isnan(values).any() or len(values) < 2 for values in growth.values()):
        return Reading(
            "undecided", math.nan, math.nan, math.nan, pre["seed"].nunique(), None, "not finite, or one seed only"
        )
    mean = pre.groupby("layer")["value"].mean()
    layers = mean.index.to_numpy(dtype=float)
    # At layer 0 both bounds are 1, which sampling alone may miss.
    bounded = (mean > 1 + layers / 2) & (mean < 1 + 3 * layers / 2) | (layers == 0)
    straight = float(np.corrcoef(layers, mean)[0, 1] ** 2)
    rising, flat = t_interval(growth["pre"]), t_interval(growth["post"])
    good = rising.low > 0.5 and rising.high < 1.5 and flat.low > -0.05 and flat.high < 0.05 and bool(bounded.all())
    bad = rising.high < 0.5 or rising.low > 1.5 or flat.high < -0.05 or flat.low > 0.05 or not bool(bounded.all())
    says = "supported" if good and straight > 0.95 else "refuted" if bad or straight < 0.95 else "undecided"
    note = (f"pre-norm's growth; of {len(layers)} layers {int(bounded.sum())} lie in the bounds, R² of a line "
            f"{straight:.4f}; post-norm's growth "
            f"{flat.estimate:.2g} [{flat.low:.2g}, {flat.high:.2g}] around {post['value'].mean():.3g} d")  # fmt: skip
    return Reading(says, rising.estimate, rising.low, rising.high, rising.n, None, note)


def share_difference(rows: pd.DataFrame, more: str, less: str) -> np.ndarray:
    """Per seed: the share of cells that arm `more` reaches the target in, minus that of `less` (seeds that both have)."""
    shares = rows.assign(reached=rows["reached"].astype(float)).groupby(["seed", "arm"])["reached"].mean().unstack()
    return (shares[more] - shares[less]).dropna().to_numpy()


def h3(tables: Tables) -> Reading:
    """N2.h3: above 30 points; an interval below 30 refutes."""
    rows = tables["N2.training"]
    values = share_difference(rows[(rows["warmup"] == 0) & (rows["depth"] >= 6)], "pre", "post")
    if len(values) < 2:
        return Reading("undecided", math.nan, math.nan, math.nan, len(values), None, "fewer than two seeds")
    found = t_interval(values)
    says = "supported" if found.low > 0.3 else "refuted" if found.high < 0.3 else "undecided"
    diverged = int((rows["note"] != "").sum())
    note = f"{diverged} of {len(rows)} trainings diverged"
    return Reading(says, found.estimate, found.low, found.high, found.n, float(sign_flip(values, 0.0)), note)


def h3b(tables: Tables) -> Reading:
    """N2.h3b: the whole grid, above 0."""
    return above_zero(share_difference(tables["N2.training"], "pre", "pre without final norm"), 0.1)


def above_zero(values: np.ndarray, smallest: float) -> Reading:
    """Interval above 0: supported. Below 0, or inside ± smallest: refuted. Else undecided."""
    if len(values) < 2:
        return Reading("undecided", math.nan, math.nan, math.nan, len(values), None, "fewer than two seeds")
    found = t_interval(values)
    none = found.high < 0 or (-smallest < found.low and found.high < smallest)
    says = "supported" if found.low > 0 else "refuted" if none else "undecided"
    return Reading(says, found.estimate, found.low, found.high, found.n, float(sign_flip(values, 0.0)))


def h3c(tables: Tables) -> Reading:
    """N2.h3c: two layers with warm-up, each arm at its best learning rate; held-out nats, post − pre, inside ± .02."""
    rows = tables["N2.training"]
    rows = rows[(rows["depth"] == 2) & (rows["warmup"] > 0) & rows["arm"].isin(["pre", "post"])]
    means: Any = rows.groupby(["arm", "learning_rate"])["nats"].agg(lambda one: one.mean(skipna=False)).dropna()
    arms = {}
    for arm in ("pre", "post"):
        if arm not in means.index.get_level_values(0):
            return Reading(
                "undecided", math.nan, math.nan, math.nan, 0, None, f"{arm}-norm diverged at every learning rate"
            )
        best = means[arm].idxmin()
        arms[arm] = rows[(rows["arm"] == arm) & (rows["learning_rate"] == best)].set_index("seed")["nats"]
    return equivalent((arms["post"] - arms["pre"]).to_numpy(), 0.02)


def equivalent(values: np.ndarray, margin: float) -> Reading:
    """Interval inside ± margin: supported. Wholly outside: refuted. Else, or with a value that is missing, undecided."""
    lost = int(np.isnan(values).sum())
    values = values[~np.isnan(values)]
    if len(values) < 2:
        return Reading(
            "undecided",
            math.nan,
            math.nan,
            math.nan,
            len(values),
            None,
            f"fewer than two pairs ({lost} without a value)",
        )
    found = t_interval(values)
    p = float(tost(values, -margin, margin))
    inside, outside = -margin < found.low and found.high < margin, found.high < -margin or found.low > margin
    says = "refuted" if outside else "supported" if inside and p < ALPHA and not lost else "undecided"
    note = f"{lost} pairs without a value: a training diverged" if lost else ""
    return Reading(says, found.estimate, found.low, found.high, found.n, p, note)


def n1b(tables: Tables) -> Reading:
    """N1b.trainable."""
    rows = tables["N1b"]
    found = above_zero(share_difference(rows, "layernorm", "none"), 0.1)
    shares = rows.assign(reached=rows["reached"].astype(float)).groupby("arm")["reached"].mean()
    note = ", ".join(f"{arm} {share:.2f}" for arm, share in shares.items())
    return dataclasses.replace(found, note="; ".join(filter(None, [f"share of cells: {note}", found.note])))


def paired(rows: pd.DataFrame, quantity: str) -> np.ndarray:
    """Per seed that counts: RMSNorm's value minus LayerNorm's."""
    table = rows[rows["stage"] == "test"].pivot(index="seed", columns="arm", values=quantity)
    return (table["rmsnorm"] - table["layernorm"]).to_numpy()


def n3(tables: Tables) -> Reading:
    """N3.language."""
    return with_rates(equivalent(paired(tables["N3.language"], "nats"), 0.02), tables["N3.language"])


def n3_facts(tables: Tables) -> Reading:
    """N3.facts."""
    return with_rates(equivalent(100 * paired(tables["N3.facts"], "accuracy"), 2.0), tables["N3.facts"])


def with_rates(found: Reading, rows: pd.DataFrame) -> Reading:
    """The same reading, its note with the learning rates that were chosen."""
    chosen = rows[rows["stage"] == "test"].groupby("arm")["learning_rate"].first()
    rates = ", ".join(f"{arm} at {rate:g}" for arm, rate in chosen.items())
    return dataclasses.replace(found, note="; ".join(filter(None, [found.note, f"learning rates: {rates}"])))


def shown_gradients(tables: Tables) -> pd.DataFrame:
    """Mean gradient norm by setting, quantity, place of the norm and depth."""
    rows = tables["N2.gradients"]
    rows = rows[rows["quantity"] != "stream"]
    return rows.pivot_table(index=["setting", "quantity", "arm"], columns="depth", values="value").reset_index()


def shown_stream(tables: Tables) -> pd.DataFrame:
    """Mean ‖x_l‖²/d by place of the norm and layer, in the paper's setting."""
    rows = tables["N2.gradients"]
    rows = rows[
        (rows["quantity"] == "stream") & (rows["setting"] == "paper") & rows["layer"].isin([0, 1, 2, 4, 8, 16, 32])
    ]
    return rows.pivot_table(index="arm", columns="layer", values="value").reset_index()


def shown_cells(study: str, tables: Tables) -> pd.DataFrame:
    """Share of seeds that reached the target, by arm, depth, learning rate and warm-up."""
    rows = tables[study].assign(reached=lambda one: one["reached"].astype(float))
    return (
        rows.groupby(["arm", "depth", "warmup", "learning_rate"], sort=False)["reached"].mean().unstack().reset_index()
    )


def shown_norms(study: str, tables: Tables) -> pd.DataFrame:
    """Mean held-out accuracy and nats by norm, stage and learning rate."""
    keys = ["arm", "stage", "learning_rate"]
    return tables[study].groupby(keys, sort=False)[["accuracy", "nats"]].mean().reset_index()


def figure_gradients(tables: Tables) -> Any:
    """Gradient norm against depth."""
    return gradient_slopes(tables["N2.gradients"])


def figure_cells(study: str, tables: Tables) -> Any:
    """Share that reached the target over depth and learning rate."""
    return reached_grid(tables[study])


_FACTS = {"name": "facts", "n_subjects": 512}
_FEW_FACTS = {"name": "facts", "n_subjects": 64}
_LANGUAGE = {"name": "language", "size": "medium"}
SEEDS, FIVE = list(range(10)), list(range(5))
RATES = [3e-4, 1e-3, 3e-3, 1e-2]
ARMS: dict[str, dict[str, Any]] = {
    "pre": {"norm": "layernorm", "norm_position": "pre"},
    "post": {"norm": "layernorm", "norm_position": "post"},
    "pre without final norm": {"norm": "layernorm", "norm_position": "pre", "final_norm": False},
}


def _short(text: str) -> str:
    return text.replace(" ", "_")


STARTS = {setting: {"setting": setting, "depths": list(DEPTHS), "seeds": SEEDS} for setting in ("paper", "default")}
TRAINING = {
    f"{_short(arm)}_{depth}_layers": {"arm": arm, "task": _FACTS, "model": {**choices, "n_layers": depth}, "rates": RATES,
                                      "warmups": [0.0, 0.05], "seeds": SEEDS, "train": {}, "device": "auto"}
    for arm, choices in ARMS.items() for depth in (2, 6, 12)
}  # fmt: skip
TRAINABLE = {
    f"{norm}_{depth}_layers": {"arm": norm, "task": _FEW_FACTS, "model": {"norm": norm, "n_layers": depth, "d_model": 32},
                               "rates": [1e-3, 3e-3, 1e-2, 3e-2], "warmups": [0.05], "seeds": FIVE,
                               "train": {"steps": 300, "batch_size": 64, "evaluate_every": 50, "weight_decay": 0.01}}
    for norm in ("layernorm", "none") for depth in (2, 4, 8)
}  # fmt: skip
NORM_FACTS = {norm: {"arm": norm, "task": _FACTS, "rates": [2.5e-3, 5e-3, 1e-2], "choice_seeds": [1000, 1001], "seeds": SEEDS,
                     "train": {"evaluate_every": 300}, "better": "accuracy"} for norm in ("rmsnorm", "layernorm")}  # fmt: skip
NORM_LANGUAGE = {norm: {"arm": norm, "task": _LANGUAGE, "rates": [1.5e-3, 3e-3, 6e-3], "choice_seeds": [1000, 1001],
                        "seeds": SEEDS, "train": {}, "better": "nats", "device": "auto"}
                 for norm in ("rmsnorm", "layernorm")}  # fmt: skip

STUDIES = (
    Study("N2.gradients", "How do the last FFN's gradient and the stream depend on depth before training?", measure_start,
          dict.fromkeys(("quick", "standard", "full"), STARTS), dict.fromkeys(("quick", "standard", "full"), 0.5)),
    Study("N2.training", "At which depths, learning rates and warm-ups do pre- and post-norm train?", measure_cells,
          {"full": TRAINING}, {"full": 2400}),
    Study("N1b", "At which depths and learning rates does a model train with and without norms?", measure_cells,
          {"standard": TRAINABLE, "full": TRAINABLE}, dict.fromkeys(("standard", "full"), 8)),
    Study("N3.facts", "Does RMSNorm recall facts as well as LayerNorm?", measure_norm,
          {"standard": NORM_FACTS, "full": NORM_FACTS}, dict.fromkeys(("standard", "full"), 10)),
    Study("N3.language", "Does RMSNorm predict text as well as LayerNorm?", measure_norm,
          {"full": NORM_LANGUAGE}, {"full": 6000}),
)  # fmt: skip

_INIT = "Untrained models of 2 to 32 layers and width 128, random tokens and targets; "
_PAPER = (
    _INIT + "one head that attends to all positions alike, ReLU FFN with d_ff = d, Xavier matrices (Xiong et al. 2020)."
)
_SLOPES: dict[str, Any] = {
    "unit": "slope on logarithmic axes",
    "quantity": "The slope of log ||dL/dW_out|| of the last FFN on log L, where L is the number of layers and the gradient "
    "is that of one token's loss (mean over tokens).",
    "prediction": "Post-norm's slope lies within 0 ± .15 and pre-norm's within -.5 ± .15.",
    "null": "At least one slope lies outside its region.",
    "statistic": "A t interval over seeds of each slope; the larger of the two p values of the two one-sided tests.",
    "falsified": "The whole interval of either slope outside its region.",
    "studies": ("N2.gradients",), "smallest": 0.15, "figure": figure_gradients, "shown": shown_gradients,
}  # fmt: skip
_GRID = ("T3, 512 people: LayerNorm and SwiGLU with 2, 6 and 12 layers of width 64, learning rates 3e-4, 1e-3, 3e-3 and 1e-2, "
         "without warm-up and with 5%; post-norm without the factor 1/sqrt(2L) at initialisation.")  # fmt: skip
_CELLS: dict[str, Any] = {"studies": ("N2.training",), "shown": partial(shown_cells, "N2.training"),
                          "figure": partial(figure_cells, "N2.training"), "scope": _GRID}  # fmt: skip
_REACHED = "99% of the training prompts right"

CLAIMS = (
    Claim(id="N1b", source="7.23-7.26", sentence="Normalisation keeps activations in a range that gradient training can use.",
          hypotheses=(
        Hypothesis(
            id="N1b.trainable", rule=n1b, studies=("N1b",), unit="of the cells", smallest=0.1,
            shown=partial(shown_cells, "N1b"), figure=partial(figure_cells, "N1b"),
            quantity=f"The share of cells (depth and learning rate) that reach {_REACHED}, with LayerNorm minus without norms.",
            prediction="It is above 0.",
            null="There is no difference; each seed's sign is as likely as the other.",
            statistic="A t interval over seeds of the difference of shares; an exact sign-flip test.",
            falsified="An interval below 0, or wholly inside ± 10 points.",
            scope="T3, 64 people: 2, 4 and 8 layers of width 32, four learning rates from 1e-3 to 3e-2, gradients clipped at 1.",
        ),
    )),
    Claim(id="N2", source="7.27-7.32 and the final norm", sentence="Pre-norm trains better than post-norm, above all in deep "
          "models and without warm-up, and needs one more norm at the end.", hypotheses=(
        Hypothesis(id="N2.h1", rule=h1, primary=True, scope=_PAPER, **_SLOPES),
        Hypothesis(id="N2.h1b", rule=h1b, **_SLOPES, scope=_INIT + "this package's own initialisation, four heads, SwiGLU, "
                   "rotary positions, writing matrices scaled by 1/sqrt(2L)."),
        Hypothesis(
            id="N2.h2", rule=h2, studies=("N2.gradients",), unit="of d per layer", shown=shown_stream, scope=_PAPER,
            quantity="The growth of the stream's mean squared norm with each layer in a model of 32 layers.",
            prediction="Pre-norm's stream grows along a line and lies between (1 + l/2) d and (1 + 3l/2) d behind layer l; "
                       "post-norm's sum before its norm stays the same.",
            null="Not tested: bounds.",
            statistic="A t interval over seeds of the slope on the layer; pre-norm's must lie in (.5, 1.5), post-norm's in "
                      "± .05, all layers' means in the bounds, and R² of the line above .95.",
            falsified="Either interval wholly outside, a layer's mean outside the bounds, or R² below .95.",
        ),
        Hypothesis(
            id="N2.h3", rule=h3, primary=True, unit="of the cells", smallest=0.3, **_CELLS,
            quantity=f"The share of cells with 6 or 12 layers and no warm-up that reach {_REACHED}, pre-norm minus post-norm.",
            prediction="It is above .3.",
            null="There is no difference; each seed's sign is as likely as the other.",
            statistic="A t interval over seeds of the difference of shares; an exact sign-flip test.",
            falsified="An interval wholly below .3.",
        ),
        Hypothesis(
            id="N2.h3b", rule=h3b, unit="of the cells", smallest=0.1, **_CELLS,
            quantity=f"The share of all cells that reach {_REACHED}, pre-norm with its final norm minus pre-norm without.",
            prediction="It is above 0.",
            null="There is no difference; each seed's sign is as likely as the other.",
            statistic="A t interval over seeds of the difference of shares; an exact sign-flip test.",
            falsified="An interval below 0, or wholly inside ± 10 points.",
        ),
        Hypothesis(
            id="N2.h3c", rule=h3c, unit="nats", smallest=0.02, **_CELLS,
            quantity="Post-norm's held-out nats minus pre-norm's with two layers and warm-up, each at the learning rate at which "
                     "its mean is lowest.",
            prediction="It lies within ± .02.",
            null="It lies outside ± .02.",
            statistic="A t interval over seeds of the paired difference and two one-sided tests.",
            falsified="An interval wholly outside ± .02.",
        ),
    )),
    Claim(id="N3", source="RMSNorm", sentence="RMSNorm, which is simpler, does as well as LayerNorm.", hypotheses=(
        Hypothesis(
            id="N3.language", rule=n3, studies=("N3.language",), primary=True, unit="nats", smallest=0.02,
            shown=partial(shown_norms, "N3.language"),
            quantity="RMSNorm's held-out nats per token minus LayerNorm's.",
            prediction="It lies within ± .02.",
            null="It lies outside ± .02.",
            controls="The learning rate is the best of three for each norm, chosen on other seeds.",
            statistic="A t interval over seeds of the paired difference and two one-sided tests.",
            falsified="An interval wholly outside ± .02.",
            scope="T8: four layers of width 128, Python's standard library, 2,000 steps.",
        ),
        Hypothesis(
            id="N3.facts", rule=n3_facts, studies=("N3.facts",), unit="points of accuracy", smallest=2.0,
            shown=partial(shown_norms, "N3.facts"),
            quantity="RMSNorm's held-out accuracy minus LayerNorm's.",
            prediction="It lies within ± 2 points.",
            null="It lies outside ± 2 points.",
            controls="The learning rate is the best of three for each norm, chosen on other seeds.",
            statistic="A t interval over seeds of the paired difference and two one-sided tests.",
            falsified="An interval wholly outside ± 2 points.",
            scope="T3, 512 people: two layers of width 64, SwiGLU, 600 steps.",
        ),
    )),
)  # fmt: skip
