"""Rank-one edits of the shipped toy model beside fine-tuning and random edits, laid out like the published table. See README.md.

    python experiments/e08_editing/run.py [--facts 100] [--tune 30]        some five minutes on two cores

Where to edit (module, layer, position) is chosen on `--tune` facts and measured on others."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd

import interp
from interp.analyses import (
    Edit,
    EditCase,
    edit_cases,
    edit_scores,
    edit_summary,
    fine_tuned_edit,
    key_covariance,
    random_edit,
    random_key_edit,
    rank_one_edit,
    spread_edit,
)
from interp.record import provenance, write_atomic, write_json, write_text

HERE = Path(__file__).parent
POSITIONS = ("subject_last", "relation", "final")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--facts", type=int, default=100)
    parser.add_argument("--tune", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=HERE)
    asked = parser.parse_args(words)
    model, task = interp.shipped()
    facts = np.random.default_rng(0).permutation(len(task.facts.facts))
    tune, test = (
        edit_cases(task.prompts, some.tolist(), "held_out")
        for some in (facts[: asked.tune], facts[asked.tune :][: asked.facts])
    )
    sites, best = swept(model, task.splits["train"].inputs, tune)
    scores, seconds = measured(model, task.splits["train"].inputs, test, best)
    table = edit_summary(scores).merge(seconds, on="method")
    for name, one in (("sites", sites), ("edits", table)):
        write_atomic(asked.folder / f"{name}.csv", lambda path, one=one: one.round(4).to_csv(path, index=False))
    write_json(
        asked.folder / "provenance.json",
        provenance(config={"facts": asked.facts, "tune": asked.tune, "site": list(best)}, seed=0),
    )
    write_text(asked.folder / "README.md", text(sites, table, best, asked.tune))
    print(text(sites, table, best, asked.tune))


def swept(model, inputs, cases: Sequence[EditCase]) -> tuple[pd.DataFrame, tuple[str, int, str]]:
    """S at every module, layer and position, and the best FFN site."""
    rows = []
    for module in ("ffn", "attention"):
        for layer in range(model.config.n_layers):
            covariance, _ = key_covariance(model, inputs, layer, module)
            for position in POSITIONS:
                edits = rank_one_edit(model, [one.rewrite for one in cases], layer, module, position, covariance)
                found = edit_summary(edit_scores(model, cases, edits)).iloc[0]
                rows.append(
                    {
                        "module": module,
                        "layer": layer,
                        "position": position,
                        **found[["S", "ES", "PS", "NS", "SS", "n"]],
                    }
                )
    table = pd.DataFrame(rows)
    row = table[table["module"] == "ffn"].sort_values("S", kind="stable").iloc[-1]
    return table, ("ffn", int(row["layer"]), str(row["position"]))


def measured(model, inputs, cases: Sequence[EditCase], best: tuple[str, int, str]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Scores of every method on the same cases, and seconds per fact."""
    import time

    _, layer, position = best
    rewrites = [one.rewrite for one in cases]
    covariances = {i: key_covariance(model, inputs, i)[0] for i in range(model.config.n_layers)}
    heads, _ = key_covariance(model, inputs, layer, "attention")
    edits = rank_one_edit(model, rewrites, layer, "ffn", position, covariances[layer])

    def tuned(limit: float | None = None) -> list[Edit]:
        return [fine_tuned_edit(model, one, layer, "ffn", 100, 5e-3, limit) for one in rewrites]

    def spread(one) -> list[Edit]:
        return spread_edit(model, [one], sorted(covariances), covariances, 1.0, position)

    makers: dict[str, Callable[[], list]] = {
        "unedited": lambda: [None] * len(cases),
        f"rank-one, FFN {layer} at {position}": lambda: rank_one_edit(
            model, rewrites, layer, "ffn", position, covariances[layer]
        ),
        "rank-one, FFN 0 at subject_last": lambda: rank_one_edit(
            model, rewrites, 0, "ffn", "subject_last", covariances[0]
        ),
        f"rank-one, attention {layer} at {position}": lambda: rank_one_edit(
            model, rewrites, layer, "attention", position, heads
        ),
        "FT": tuned,
        "FT+L": lambda: tuned(limit=0.01),
        "MEMIT, each fact alone": lambda: [spread(one) for one in rewrites],
        "random rank-one": lambda: [random_edit(one, seed) for seed, one in enumerate(edits)],
        "random key": lambda: [random_key_edit(one, seed) for seed, one in enumerate(edits)],
    }
    frames, seconds = [], []
    for name, make in makers.items():
        began = time.perf_counter()
        made: list[Edit | list[Edit] | None] = make()
        seconds.append({"method": name, "seconds_per_fact": (time.perf_counter() - began) / len(cases)})
        frames.append(edit_scores(model, cases, made, name))
    return pd.concat(frames, ignore_index=True), pd.DataFrame(seconds)


def text(sites: pd.DataFrame, table: pd.DataFrame, best: tuple[str, int, str], tune: int) -> str:
    """What came out, number by number."""
    columns = ["S", "ES", "EM", "PS", "PM", "NS", "NM", "SS"]
    lines = ["| method | " + " | ".join(columns) + " | s per fact |", "|---" * (len(columns) + 2) + "|"]
    for row in table.to_dict("records"):
        cells = [f"{row[c]:.1f}" + (f" ± {row[c + ' ±']:.1f}" if c + " ±" in row else "") for c in columns]
        lines.append(f"| {row['method']} | " + " | ".join(cells) + f" | {row['seconds_per_fact']:.2f} |")
    where = ["| module | layer | position | S | ES | PS | NS | SS |", "|---|---|---|---|---|---|---|---|"]
    for row in sites.to_dict("records"):
        cells = " | ".join(f"{row[c]:.1f}" for c in ("S", "ES", "PS", "NS", "SS"))
        where.append(f"| {row['module']} | {row['layer']} | {row['position']} | {cells} |")
    readings = ", ".join(f"{row['method']} {row['S']:.1f}" for row in table.to_dict("records"))
    return f"""# Rank-one edits of the toy model

Written by `python experiments/e08_editing/run.py`. One trained model (the one that ships), unit: the fact, n =
{table["n"].iloc[0]}; ±: half of a 95% t interval. Percent, as in the published table (Meng et al. 2022, table 4): S harmonic
mean of ES, PS and NS; ES, EM success and magnitude of the rewrite in three templates; PS, PM in the template that was never
trained with the fact; NS, NM ten other people with the same true answer. SS, not in the paper: the same person's other facts.
The site ({best[0]} of layer {best[1]}, {best[2]}) was chosen on {tune} other facts.

{chr(10).join(lines)}

Every site, on the {tune} facts that the choice was made on:

{chr(10).join(where)}

S of {readings}. What an edit can change says what can be controlled from there, not where a fact is stored (Hase et al.
2023): the same algebra is as open to attention as to an FFN.
"""


if __name__ == "__main__":
    main()
