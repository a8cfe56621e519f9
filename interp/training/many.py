"""Many runs of one model config, as fast as the machine allows: stacked into one batched model, one after the other, in
processes of their own, or on a cluster."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from tqdm.auto import tqdm

from interp import record
from interp.engines import run_units
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer
from interp.tasks import as_task, restore
from interp.tasks.task import Task, TaskError
from interp.tasks.train_config import TrainConfig
from interp.training.ensemble import EnsembleError, check_configs
from interp.training.folder import RunFolder, Trained, TrainingFolderError, held
from interp.training.stack import Stack
from interp.training.train import DivergedError, check_fit, train_into

How = Literal["auto", "stacked", "sequence", "local", "ray"]
HOWS = ("auto", "stacked", "sequence", "local", "ray")
STATE = "ensemble.safetensors"
FEW_NUMBERS = 1 << 17  # numbers of the stream per step and member, up to which a processor waits for instructions


def train_many(
    model: ModelConfig | Transformer | Mapping[str, Transformer] | None,
    task: Task | str,
    configs: Sequence[TrainConfig] | Mapping[str, TrainConfig],
    folder: str | Path | None = None,
    how: How = "auto",
    resume: bool = False,
    progress: bool = True,
    device: torch.device | str = "cpu",
    **engine: Any,
) -> dict[str, Trained]:
    """One run per training config, name -> result; each leaves a folder of its own in `folder`, as `train` does.

    model: every run's (None: the task's default), or the weights that all start from, or each of them by name ("stacked" and
    "sequence" only); given models stay as they are. configs: by name, or a list, whose names are seed_0000 … where seeds
    differ, else run_000 …. how: "stacked" (one batched model, `Ensemble`), "sequence" (one after the other), "local" (processes
    with one thread each), "ray" (a cluster); "auto" chooses by size (`chosen`). engine: further arguments of `run_units` for the
    last two (workers, address, resources …). A run that diverges ends alone: its result has `.note` and no success.
    Raises EnsembleError, TrainingFolderError, EngineError.
    """
    task, named = as_task(task), names_of(configs)
    if how not in HOWS:
        raise EnsembleError(f"how={how!r} is not allowed; allowed: {', '.join(map(repr, HOWS))}")
    starts = _starts(model or task.model_config(), named, how)
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise EnsembleError(
            "many runs under torchrun are not allowed; allowed: one run under torchrun, or many without it"
        )
    device, first = torch.device(device), next(iter(starts.values()))
    given, config = isinstance(first, Transformer), first.config if isinstance(first, Transformer) else first
    if how == "auto":
        how = chosen(config, task, list(named.values()), device)
        how = "sequence" if how == "local" and given else how
    if engine and how not in ("local", "ray"):
        raise EnsembleError(f"{', '.join(engine)} are not allowed with how={how!r}; allowed: with 'local' and 'ray'")
    check_fit(Transformer(config).to(device), task)
    with tempfile.TemporaryDirectory() if folder is None else nullcontext(folder) as place:
        homes = {name: RunFolder(Path(place) / name, starts[name], task, config) for name, config in named.items()}
        ways = {"stacked": _stacked, "sequence": _sequence, "local": _units, "ray": _units}
        with held(Path(place)):
            found = ways[how](homes, Path(place), resume or folder is None, progress, device, engine, how)
    nowhere = {"folder": None} if folder is None else {}
    return {name: dataclasses.replace(found[name], **nowhere) for name in named}


def _starts(model: Any, named: Mapping[str, TrainConfig], how: str) -> dict[str, ModelConfig | Transformer]:
    """Per run a config or the weights to start from. Raises EnsembleError."""
    starts: dict[str, Any] = dict(model) if isinstance(model, Mapping) else dict.fromkeys(named, model)
    wrong = [type(one).__name__ for one in starts.values() if not isinstance(one, ModelConfig | Transformer)]
    if wrong or starts.keys() != named.keys():
        what = f"model={wrong[0]} is" if wrong else f"models named {sorted(starts)} are"
        raise EnsembleError(
            f"{what} not allowed; allowed: a ModelConfig, a Transformer, or name -> Transformer for {list(named)}"
        )
    if how in ("local", "ray") and any(isinstance(one, Transformer) for one in starts.values()):
        raise EnsembleError(f"given weights are not allowed with how={how!r}, whose processes draw their own; allowed: "
                            "'stacked', 'sequence', 'auto'")  # fmt: skip
    return starts


def chosen(model: ModelConfig, task: Task, configs: Sequence[TrainConfig], device: torch.device) -> How:
    """The way that is fastest, by sizes, device and threads alone, so that the same call there gives the same numbers.

    A GPU and small steps: stacked. Large steps fill a CPU's cores with one model: processes of one thread each waste the least.
    """
    try:
        check_configs(configs)
    except EnsembleError:
        return "sequence" if device.type == "cuda" or len(configs) == 1 or not _is_ours(task) else "local"
    if len(configs) == 1:
        return "sequence"
    inputs = task.batch(0, configs[0].batch_size, configs[0].seed).inputs
    tokens = inputs.tokens.numel() + (0 if inputs.source is None else inputs.source.numel())
    if device.type == "cuda" or tokens * model.d_model <= FEW_NUMBERS:
        return "stacked"
    return "local" if torch.get_num_threads() > 1 and _is_ours(task) else "sequence"


def _is_ours(task: Task) -> bool:
    """Whether another process can make the same task from its name and options."""
    try:
        return dataclasses.is_dataclass(task) and type(restore(dataclasses.asdict(task))) is type(task)  # type: ignore[arg-type]
    except TaskError:
        return False


def names_of(configs: Sequence[TrainConfig] | Mapping[str, TrainConfig]) -> dict[str, TrainConfig]:
    """Each run's name. EnsembleError without any."""
    if not configs:
        raise EnsembleError("no training configs; allowed: one or more")
    if isinstance(configs, Mapping):
        for name in configs:
            if not isinstance(name, str) or not re.fullmatch(r"[\w-][\w.-]*", name):
                raise EnsembleError(
                    f"run name {name!r} is not allowed; allowed: letters, digits, '_', '-' and '.', not first"
                )
        return dict(configs)
    if len({config.seed for config in configs}) == len(configs):
        return {f"seed_{config.seed:04d}": config for config in configs}
    return {f"run_{i:03d}": config for i, config in enumerate(configs)}


