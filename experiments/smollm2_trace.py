"""Where does SmolLM2-135M look a fact up? Causal tracing, attention knock-out, attribute rate. results/smollm2_trace/.

    python experiments/smollm2_trace.py [--facts 100] [--noise-facts 30] [--samples 10] [--only replacement noise …]

Facts that ship with interp and that the model knows; every prompt begins with the prefix token <|endoftext|> (id 0). One file per
fact in --runs: a rerun goes on where the last one stopped, and with other settings it is refused. The summary is made of what
is there."""

from __future__ import annotations

import argparse
import json
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from tqdm.auto import tqdm

import interp
from interp.analyses.attributes import attribute_rate, extraction, rates
from interp.analyses.causal_trace import causal_trace
from interp.analyses.knock_out import attention_knock_out, knock_out_effects
from interp.analyses.subject_noise import noise_scale
from interp.analyses.trace_effects import held_out_peaks, trace_agreement, trace_effects
from interp.bridges import SMOLLM2_PREFIX
from interp.plots.trace import knock_out_curves, rate_curves, trace_heatmap, trace_lines
from interp.record import provenance, write_atomic, write_json, write_table, write_text
from interp.tasks import replacement_pairs
from interp.tasks.fact_checks import KnownFacts, attribute_sets, known_facts
from interp.tasks.facts import real_facts
from interp.tasks.task import Pairs

RESULTS, PARTS = (
    Path(__file__).parent / "results" / "smollm2_trace",
    ("replacement", "noise", "knock_out", "attributes"),
)
PREFIX = "<|endoftext|> (id 0)"


def known(model: Any, tokenizer: Any, runs: Path) -> KnownFacts:
    """Every shipped fact in every template; the scores are kept, since they take minutes."""
    facts = real_facts(templates=None)
    kept = runs / "known.parquet"
    if not kept.exists():
        write_table(kept, known_facts(model, facts, tokenizer, SMOLLM2_PREFIX).scores)
    scores = pd.read_parquet(kept)
    return KnownFacts(facts, facts.prompts(tokenizer, SMOLLM2_PREFIX), scores, 1)


def chosen(found: KnownFacts, n: int) -> Pairs:
    """n pairs, one per fact, relations in turn: both prompts answered right, the most tokens after the subject first."""
    pairs = replacement_pairs(found.right_prompts(), seed=0)
    roles = pairs.clean.roles
    table = pairs.table.assign(after=(roles["final"] - roles["subject_last"]).tolist(), row=range(len(pairs)))
    best = table.sort_values("after", ascending=False, kind="stable").drop_duplicates("fact")
    best = best.sample(frac=1, random_state=0)
    best = best.assign(turn=best.groupby("relation").cumcount()).sort_values("turn", kind="stable").head(n)
    return select(pairs, best["row"].tolist())


def select(pairs: Pairs, rows: Sequence[int]) -> Pairs:
    """Some pairs."""
    index = torch.tensor(list(rows))
    return Pairs(pairs.clean.select(index), pairs.corrupted.select(index), pairs.correct[index], pairs.wrong[index],
                 pairs.table.iloc[list(rows)].reset_index(drop=True))  # fmt: skip


def per_fact(folder: Path, pairs: Pairs, settings: dict[str, Any], measure: Callable[[Pairs], pd.DataFrame]) -> None:
    """One table per fact, those present left alone. SystemExit when they were made with other settings."""
    about = folder / "settings.json"
    if about.exists() and json.loads(about.read_text()) != settings:
        sys.exit(f"{folder} holds facts made with {about.read_text().strip()}, not {settings}; choose another --runs")
    write_json(about, settings)
    for row in tqdm(range(len(pairs)), desc=folder.name, unit="fact"):
        one = select(pairs, [row])
        fact = int(one.table["fact"].iloc[0])
        target = folder / f"{fact}.parquet"
        if target.exists():
            continue
        start = time.time()
        write_table(target, measure(one))
        write_json(folder / f"{fact}.json", {"seconds": round(time.time() - start, 2), "peak_mib": peak_mib()})


def peak_mib() -> float:
    """The most memory that this process has held so far, in MiB."""
    return round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10, 0)


def collected(folder: Path) -> pd.DataFrame | None:
    """All facts' tables, None when there are none."""
    files = sorted(folder.glob("*.parquet"))
    return pd.concat([pd.read_parquet(file) for file in files], ignore_index=True) if files else None


