"""What the report measures on a model that knows facts; the same functions serve the toy and the real model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch

from interp.analyses import (
    ffn_keys,
    ffn_subupdates,
    ffn_triggers,
    ffn_values,
    key_value_agreement,
    logit_lens,
    parameter_table,
    stream_identity,
)
from interp.hookable import Hookable
from interp.metrics import evaluate, logit_difference
from interp.run import run
from interp.sweep import SweepResult, patch_sweep
from interp.tasks.facts import Prompts
from interp.tasks.task import Pairs

STREAM_SITES = ("resid_pre", "attn_out", "ffn_out")


def by_position(
    model: Hookable, pairs: Pairs, positions: Sequence[int] | None = None, progress: bool = False
) -> pd.DataFrame:
    """Denoising of the stream, attention and FFN outputs by layer × position, raw values."""
    metric = logit_difference(pairs.correct, pairs.wrong)
    return patch_sweep(
        model,
        pairs.clean,
        pairs.corrupted,
        metric,
        STREAM_SITES,
        ("layer", "position"),
        positions=positions,
        progress=progress,
    ).table()


def by_head(model: Hookable, pairs: Pairs, progress: bool = False) -> pd.DataFrame:
    """Denoising of each head's z at every position at once, by layer × head, raw values."""
    metric = logit_difference(pairs.correct, pairs.wrong)
    return patch_sweep(model, pairs.clean, pairs.corrupted, metric, "z", ("layer", "head"), progress=progress).table()


def by_role(model: Hookable, pairs: Pairs) -> pd.DataFrame:
    """Both directions by layer × role, raw values with a column `direction`."""
    metric = logit_difference(pairs.correct, pairs.wrong)
    results: list[SweepResult] = [
        patch_sweep(model, pairs.clean, pairs.corrupted, metric, STREAM_SITES, ("layer", "role"), direction=direction)
        for direction in ("denoising", "noising")
    ]
    return pd.concat([result.table().assign(direction=result.direction) for result in results], ignore_index=True)


def effects(table: pd.DataFrame, cell: Sequence[str]) -> pd.DataFrame:
    """Normalised effect per cell from raw rows: a ratio of means over examples (0 = nothing, 1 = all)."""
    noising = (table["direction"] == "noising") if "direction" in table else pd.Series(False, index=table.index)
    start = table["corrupted"].where(~noising, table["clean"])
    end = table["clean"].where(~noising, table["corrupted"])
    moved = table.assign(gain=table["patched"] - start, span=end - start)
    sums = moved.groupby(list(cell), sort=False, dropna=False)[["gain", "span"]].mean().reset_index()
    return sums.assign(effect=sums["gain"] / sums["span"]).drop(columns=["gain", "span"])


def peaks(table: pd.DataFrame, cell: Sequence[str], draws: int = 2000, seed: int = 0) -> pd.DataFrame:
    """Per site: the cell of largest effect on even examples, and its effect on odd ones with a 95% bootstrap interval.

    Chosen on one half and estimated on the other, so that picking the peak does not inflate it. The interval is over
    prompts of one model: it does not speak of other seeds.
    """
    rng, rows = np.random.default_rng(seed), []
    even = table["example"] % 2 == 0
    for site, found in effects(table[even], ["site", *cell]).groupby("site", sort=False):
        best = found.iloc[int(found["effect"].abs().argmax())]
        same = (table["site"] == site) & ~even
        for name in cell:
            same &= table[name] == best[name]
        gain = (table["patched"] - table["corrupted"])[same].to_numpy()
        span = (table["clean"] - table["corrupted"])[same].to_numpy()
        picks = rng.integers(len(gain), size=(draws, len(gain)))
        low, high = np.quantile(gain[picks].mean(1) / span[picks].mean(1), [0.025, 0.975])
        rows.append({"site": site, **{name: best[name] for name in cell}, "chosen_at": best["effect"],
                     "effect": gain.mean() / span.mean(), "low": low, "high": high, "n": len(gain)})  # fmt: skip
    return pd.DataFrame(rows)


