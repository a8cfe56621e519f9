"""How many steps and how long each task takes until its goals are met, with the task's own model and training.

    python experiments/bench/tasks.py [--tasks facts induction ...] [--seeds 1] [--folder FOLDER]

One row per task and seed (1000 and up; 0-9 are kept for the registered claims): the first evaluation that meets every goal, or
none within the task's own number of steps. One thread. Rows that are there already are kept, so a long table can be made bit by
bit; `python experiments/readme.py` puts it into docs/training.md.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pandas as pd
import torch

from interp import record
from interp.tasks import TASKS, as_task
from interp.training import Trained, train
from interp.training.judge import goals_met

RESULTS = Path(__file__).parent / "results" / "tasks"
OTHERS = (
    "language",
    "language-large",
    "modular-addition-113",
)  # for a GPU: only when asked for


def first_met(run: Trained) -> tuple[int | None, float | None]:
    """The step and the seconds of the first evaluation that meets every goal."""
    for step, rows in run.curves.groupby("step"):
        if goals_met(run.task, rows.to_dict("records")):  # type: ignore[arg-type]
            return int(step), float(rows["seconds"].iloc[0])  # type: ignore[arg-type]
    return None, None


def measure(name: str, seed: int, device: str) -> pd.DataFrame:
    """One row: a training of the task's own, stopped when its goals are met."""
    task = as_task(name)
    config = dataclasses.replace(task.train_config(), seed=seed, stop="goals")  # type: ignore[arg-type]
    run = train(None, task, config, device=device)
    step, seconds = first_met(run)
    parameters = sum(p.numel() for p in run.model.parameters())
    last = {f"{goal.split} {goal.quantity}": float(run.last.loc[goal.split, goal.quantity]) for goal in task.goals}  # type: ignore[arg-type]
    model = f"{run.model.config.kind}, {run.model.config.n_layers} × {run.model.config.d_model}"
    reached = "; ".join(f"{key} {value:.4g}" for key, value in last.items())
    row = {"task": name, "seed": seed, "model": model, "parameters": parameters, "batch": config.batch_size,
           "steps_allowed": config.steps, "steps": step, "seconds": seconds, "goals": "; ".join(map(str, task.goals)),
           "reached": reached, "device": device}  # fmt: skip
    return pd.DataFrame([row])


def main(words: list[str] | None = None) -> None:
    """Measure what is missing, row by row."""
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--tasks", nargs="+", default=[name for name in TASKS if name not in OTHERS], choices=list(TASKS)
    )
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, default=RESULTS)
    options = parser.parse_args(words)
    torch.set_num_threads(1)
    path = options.folder / "tasks.csv"
    table = pd.read_csv(path) if path.exists() else pd.DataFrame({"task": [], "seed": []})
    for name in options.tasks:
        for seed in range(1000, 1000 + options.seeds):
            if not ((table["task"] == name) & (table["seed"] == seed)).any():
                new = measure(name, seed, options.device)
                table = new if table.empty else pd.concat([table, new], ignore_index=True)
                record.write_atomic(
                    path, lambda temporary, t=table: t.to_csv(temporary, index=False, float_format="%.4g")
                )
    print(table.to_string(index=False))


if __name__ == "__main__":
    main()