def measure(asked: argparse.Namespace) -> None:
    """Every part that was asked for."""
    model, tokenizer = interp.smollm2()
    found = known(model, tokenizer, asked.runs)
    pairs = chosen(found, asked.facts)
    print(f"{found}; {len(pairs)} pairs, prefix {PREFIX}")
    sigma = noise_scale(model, pairs)
    trace = {"window": asked.window, "sites": ["resid_post", "ffn_out", "attn_out"]}
    noise = {**trace, "noise_seeds": asked.samples, "nu": 3 * sigma, "severed": ["ffn_out", "attn_out"]}
    sets = attribute_sets(real_facts(templates=1), tokenizer, whole=True)
    cuts = ("subject", "relation", "last", "rest", "non_subject")

    def attributes(one: Pairs) -> pd.DataFrame:
        plain = attribute_rate(model, one, sets, k=50, seed=int(one.table["fact"].iloc[0]))
        cut = [
            attribute_rate(model, one, sets, k=50, knock_out=name, window=asked.window)
            for name in ("ffn_out", "attn_out")
        ]
        return pd.concat([plain, *cut, extraction(model, one)], ignore_index=True)

    parts: dict[str, tuple[Pairs, dict[str, Any], Callable[[Pairs], pd.DataFrame]]] = {
        "replacement": (pairs, trace, lambda one: causal_trace(model, one, check=1, **trace).table()),
        "noise": (select(pairs, range(min(asked.noise_facts, len(pairs)))), {**noise, "nu": round(3 * sigma, 6)},
                  lambda one: causal_trace(model, one, corruption="noise", check=0, **noise).table()),
        "knock_out": (pairs, {"window": asked.window}, lambda one: attention_knock_out(
            model, one, window=asked.window, targets=cuts, check=0)),
        "attributes": (select(pairs, range(min(asked.noise_facts, len(pairs)))), {"window": asked.window}, attributes),
    }  # fmt: skip
    # Before the parts, so that `--only` can make a summary of what is there at any time.
    about = {"sigma": sigma, "n": found.n, "known": found.n_known, "excluded": found.excluded}
    write_json(asked.runs / "about.json", about)
    write_csv(asked.runs / "by_relation.csv", found.by_relation())
    write_csv(asked.runs / "pairs.csv", pairs.table)
    for name in asked.only:
        per_fact(asked.runs / name, *parts[name])


def write_csv(path: Path, table: pd.DataFrame) -> None:
    """A table with the prefix that its prompts had, whole or absent."""
    write_atomic(
        path, lambda temporary: table.assign(prefix=PREFIX).to_csv(temporary, index=False, float_format="%.6g")
    )


def summarise(asked: argparse.Namespace) -> None:
    """Tables, figures and README from the facts that are there."""
    tables = {name: collected(asked.runs / name) for name in PARTS}
    made: dict[str, pd.DataFrame] = {"pairs": pd.read_csv(asked.runs / "pairs.csv"), "times": times(asked.runs),
                                     "by_relation": pd.read_csv(asked.runs / "by_relation.csv")}  # fmt: skip
    traces = [table for name in ("replacement", "noise") if (table := tables[name]) is not None]
    if traces:
        made["effects"] = trace_effects(pd.concat(traces, ignore_index=True))
        enough = [held_out_peaks(table) for table in traces if table["fact"].nunique() >= 4]
        if enough:
            made["peaks"] = pd.concat(enough, ignore_index=True)
        made["metrics_agree"] = trace_agreement(made["effects"], "metric", "share")
    if len(traces) == 2:
        both = set(traces[0]["fact"]) & set(traces[1]["fact"])
        same = pd.concat([table[table["fact"].isin(both)] for table in traces], ignore_index=True)
        made["corruptions_agree"] = trace_agreement(trace_effects(same))
    if tables["knock_out"] is not None:
        made["knock_out"] = knock_out_effects(tables["knock_out"])
    if tables["attributes"] is not None:
        made |= attribute_tables(tables["attributes"])
    for name, table in made.items():
        write_csv(asked.folder / f"{name}.csv", table)
    for name, figure in figures(made).items():
        write_atomic(asked.folder / f"{name}.png", lambda temporary, figure=figure: figure.savefig(temporary, dpi=150))
    about = json.loads((asked.runs / "about.json").read_text())
    write_text(asked.folder / "README.md", text(made, about, asked))
    settings = {name: value for name, value in vars(asked).items() if not isinstance(value, Path)}
    write_json(asked.folder / "provenance.json", provenance({**settings, "prefix": PREFIX}))


def times(runs: Path) -> pd.DataFrame:
    """Seconds and peak memory per part."""
    rows = []
    for name in PARTS:
        found = [json.loads(file.read_text()) for file in sorted((runs / name).glob("[0-9]*.json"))]
        if found:
            seconds = [one["seconds"] for one in found]
            row = {
                "part": name,
                "facts": len(found),
                "minutes": sum(seconds) / 60,
                "seconds_per_fact": float(np.mean(seconds)),
            }
            rows.append({**row, "peak_mib": max(one["peak_mib"] for one in found)})
    return pd.DataFrame(rows)