def lens(model: Hookable, prompts: Prompts, tokenizer: Any) -> pd.DataFrame:
    """Logit lens after every block, at the final position and at the subject's last token."""
    return logit_lens(
        model, prompts.inputs, "resid_post", ["subject_last", "final"], prompts.answers, tokenizer=tokenizer
    )


def memory(
    model: Hookable, prompts: Prompts, layer: int, tokenizer: Any, example: int = 0, n: int = 6
) -> dict[str, pd.DataFrame]:
    """The FFN of one layer as a memory on one prompt: its dominant neurons, what each promotes, reads and is set off by."""
    one = prompts.select([example])
    top = ffn_subupdates(model, one.inputs, layer, one.answers, k=n, tokenizer=tokenizer)
    neurons = top["neuron"].tolist()
    return {
        "subupdates": top.assign(prompt=one.table["prompt"].iloc[0], answer=one.table["object"].iloc[0]),
        "values": pd.concat([ffn_values(model, layer, neurons, 6, sign, tokenizer) for sign in (1, -1)]),
        "keys": ffn_keys(model, layer, neurons, 6, tokenizer),
        "triggers": ffn_triggers(model, prompts.inputs, layer, neurons, 3, tokenizer),
    }


def facts_of_model(model: Hookable, prompts: Prompts, pairs: Pairs) -> dict[str, pd.DataFrame]:
    """Parameters per group, the stream identity (R1), and the baselines of the pairs."""
    clean, corrupted = (
        evaluate(logit_difference(pairs.correct, pairs.wrong), run(model, inputs).logits, inputs).tolist()
        for inputs in (pairs.clean, pairs.corrupted)
    )
    some = prompts.inputs.select(slice(0, 8))
    return {
        "parameters": parameter_table(model),
        "identity": pd.DataFrame([{"largest_relative_error": stream_identity(model, some), "prompts": some.batch}]),
        "baselines": pd.DataFrame({"clean": clean, "corrupted": corrupted}),
    }


def agreement(model: Hookable, prompts: Prompts) -> pd.DataFrame:
    """Key-value agreement per layer against permuted pairings."""
    return key_value_agreement(model, prompts.inputs, prompts.answers)


def largest_group(prompts: Prompts) -> Prompts:
    """The prompts of one relation and template with equal length and role positions that are most numerous."""
    roles = {f"at_{name}": role.numpy() for name, role in prompts.inputs.roles.items()}
    keys = pd.DataFrame({"relation": prompts.table["relation"], "template": prompts.table["template"],
                         "length": prompts.inputs.last().numpy(), **roles})  # fmt: skip
    group = keys.groupby(list(keys.columns), sort=False).ngroup()
    chosen = prompts.select((group == group.value_counts().idxmax()).to_numpy())
    inputs = chosen.inputs
    end = int(inputs.last()[0]) + 1
    if inputs.mask is not None and not bool(inputs.mask[:, :end].all()):
        return chosen
    trimmed = type(inputs)(inputs.tokens[:, :end], roles=inputs.roles)  # right padding of longer prompts
    return Prompts(trimmed, chosen.answers, chosen.table)


def some_pairs(pairs: Pairs, n: int) -> Pairs:
    """At most `n` of the pairs, in an order that mixes relations and templates."""
    rows = pairs.table.sample(frac=1, random_state=0).index.tolist()[:n]
    return Pairs(pairs.clean.select(rows), pairs.corrupted.select(rows), pairs.correct[rows], pairs.wrong[rows],
                 pairs.table.iloc[rows].reset_index(drop=True), pairs.position)  # fmt: skip


def identical_before(pairs: Pairs) -> int:
    """How many leading positions are the same in every clean and corrupted prompt: no patch there can do anything."""
    differ = (pairs.clean.tokens != pairs.corrupted.tokens).any(0)
    return int(torch.nonzero(differ)[0])
