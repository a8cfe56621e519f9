"""Where is a fact looked up? Patching by layer × role over several trained toy models, with the seed as the unit.

    python experiments/e01_where_is_a_fact_looked_up/run.py --folder runs/e01 [--seeds 5] [--subjects 512]

Leaves models/seed_<n>/ (resumable training), effects.parquet (one row per seed × direction × site × layer × role),
summary.parquet (mean and 95% t interval over seeds), figures and provenance. Interrupt it and start it again: finished
seeds are kept. A verdict needs more than this table: it measures mediation, not storage.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pandas as pd
from scipy import stats
from tqdm.auto import tqdm

from interp import record
from interp.plots import effect_heatmaps
from interp.report.measure import by_role, effects
from interp.tasks import ToyFacts, replacement_pairs
from interp.tasks.facts import ROLES
from interp.training import train

FIRST_SEED = 1000  # seeds 0-9 are kept for the registered claims


def measure(task: ToyFacts, seed: int, folder: Path, n_prompts: int) -> pd.DataFrame:
    """Train (or reuse) one seed and patch it: one row per direction × site × layer × role."""
    trained = train(None, task, task.train_config(seed=seed), folder, resume=True)
    held_out = task.splits["held_out"]
    rows = held_out.table.sample(n=min(n_prompts, len(held_out)), random_state=0).index
    pairs = replacement_pairs(held_out.select(rows.to_numpy().copy()))
    table = effects(by_role(trained.model, pairs), ["direction", "site", "layer", "role"])
    accuracy = trained.curves.groupby("split")["accuracy"].last()
    return table.assign(seed=seed, pairs=len(pairs), success=trained.success, held_out_accuracy=accuracy["held_out"])


def summarise(table: pd.DataFrame) -> pd.DataFrame:
    """Mean over seeds with a 95% t interval (unit: seed; prompts are averaged within it)."""
    groups = table.groupby(["direction", "site", "layer", "role"], sort=False)["effect"]
    summary = groups.agg(mean="mean", sd="std", seeds="size").reset_index()
    half = stats.t.ppf(0.975, summary["seeds"] - 1) * summary["sd"] / summary["seeds"] ** 0.5
    return summary.assign(low=summary["mean"] - half, high=summary["mean"] + half)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--subjects", type=int, default=512)
    parser.add_argument("--prompts", type=int, default=400)
    arguments = parser.parse_args()
    if arguments.seeds < 2:
        parser.error(f"--seeds {arguments.seeds}: an interval over seeds needs at least 2")
    started, task = time.time(), ToyFacts(arguments.subjects)
    seeds = range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    table = pd.concat([
        measure(task, seed, arguments.folder / "models" / f"seed_{seed}", arguments.prompts) for seed in tqdm(seeds, desc="seeds")
    ])  # fmt: skip
    summary = summarise(table)
    figures = {}
    for direction, rows in summary.groupby("direction", sort=False):
        ordered = rows.sort_values("role", key=lambda role: role.map(ROLES.index), kind="stable")
        figures[f"{direction}_by_role"] = effect_heatmaps(
            ordered, x="role", value="mean", title=f"{direction}, mean of {arguments.seeds} seeds"
        )
    settings = {**vars(arguments), "folder": str(arguments.folder), "seeds": list(seeds)}
    record.save(arguments.folder / "results", {"effects": table, "summary": summary}, figures,
                config=settings, seed=list(seeds), started=started)  # fmt: skip
    top = summary[(summary["direction"] == "denoising") & (summary["site"] != "resid_pre")].nlargest(6, "mean")
    print(top.to_string(index=False, float_format=lambda value: f"{value:.3f}"))
    print(f"unit: seed, n = {arguments.seeds}, 95% t interval, no correction: descriptive")


if __name__ == "__main__":
    main()
