"""Does cross-attention align target with source (A3)? Its mass on the true source position, after copy, reverse and sort.

    python experiments/e02_does_cross_attention_align/run.py --folder runs/e02 [--seeds 3]

Leaves models/<task>_<seed>/ (resumable training), heads.parquet (one row per task × seed × layer × head, with the null:
the same keys in another order), layers.parquet (mean over heads; the best layer is chosen on one half of the examples and
read on the other), a figure and provenance. Interrupt it and start it again: finished models are kept.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pandas as pd
from tqdm.auto import tqdm

from interp import record
from interp.claims.registry.alignment import TASKS, by_layer, masses
from interp.plots import head_heatmap
from interp.tasks import Rewriting
from interp.training import train

FIRST_SEED = 1000  # seeds 0-9 are kept for the registered claims


def measure(name: str, seed: int, folder: Path, steps: int = 0) -> pd.DataFrame:
    """Train (or reuse) one model: one row per half of the examples × layer × head. steps: 0 = the task's own."""
    task = Rewriting(name)  # type: ignore[arg-type]
    config = task.train_config(seed=seed, **({"steps": steps} if steps else {}))
    trained = train(None, task, config, folder, resume=True)
    exact = trained.curves.groupby("split")["exact"].last()["held_out"]
    about = {"task": name, "seed": seed, "exact": exact, "steps": config.steps, "seconds": trained.seconds}
    return masses(trained.model, task, seed).assign(**about)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0 = the task's own")
    arguments = parser.parse_args(words)
    started, seeds = time.time(), range(FIRST_SEED, FIRST_SEED + arguments.seeds)
    units = [(name, seed) for name in TASKS for seed in seeds]
    tables = []
    for name, seed in tqdm(units, desc="models"):
        tables.append(measure(name, seed, arguments.folder / "models" / f"{name}_{seed}", arguments.steps))
    heads = pd.concat(tables)
    layers = by_layer(heads)
    figures = {
        str(name): head_heatmap(
            rows[rows["half"] == "read"], "mass", "attention on the true source position", f"{name}, mean of seeds"
        )
        for name, rows in heads.groupby("task", sort=False)
    }
    record.save(arguments.folder / "results", {"heads": heads, "layers": layers}, figures,
                config={"seeds": list(seeds), "steps": arguments.steps}, seed=list(seeds), started=started)  # fmt: skip
    print(layers.to_string(index=False, float_format=lambda value: f"{value:.3f}"))
    print(f"unit: seed, n = {arguments.seeds} per task; descriptive, no test")


if __name__ == "__main__":
    main()
