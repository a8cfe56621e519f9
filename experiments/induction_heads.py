"""Does the previous-token head compose with the induction head? results/induction_heads/{pairs.csv, composition.png, README.md}.

    python experiments/induction_heads.py [--seeds 10]        some ten minutes on two cores; resumes

Two-layer attention-only models of the task "induction", seeds 1000 and up (0-9 are kept for the registered claims), and
one-layer models as the control. In each the previous-token head of layer 0 and the induction head of layer 1 are found by
what they attend to; then their K-composition is compared with every other pair's and with 10,000 Haar-random rotations."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import pandas as pd

import interp
from interp.plots import composition_heatmap
from interp.record import write_atomic, write_text
from interp.tasks import as_task
from interp.training import Trained
from interp.training.many import train_many

RESULTS, DRAWS = Path(__file__).parent / "results" / "induction_heads", 10_000


def pair_of(run: Trained, draws: int) -> dict[str, object]:
    """The composition of a model's own two heads, its rank among all pairs (1 = top) and its percentile in the null."""
    attended = interp.head_scores(run.model, conventions=("mean",)).set_index(["score", "layer"])
    heads = [attended.loc[[key]].reset_index(drop=True).set_index("head")["value"].astype(float)
             for key in (("previous token", 0), ("induction", 1))]  # fmt: skip
    before, induction = (int(values.to_numpy().argmax()) for values in heads)
    found: dict[str, object] = {"previous_head": before, "previous": heads[0].max(), "induction_head": induction,
                                "induction": heads[1].max()}  # fmt: skip
    scores = interp.composition_scores(run.model, null=draws)
    for kind, table in scores.groupby("kind"):
        mine = table[(table["earlier_head"] == before) & (table["head"] == induction)].iloc[0]
        found |= {f"{kind}_score": float(mine["score"]), f"{kind}_percentile": float(mine["percentile"]),
                  f"{kind}_rank": int((table["score"] > mine["score"]).sum()) + 1, "pairs": len(table)}  # fmt: skip
    return found


def trained(layers: int, seeds: Sequence[int], folder: Path) -> dict[int, Trained]:
    """Models of `layers` layers, one per seed."""
    task = as_task("induction")
    configs = [task.train_config(seed=seed, stop="goals") for seed in seeds]  # type: ignore[attr-defined]
    model = task.model_config(n_layers=layers)  # type: ignore[attr-defined]
    found = train_many(model, task, configs, folder, how="stacked", resume=folder.exists())
    return {run.config.seed: run for run in found.values() if run.config is not None}


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--draws", type=int, default=DRAWS)
    parser.add_argument("--runs", type=Path, default=Path("runs/induction_heads"))
    parser.add_argument("--folder", type=Path, default=RESULTS)
    asked = parser.parse_args(words)
    two = trained(2, range(1000, 1000 + asked.seeds), asked.runs / "two_layers")
    rows = [{"seed": seed, "learned": run.success, "nats": float(run.last["nats"].max()), **pair_of(run, asked.draws)}
            for seed, run in two.items()]  # fmt: skip
    table = pd.DataFrame(rows)
    one = trained(1, range(1000, 1000 + min(3, asked.seeds)), asked.runs / "one_layer")
    write_atomic(asked.folder / "pairs.csv", lambda path: table.to_csv(path, index=False))
    first = next(iter(two.values()))
    figure = composition_heatmap(interp.composition_scores(first.model))
    write_atomic(asked.folder / "composition.png", lambda path: figure.savefig(path, dpi=150))
    write_text(asked.folder / "README.md", text(table, one, asked.draws))
    print(text(table, one, asked.draws))


def text(table: pd.DataFrame, one: dict[int, Trained], draws: int) -> str:
    """What came out, number by number."""
    top, high = table["k_rank"] == 1, table["k_percentile"] > 99.9
    lines = ["| seed | previous-token head (attention) | induction head (attention) | K: score | rank | percentile | Q | V |",
             "|---|---|---|---|---|---|---|---|"]  # fmt: skip
    for row in table.to_dict("records"):
        heads = f"0.{row['previous_head']} ({row['previous']:.2f}) | 1.{row['induction_head']} ({row['induction']:.2f})"
        others = " | ".join(f"{row[f'{kind}_rank']}, {row[f'{kind}_percentile']:.1f}" for kind in "qv")
        lines.append(f"| {row['seed']} | {heads} | {row['k_score']:.3f} | {row['k_rank']} of {row['pairs']} | "
                     f"{row['k_percentile']:.2f} | {others} |")  # fmt: skip
    control = ", ".join(f"{float(run.last['nats'].max()):.2f}" for run in one.values())
    return f"""# The previous-token head and the induction head

Written by `python experiments/induction_heads.py`: two layers, attention only, task "induction". Unit: the trained seed, n =
{len(table)}. Null: {draws:,} Haar-random rotations per pair.

The pair that attention singles out is the top K-composition pair in {int(top.sum())} of {
        len(table)
    } seeds, above the 99.9th
percentile in {int(high.sum())}, both in {int((top & high).sum())}. {int(table["learned"].sum())} of {
        len(table)
    } models met
the task's goal (at most 0.1 nats on the second copy). One-layer models with the same budget: {control} nats, {
        sum(run.success for run in one.values())
    } of {len(one)} learned.

{chr(10).join(lines)}

![K, Q and V composition of the first seed](composition.png)
"""


if __name__ == "__main__":
    main()