def attribute_tables(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Attribute rates by layer and by knocked window, extraction by layer."""
    rate, took = table[table["k"].notna()], table[table["site"].notna()]
    plain, cut = rate[rate["knocked"] == "none"], rate[rate["knocked"] != "none"]
    both = [rates(plain, value, ["layer"]).assign(attributes=whose)
            for value, whose in (("rate", "the subject's"), ("other_rate", "another subject's"))]  # fmt: skip
    found = {"attribute_rate": pd.concat(both, ignore_index=True), "extraction": rates(took, "extracts", ["site", "layer"]),
             "attribute_knock_out": rates(cut, "rate", ["knocked", "knocked_layer", "layer"])}  # fmt: skip
    found["first_extraction"] = rates(took, "first", ["site", "layer"])
    return found


def figures(made: dict[str, pd.DataFrame]) -> dict[str, Any]:
    """Every figure that the tables allow."""
    found: dict[str, Any] = {}
    if "effects" in made:
        for corruption in pd.unique(made["effects"]["corruption"]):
            for metric in pd.unique(made["effects"]["metric"]):
                title = f"SmolLM2-135M, {corruption}, prefix {PREFIX}"
                which = {"corruption": corruption, "metric": metric, "title": title}
                found[f"heatmap_{corruption}_{metric}"] = trace_heatmap(made["effects"], **which)
                found[f"lines_{corruption}_{metric}"] = trace_lines(made["effects"], **which)
    if "knock_out" in made:
        found["knock_out"] = knock_out_curves(made["knock_out"], title=f"attention edges cut, prefix {PREFIX}")
    if "attribute_rate" in made:
        found["attribute_rate"] = rate_curves(made["attribute_rate"], "attributes", label="attribute rate")
        found["extraction"] = rate_curves(made["extraction"], label="share of facts extracted")
        found["attribute_knock_out"] = rate_curves(made["attribute_knock_out"], "knocked", "knocked_layer",
                                                   "attribute rate in the last layer")  # fmt: skip
    return found


def text(made: dict[str, pd.DataFrame], about: dict[str, Any], asked: argparse.Namespace) -> str:
    """What came out, number by number."""
    lines = [
        "# Where SmolLM2-135M looks facts up: tracing, knock-out, attribute rate", "",
        f"Written by `python experiments/smollm2_trace.py`. One model: a case study, not a population. Prefix {PREFIX}",
        f"before every prompt. {about['n']} shipped facts, {about['known']} answered right in at least one template, "
        f"{about['excluded']} excluded: all below is conditional on that.",
        f"Noise: standard deviation 3 σ, σ = {about['sigma']:.4f} over all entries of the subject tokens' embeddings; "
        f"windows of {asked.window} layers.",
        "Intervals: t over facts, 95%; draws of noise are averaged within a fact.", "",
        "## Time and memory", "", md(made["times"]),
    ]  # fmt: skip
    if "peaks" in made:
        lines += [
            "",
            "## Largest effects, chosen on half of the facts and estimated on the other half",
            "",
            md(made["peaks"]),
        ]
    if "effects" in made:
        ends = made["effects"].groupby(["corruption", "metric"], sort=False)[["ate", "n"]].max().reset_index()
        lines += ["", "Average total effect (largest n over roles):", "", md(ends)]
        lines += [
            f"\n![heat map](heatmap_{a}_{b}.png)\n\n![lines](lines_{a}_{b}.png)"
            for a, b in ends[["corruption", "metric"]].values
        ]
    for name, title in (("corruptions_agree", "Do noise and replacement agree? (same facts)"),
                        ("metrics_agree", "Do probability and logit difference agree? (shares of the total)")):  # fmt: skip
        if name in made:
            lines += ["", f"## {title}", "", md(made[name])]
    if "knock_out" in made:
        low = made["knock_out"].loc[made["knock_out"].groupby(["metric", "to"], sort=False)["change"].idxmin()]
        lines += [
            "",
            "## Attention knock-out: the centre where cutting hurts most",
            "",
            md(low),
            "",
            "![knock-out](knock_out.png)",
        ]
    if "attribute_rate" in made:
        top = made["attribute_rate"].loc[made["attribute_rate"].groupby("attributes", sort=False)["mean"].idxmax()]
        lines += ["", "## Attribute rate (top 50 tokens of the last subject token's stream), best layer", "", md(top)]
        first = made["extraction"].loc[made["extraction"].groupby("site", sort=False)["mean"].idxmax()]
        lines += [
            "",
            "## Extraction: the layer whose output at the last token has the prediction on top most often",
            "",
            md(first),
        ]
        lines += [f"\n![{name}]({name}.png)" for name in ("attribute_rate", "extraction", "attribute_knock_out")]
    return "\n".join(lines) + "\n"


def md(table: pd.DataFrame) -> str:
    """A Markdown table, numbers to three places."""
    shown = table.drop(columns=["prefix"], errors="ignore")
    cells = [[f"{x:.3g}" if isinstance(x, float) else str(x) for x in row] for row in shown.astype(object).to_numpy()]
    rows = [[str(name) for name in shown.columns], ["---"] * shown.shape[1], *cells]
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=int, default=100, help="facts of the replacement trace and the knock-outs")
    parser.add_argument("--noise-facts", type=int, default=30, help="facts of the noise trace and the attribute rates")
    parser.add_argument("--samples", type=int, default=10, help="draws of noise per fact")
    parser.add_argument("--window", type=int, default=5, help="layers per window, odd")
    parser.add_argument(
        "--only", nargs="*", choices=PARTS, default=list(PARTS), help="parts to measure; none: summary alone"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs/smollm2_trace"))
    parser.add_argument("--folder", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    if asked.only:
        measure(asked)
    summarise(asked)


if __name__ == "__main__":
    main()
