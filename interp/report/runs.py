"""The page of some training runs: settings, curves, last scores, what the models say."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from interp import record
from interp.plots import run_curves
from interp.report.build import made_section
from interp.report.page import Section, render
from interp.training import Trained, TrainingFolderError, open_run, samples
from interp.training.folder import FAILED, described

ORDINARY = ("accuracy", "exact", "nats")


def opened(folders: Sequence[Path]) -> dict[str, Trained]:
    """The runs in some folders, or in the folders inside them. Raises TrainingFolderError when there are none."""
    found = {}
    for folder in folders:
        own = (
            [folder]
            if (folder / "config.json").is_file()
            else sorted(path.parent for path in folder.glob("*/config.json"))
        )
        many = len(folders) > 1 and own != [folder]
        for path in own:
            if (path / "model").is_dir() or (path / FAILED).is_file():
                name = f"{folder.name}/{path.name}" if many else path.name
                found[str(path) if name in found else name] = open_run(path)
    if not found:
        raise TrainingFolderError(f"no finished training run in {', '.join(map(str, folders)) or 'no folder'}; allowed: "
                                  "folders that interp train wrote, or folders of them")  # fmt: skip
    return found


def settings(found: Mapping[str, Trained]) -> tuple[dict[str, Any], pd.DataFrame]:
    """The settings that all runs share, and a table of those in which they differ, one row per run."""
    flat = {}
    for name, run in found.items():
        assert run.config is not None
        parts = described(run.model.config, run.task, run.config)
        flat[name] = {f"{part}.{field}": value for part, fields in parts.items() for field, value in fields.items()}
    every = list(dict.fromkeys(field for one in flat.values() for field in one))
    same = [field for field in every if len({repr(one.get(field)) for one in flat.values()}) == 1]
    first = next(iter(flat.values()))
    differing = [field for field in every if field not in same]
    table = pd.DataFrame(
        [{"run": name, **{field: one.get(field) for field in differing}} for name, one in flat.items()]
    )
    return {field: first[field] for field in same}, table


def scores(found: Mapping[str, Trained]) -> pd.DataFrame:
    """One row per run and split: run, how, learned, steps, seconds, split, accuracy, exact, nats, n, note."""
    rows = []
    for name, run in found.items():
        about = {"run": name, "how": run.how, "learned": run.success}
        if run.note:
            rows.append({**about, "note": run.note})
            continue
        for split, last in run.last.iterrows():
            rows.append({**about, "steps": int(last["step"]), "seconds": run.seconds, "split": split,
                         **{column: last[column] for column in ORDINARY}, "n": int(last["n"]), "note": ""})  # fmt: skip
    return pd.DataFrame(rows)


def curves(found: Mapping[str, Trained]) -> pd.DataFrame:
    """The curves of all runs, with a first column `run`."""
    return pd.concat([run.curves.assign(run=name) for name, run in found.items() if not run.note], ignore_index=True)


def words(found: Mapping[str, Trained]) -> list[str]:
    """What happened, for the terminal."""
    said, some = [], next(iter(found.values()))
    for name, run in found.items():
        prefix = "" if len(found) == 1 else f"{name}: "
        if run.note:
            said.append(f"{prefix}DIVERGED: {run.note}")
            continue
        for split, row in run.last.iterrows():
            said.append(f"{prefix}{split}: {100 * row['accuracy']:.2f}% of asked tokens, {100 * row['exact']:.2f}% of "
                        f"{int(row['n'])} examples, {row['nats']:.4f} nats")  # fmt: skip
    goals = {"; ".join(map(str, run.task.goals)) for run in found.values()}
    wanted = goals.pop() if len(goals) == 1 else "each by its own task's goals"
    learned = sum(run.success for run in found.values())
    if len(found) == 1:
        return [*said, f"{'learned' if some.success else 'NOT learned'} ({wanted}) in {some.seconds:.0f} s"]
    ways = ", ".join(sorted({run.how for run in found.values()}))
    return [*said, f"{learned} of {len(found)} runs learned ({wanted}); {ways}"]


LEAD = "Every number is in the files beside this page."


def build(folder: Path, found: Mapping[str, Trained]) -> Path:
    """Write index.html, curves.png and the tables runs.csv and all_curves.parquet into `folder`; returns the page."""
    same, differing = settings(found)
    table = scores(found)
    first = next(iter(found.values()))
    names = sorted({str(run.task.name) for run in found.values()})
    page = Section("How it went")
    page.finding(words(found)[-1])
    if any(not run.note for run in found.values()):
        lines = curves(found)
        record.write_table(folder / "all_curves.parquet", lines)
        caption = "Loss of the training batch and accuracy on each split" + (
            "; a line per run, bold: the median over runs." if len(found) > 1 else "."
        )
        page.figure(run_curves(lines), folder / "curves.png", caption)
    record.write_atomic(folder / "runs.csv", lambda path: table.to_csv(path, index=False))
    page.table(table.drop(columns=[name for name in ("note",) if not table[name].any()]), "The last evaluation of each run. One "
               "run is one trained seed, the unit of every statement about training.")  # fmt: skip
    setting = Section("Settings")
    if len(differing.columns) > 1 and len(found) > 1:
        setting.table(differing, "Where the runs differ.")
    setting.table(
        pd.DataFrame({"setting": list(same), "value": [str(value) for value in same.values()]}), "What they share."
    )
    said = Section("What the model says")
    if not first.note:
        caption = f"First examples of each split, run {next(iter(found))}; probability of the wanted tokens together."
        said.table(samples(first.model, first.task, 4), caption, tokens=("prompt", "wanted", "said"))
    title = f"Training on {', '.join(names)}"
    if len(found) > 1 or not (folder / "provenance.json").exists():  # a run's own folder has its own
        seeds = [run.config.seed for run in found.values() if run.config is not None]
        record.write_json(folder / "provenance.json", record.provenance(config=same, seed=seeds))
    about = made_section("Where this comes from", json.loads((folder / "provenance.json").read_text()))
    lead = f"{len(found)} run{'s' if len(found) > 1 else ''}. {LEAD}"
    return render(folder / "index.html", title, lead, [page, setting, said, about])
