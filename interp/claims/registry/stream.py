"""R3, R4, R5: what attention moves along the stream, in which subspaces, and what the stream holds at which depth."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch

from interp.analyses.composition import composition_scores, read_write_overlaps
from interp.analyses.heads import head_scores
from interp.claims.claim import Claim, Hypothesis, Reading, Study, Tables
from interp.model.transformer import Transformer
from interp.run import run as run_model
from interp.stats import binomial_p, clopper_pearson, sign_flip, t_interval
from interp.tasks import as_task

LEAST = 0.3
"""Mean attention to the place in question from which a head counts as a previous-token or an induction head."""
OFFSET = 20
"""How far before the query the key stands whose composition is scored (rotary positions): between the task's 16 and 24."""


def induction(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """Two-layer attention-only models, and one-layer ones as the control.

    Columns: what ("pair": composition of an earlier with a later head; "overlap": a head's read and write space; "loss"),
    seed, layers, nats; of pairs kind, earlier_head, head, score, percentile, previous, induction (the two heads' attention);
    of overlaps state ("trained", "untrained"), layer, head, overlap, expected."""
    from interp.training.many import train_many

    task, tables = as_task("induction"), []
    for layers in config["layers"]:
        model = task.model_config(n_layers=layers, n_heads=config["n_heads"], positions="rotary")  # type: ignore[attr-defined]
        configs = [task.train_config(seed=seed, steps=config["steps"]) for seed in config["seeds"]]  # type: ignore[attr-defined]
        folder = scratch / f"layers_{layers}"
        found = train_many(model, task, configs, folder, "stacked", folder.exists(), progress=False)
        for one in found.values():
            assert one.config is not None
            about = {"seed": one.config.seed, "layers": layers, "nats": float(one.last["nats"].max())}
            tables.append(pd.DataFrame([{"what": "loss", **about}]))
            if layers == 2:
                tables.append(pairs(one.model, config["draws"]).assign(what="pair", **about))
                for state, which in (("trained", one.model), ("untrained", Transformer(model, seed=one.config.seed))):
                    tables.append(overlaps(which).assign(what="overlap", state=state, **about))
    return pd.concat(tables, ignore_index=True)


def pairs(model: Transformer, draws: int) -> pd.DataFrame:
    """Composition of every head of layer 0 with every head of layer 1, beside what the two attend to."""
    attended = head_scores(model, conventions=("mean",)).set_index(["score", "layer", "head"])["value"].astype(float)
    scores = composition_scores(model, null=draws, offsets=(OFFSET,))
    table = scores[["kind", "earlier_head", "head", "score", "percentile"]].reset_index(drop=True)
    return table.assign(previous=[attended["previous token", 0, head] for head in table["earlier_head"]],
                        induction=[attended["induction", 1, head] for head in table["head"]])  # fmt: skip


def overlaps(model: Transformer) -> pd.DataFrame:
    """Each head's read and write space: overlap and its exact mean for random ones."""
    table = read_write_overlaps(model)
    return table[table["spaces"] == "read-write"][["layer", "head", "overlap", "expected"]]


def facts(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """The facts model of the textbook's block, read three ways, beside itself untrained.

    Columns: what ("overlap", "variance", "agreement"), state ("trained", "untrained"), seed, recall, and those of `overlaps`,
    `explained` and `key_value_agreement`."""
    from interp.analyses.agreement import key_value_agreement
    from interp.tasks.toy_facts import ToyFacts
    from interp.training.many import train_many

    task = ToyFacts(config["subjects"])
    configs = [task.train_config(seed=seed, **config["training"]) for seed in config["seeds"]]
    folder = scratch / "runs"
    found = train_many(None, task, configs, folder, "stacked", folder.exists(), progress=False)
    prompts, tables = task.splits["train"], []
    last = prompts.inputs.roles["final"]
    now = prompts.inputs.tokens[torch.arange(len(prompts)), last]
    for one in found.values():
        assert one.config is not None
        untrained = Transformer(one.model.config, seed=one.config.seed)
        for state, model in (("trained", one.model), ("untrained", untrained)):
            about = {"state": state, "seed": one.config.seed, "recall": float(one.last.loc["held_out", "accuracy"])}  # type: ignore[arg-type]
            tables.append(overlaps(model).assign(what="overlap", **about))
            streams = stream_at(model, prompts.inputs, last)
            tables.append(explained(streams, now, prompts.answers).assign(what="variance", **about))
            agreed = key_value_agreement(model, prompts.inputs, prompts.answers, "final", config["permutations"])
            tables.append(agreed.assign(what="agreement", **about))
    return pd.concat(tables, ignore_index=True)


def language(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """Small language models: how much of the stream the current and the next token explain. Columns of `explained`, and state,
    seed, nats."""
    from interp.training import train

    task = as_task("language-small")
    training = task.train_config(seed=config["seed"], steps=config["steps"])  # type: ignore[attr-defined]
    folder = scratch / "run"
    one = train(None, task, training, folder, resume=folder.exists(), progress=False)
    batch, tables = task.evaluation["held_out"], []
    for state, model in (("trained", one.model), ("untrained", Transformer(one.model.config, seed=config["seed"]))):
        streams = stream_at(model, batch.inputs, None)
        table = explained(streams, batch.inputs.tokens.flatten(), batch.targets.flatten(), config["least"])
        tables.append(table.assign(state=state, seed=config["seed"], nats=float(one.last.loc["held_out", "nats"])))  # type: ignore[arg-type]
    return pd.concat(tables, ignore_index=True)


@torch.no_grad()
def stream_at(model: Transformer, inputs: Any, last: torch.Tensor | None) -> dict[str, np.ndarray]:
    """The stream before the first block and after every sublayer [example d], at `last` or at every position."""
    names = ["0.resid_pre"]
    names += [f"{layer}.{name}" for layer in range(model.config.n_layers) for name in ("resid_mid", "resid_post")]
    cache = run_model(model, inputs, record=names).cache
    rows = torch.arange(inputs.batch)
    return {
        name: (cache[name].flatten(0, 1) if last is None else cache[name][rows, last]).double().numpy()
        for name in names
    }


def explained(
    streams: Mapping[str, np.ndarray], now: torch.Tensor, following: torch.Tensor, least: int = 8
) -> pd.DataFrame:
    """Share of the stream's variance that the current and the next token's identity explain, held out: R² of class means that
    were computed on one half of the examples and judged on the other. Classes of fewer than `least` examples are left out.

    Columns: place (0 = before the first block), site, current, next, n."""
    kinds = [np.unique(values.numpy(), return_inverse=True, return_counts=True) for values in (now, following)]
    keep = np.logical_and(*(counts[index] >= least for _, index, counts in kinds))
    half = np.random.default_rng(0).permutation(int(keep.sum())) % 2 == 0
    rows = []
    for place, (site, x) in enumerate(streams.items()):
        found = [held_out_r2(x[keep], index[keep], half) for _, index, _ in kinds]
        rows.append({"place": place, "site": site, "current": found[0], "next": found[1], "n": int(keep.sum())})
    return pd.DataFrame(rows)


def held_out_r2(x: np.ndarray, labels: np.ndarray, half: np.ndarray) -> float:
    """1 − Σ‖x − mean of its class‖² / Σ‖x − mean‖² on the rows outside `half`, all means from those inside."""
    size = int(labels.max()) + 1
    counts = np.bincount(labels[half], minlength=size)
    sums = np.zeros((size, x.shape[1]))
    np.add.at(sums, labels[half], x[half])
    judged = ~half & (counts[labels] > 0)
    means = sums[labels[judged]] / counts[labels[judged], None]
    rest = np.square(x[judged] - means).sum()
    return float(1 - rest / np.square(x[judged] - x[half].mean(0)).sum())


def composed(table: pd.DataFrame) -> pd.DataFrame:
    """Per seed: whether the top K-composition pair joins a previous-token head to an induction head above the null's 99.9th
    percentile, how likely that is by chance (share of such pairs), and the rank of the pair that attends most."""
    rows = []
    for seed, mine in table[(table["what"] == "pair") & (table["kind"] == "k")].groupby("seed"):
        top = mine.loc[mine["score"].idxmax()]  # type: ignore[arg-type, call-overload]
        right = (mine["previous"] >= LEAST) & (mine["induction"] >= LEAST)
        strict = mine[
            (mine["previous"] == mine["previous"].max()) & (mine["induction"] == mine["induction"].max())
        ].iloc[0]
        holds = top["previous"] >= LEAST and top["induction"] >= LEAST and top["percentile"] > 99.9
        rows.append({"seed": seed, "holds": bool(holds), "chance": float(right.mean()), "earlier_head": int(top["earlier_head"]),
                     "head": int(top["head"]), "score": top["score"], "percentile": top["percentile"],
                     "previous": top["previous"], "induction": top["induction"], "pairs": len(mine),
                     "strict_rank": int((mine["score"] > strict["score"]).sum()) + 1, "nats": top["nats"]})  # fmt: skip
    return pd.DataFrame(rows)


def composition(tables: Tables) -> Reading:
    """Share of seeds in which the top pair is the right one: at least 8 of 10 supported; more than 2 of 10 failing, refuted."""
    found = composed(tables["R3"])
    n, hits = len(found), int(found["holds"].sum())
    one = clopper_pearson(hits, n)
    chance = float(found["chance"].max())
    says = "refuted" if n - hits > 0.2 * max(n, 10) else "supported" if n >= 10 else "undecided"
    losses = tables["R3"][tables["R3"]["what"] == "loss"].groupby("layers")["nats"].mean()
    p = binomial_p(hits, n, min(max(chance, 1e-9), 1 - 1e-9))
    note = (f"{hits} of {n} seeds; the two heads that attend most are the top pair in {int((found['strict_rank'] == 1).sum())}; "
            f"second copy: two layers {losses.get(2, np.nan):.3f} nats" + (
                f", one layer {losses[1]:.2f}" if 1 in losses else ""))  # fmt: skip
    return Reading(says, one.estimate, one.low, one.high, n, p, note)


def apart(tables: Tables) -> Reading:
    """Overlap over its random mean, averaged over heads and the two tasks: below .95 supported, above .95 refuted."""
    trained, untrained = (overlap_ratios(tables, state) for state in ("trained", "untrained"))
    found = t_interval(trained.mean(axis=1).to_numpy())
    says = "supported" if found.high < 0.95 else "refuted" if found.low > 0.95 else "undecided"
    note = ", ".join(f"{task} {trained[task].mean():.2f} (untrained {untrained[task].mean():.2f})" for task in trained)
    return Reading(
        says, found.estimate, found.low, found.high, found.n, sign_flip(trained.mean(axis=1).to_numpy(), 1.0), note
    )


def overlap_ratios(tables: Tables, state: str) -> pd.DataFrame:
    """Mean over heads of overlap / expected [seed × task]."""
    columns = {}
    for task, study in (("induction", "R3"), ("facts", "facts.reading")):
        table = tables[study]
        mine = table[(table["what"] == "overlap") & (table["state"] == state)]
        columns[task] = (mine["overlap"] / mine["expected"]).groupby(mine["seed"]).mean()
    return pd.DataFrame(columns).dropna()


def depth(table: pd.DataFrame) -> pd.DataFrame:
    """Per seed: Spearman's ρ of place with each share of variance, and whether the two cross."""
    rows = []
    for seed, mine in table.sort_values("place").groupby("seed"):
        rho = mine[["place", "current", "next"]].corr(method="spearman")["place"]
        first, last = mine.iloc[0], mine.iloc[-1]
        crosses = bool(first["current"] > first["next"] and last["current"] < last["next"])
        rows.append({"seed": seed, "current": rho["current"], "next": rho["next"], "crosses": crosses})
    return pd.DataFrame(rows)


def _depth_reading(table: pd.DataFrame) -> tuple[str, Any, float, str]:
    found = depth(table)
    falls, rises = t_interval(-found["current"].to_numpy()), t_interval(found["next"].to_numpy())
    n, crossed = len(found), int(found["crosses"].sum())
    p = max(
        sign_flip(found["current"].to_numpy()),
        sign_flip(found["next"].to_numpy()),
        binomial_p(crossed, n, 0.5, "two-sided"),
    )
    share = clopper_pearson(crossed, n)
    if falls.low > 0 and rises.low > 0 and share.low > 0.5:
        says = "supported"
    elif falls.high < 0 or rises.high < 0 or share.high < 0.5:
        says = "refuted"
    else:
        says = "undecided"
    weaker = min(falls, rises, key=lambda one: one.estimate)
    note = f"ρ current {-falls.estimate:+.2f}, next {rises.estimate:+.2f}, crossing in {crossed} of {n}"
    return says, weaker, p, note


def depth_language(tables: Tables) -> Reading:
    """Current falls and next rises with depth, and they cross in most seeds: supported; either the other way: refuted."""
    table = tables["R5.language"]
    says, one, p, note = _depth_reading(table[table["state"] == "trained"])
    _, _, _, control = _depth_reading(table[table["state"] == "untrained"])
    return Reading(says, one.estimate, one.low, one.high, one.n, p, f"{note}; untrained: {control}")  # type: ignore[arg-type]


def depth_facts(tables: Tables) -> Reading:
    """The same at the last token of the facts task."""
    table = tables["facts.reading"]
    says, one, p, note = _depth_reading(table[(table["what"] == "variance") & (table["state"] == "trained")])
    return Reading(says, one.estimate, one.low, one.high, one.n, p, note)  # type: ignore[arg-type]


def key_value(tables: Tables) -> Reading:
    """Agreement of keys and values minus its mean under permuted pairing: above one point supported, below refuted."""
    table = tables["facts.reading"]
    mine = table[table["what"] == "agreement"]
    excess = {state: agreement_excess(mine[mine["state"] == state]) for state in ("trained", "untrained")}
    found, control = t_interval(excess["trained"]["excess"].to_numpy()), excess["untrained"]
    says = "supported" if found.low > 1 else "refuted" if found.high < 1 else "undecided"
    note = (f"agreement {excess['trained']['agreement'].mean():.1f}%, permuted pairing {excess['trained']['null'].mean():.1f}%; "
            f"untrained {control['agreement'].mean():.1f}%, {control['null'].mean():.1f}%")  # fmt: skip
    return Reading(
        says, found.estimate, found.low, found.high, found.n, sign_flip(excess["trained"]["excess"].to_numpy()), note
    )


def agreement_excess(table: pd.DataFrame) -> pd.DataFrame:
    """Per seed, in percent of neurons and signs: agreement, null (permuted pairing) and excess, weighted by how many fire."""
    rows = []
    for seed, mine in table.groupby("seed"):
        weights = mine["n"] / mine["n"].sum()
        agreement, null = (100 * float((mine[name] * weights).sum()) for name in ("agreement", "null_mean"))
        rows.append({"seed": seed, "agreement": agreement, "null": null, "excess": agreement - null})
    return pd.DataFrame(rows)


def depth_figure(name: str) -> Any:
    """A figure of the study's variance shares."""

    def draw(tables: Tables) -> Any:
        from interp.plots.stream import variance_curves

        table = tables[name]
        return variance_curves(table[table["what"] == "variance"] if "what" in table else table)

    return draw


def pairs_figure(tables: Tables) -> Any:
    """Every pair's K-composition, the top one of each seed marked."""
    from interp.plots.stream import composition_ranks

    table = tables["R3"]
    return composition_ranks(table[(table["what"] == "pair") & (table["kind"] == "k")])


def overlap_table(tables: Tables) -> pd.DataFrame:
    """Overlap over its random mean per task, trained and untrained."""
    means = [overlap_ratios(tables, state).mean().rename(state) for state in ("trained", "untrained")]
    return pd.concat(means, axis=1).reset_index(names="task")


def agreement_table(tables: Tables) -> pd.DataFrame:
    """Agreement per layer and sign, mean over seeds, in percent."""
    table = tables["facts.reading"]
    mine = table[table["what"] == "agreement"]
    found = 100 * mine.groupby(["state", "layer", "sign"])[["agreement", "null_mean"]].mean()
    return found.reset_index()


def _induction_units(groups: list[list[int]], layers: list[int], draws: int) -> dict[str, dict[str, Any]]:
    return {f"seeds_{seeds[0]}_{seeds[-1]}": {"seeds": seeds, "layers": layers, "n_heads": 4, "steps": 1500, "draws": draws}
            for seeds in groups}  # fmt: skip


def _facts_units(groups: list[list[int]]) -> dict[str, dict[str, Any]]:
    return {f"seeds_{seeds[0]}_{seeds[-1]}": {"seeds": seeds, "subjects": 512, "permutations": 1000,
                                              "training": {"steps": 600, "batch_size": 128}} for seeds in groups}  # fmt: skip


TEN = [list(range(5)), list(range(5, 10))]
INDUCTION = Study(
    "R3", "do the previous-token head and the induction head compose?", induction,
    {"standard": _induction_units(TEN, [2, 1], 10_000)}, {"standard": 25},
)  # fmt: skip
FACTS = Study(
    "facts.reading", "what do streams, heads and FFN neurons of the facts models hold?", facts,
    {"quick": _facts_units([[0], [1]]), "standard": _facts_units(TEN)}, {"quick": 1, "standard": 6},
)  # fmt: skip
LANGUAGE = Study(
    "R5.language", "which token does the stream of a small language model represent at which depth?", language,
    {"standard": {f"seed_{seed}": {"seed": seed, "steps": 500, "least": 20} for seed in range(10)}}, {"standard": 25},
)  # fmt: skip
STUDIES = (INDUCTION, FACTS, LANGUAGE)

_T3 = "decoders of two layers, d_model 64, 2,048 made-up facts (task facts)"
_T1 = "attention-only decoders of two layers, d_model 64, rotary positions (task induction)"
CLAIMS = (
    Claim(
        id="R3", source="SLP3 7.2, after Elhage 2021 and Olsson 2022",
        sentence="An attention head moves information from one token's residual stream into another's.",
        hypotheses=(
            Hypothesis(
                id="R3.composition", primary=True, rule=composition, studies=("R3",), figure=pairs_figure,
                shown=lambda tables: composed(tables["R3"]),
                quantity="share of seeds whose top K-composition pair joins a previous-token head (at least .3 of its attention "
                         "there) to an induction head (the same) above the null's 99.9th percentile",
                unit="of seeds", prediction="at least 8 of 10", null="as many pairs as have two such heads, over all pairs; "
                                                                     "scores: "
                "the same spectra under 10,000 Haar-random rotations",
                controls="one-layer models do not learn the task; Q and V composition beside it",
                statistic="exact binomial against the largest such share, Clopper-Pearson interval",
                falsified="more than 2 of 10 seeds fail", scope=_T1,
            ),
        ),
    ),
    Claim(
        id="R4", source="SLP3 7.2, after Elhage 2021",
        sentence="What a head moves lies in another subspace of the stream than what the token held itself.",
        hypotheses=(
            Hypothesis(
                id="R4.overlap", primary=True, rule=apart, studies=("R3", "facts.reading"), shown=overlap_table,
                quantity="overlap of what a head reads (W_V) and writes (W_O), over its exact mean for random subspaces",
                unit="times the random mean", prediction="below 1, by at least 5%",
                null="1: in d dimensions, small subspaces hardly overlap anyway", controls="the same models untrained",
                statistic="95% t interval over seeds of the mean over heads and both tasks, exact sign flips", smallest=0.05,
                falsified="an interval above .95: different subspaces would be dimension counting", scope=f"{_T1}; {_T3}",
            ),
        ),
    ),
    Claim(
        id="R5", source="SLP3 7.2", sentence="Low layers represent the current token, the highest layers the next one.",
        hypotheses=(
            Hypothesis(
                id="R5.language", primary=True, rule=depth_language, studies=("R5.language",), figure=depth_figure("R5.language"),
                quantity="Spearman's ρ of depth with the share of the stream's variance that the current (sign turned) and "
                         "the next "
                         "token explain; the weaker of the two",
                unit="ρ", prediction="both above 0 (.8 expected), and the two shares cross before the top",
                null="0; the untrained model", controls="the same model untrained; held-out R², never in-sample",
                statistic="95% t interval over seeds, exact sign flips, crossing by the exact binomial",
                falsified="either ρ below 0, or the shares cross in fewer than half of the seeds",
                scope="decoders of four layers, d_model 64, 500 steps on Python's standard library (task language-small)",
            ),
            Hypothesis(
                id="R5.facts", rule=depth_facts, studies=("facts.reading",), figure=depth_figure("facts.reading"),
                quantity="the same at the last token of a fact's prompt, where the next token is the answer", unit="ρ",
                prediction="both above 0, and crossing", null="0", statistic="as R5.language", falsified="as "
                                                                                                         "R5.language", scope=_T3,
            ),
        ),
    ),
    Claim(
        id="F3", source="SLP3 7.2, after Geva 2021 and 2022",
        sentence="The FFN works as a key-value memory: keys detect patterns, values promote tokens.",
        hypotheses=(
            Hypothesis(
                id="F3.agreement", primary=True, rule=key_value, studies=("facts.reading",), shown=agreement_table,
                quantity="share of neurons (per sign) whose value promotes most what follows the prompt that excites them "
                         "most, minus "
                         "the same with values permuted among a layer's neurons",
                unit="points", prediction="above 1 point", null="permuted pairing, 1,000 permutations: keeps how often each "
                                                                "token "
                "is promoted", controls="untrained models", statistic="95% t interval over seeds, exact sign flips", smallest=1.0,
                falsified="an interval below 1 point", scope=_T3,
            ),
        ),
    ),
)  # fmt: skip