def _sequence(homes: dict[str, RunFolder], place: Path, resume, progress, device, engine, how) -> dict[str, Trained]:
    """One run after the other."""
    bar = tqdm(homes.items(), disable=not progress, desc="runs")
    return {name: _one(home, resume or not (place / name).exists(), device, how) for name, home in bar}


def _one(home: RunFolder, resume: bool, device: torch.device | str, how: str) -> Trained:
    """One run; of one that diverges, what it left."""
    try:
        return train_into(home, None, resume, False, device, how)
    except DivergedError:
        return home.ended()


def _units(homes: dict[str, RunFolder], place: Path, resume, progress, device, engine, how) -> dict[str, Trained]:
    """Each run in a process or on a machine of its own; what comes back is its folder's files."""
    task = next(iter(homes.values())).task
    if not _is_ours(task):
        raise EnsembleError(f"a {type(task).__name__} is not allowed with how={how!r}: another process knows tasks by name and "
                            "options; allowed: a task of interp.tasks, or how='stacked' or 'sequence'")  # fmt: skip
    todo = {name: {**home.document, "device": str(device), "how": how} for name, home in homes.items()
            if not ((place / name).exists() and home.claim(resume))}  # fmt: skip
    if todo:
        table = run_units(_unit, todo, place / ".units", engine=how, progress=progress, **engine)
        for name, files in table.groupby("unit"):
            _unpack(place / str(name), files)
        shutil.rmtree(place / ".units")
    for home in homes.values():
        home.claim(True)  # is it the same run?
    return {name: home.ended(device=device) for name, home in homes.items()}


def _unit(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """One run's folder as a table: path, content."""
    folder, model = Path(scratch) / "run", ModelConfig.from_dict(config["model"])
    home = RunFolder(folder, model, restore(config["task"]), TrainConfig(**config["train"]))
    _one(home, True, config["device"], config["how"])
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return pd.DataFrame(
        {"path": [str(path.relative_to(folder)) for path in files], "content": [path.read_bytes() for path in files]}
    )


def _unpack(folder: Path, files: pd.DataFrame) -> None:
    """The folder that these files make, whole or not at all."""

    def fill(new: Path) -> None:
        for path, content in zip(files["path"], files["content"], strict=True):
            (new / path).parent.mkdir(parents=True, exist_ok=True)
            (new / path).write_bytes(content)
        if folder.exists():  # an unfinished run of ours, which this one has overtaken
            shutil.rmtree(folder)

    record.new_folder(folder, fill)


def _stacked(homes: dict[str, RunFolder], place: Path, resume, progress, device, engine, how) -> dict[str, Trained]:
    """All runs in one batched model."""
    ended = {name for name, home in homes.items() if home.claim(resume)}
    found = {name: homes[name].ended(device=device) for name in ended}
    if (place / STATE).exists() and not resume:
        raise TrainingFolderError(f"{place} holds an unfinished stack of runs; resume it (resume=True, --resume) or choose a new "
                                  "folder")  # fmt: skip
    if len(found) < len(homes):
        Stack(homes, place / STATE, progress, device, ended).run(found)
        (place / STATE).unlink(missing_ok=True)
    return found
