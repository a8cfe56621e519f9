"""`interp train TASK`: every option of the task, of its model and of its training, from the dataclasses themselves."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import tyro


@dataclass(frozen=True)
class Train:
    """Train a toy model on a task and leave checkpoint, curves, samples and provenance in a folder."""

    folder: Path
    """Where to; must be new unless --resume. With --seeds, each run's folder is in it."""
    resume: bool = False
    """Go on from the folder's last state (bit for bit as if never stopped, at the same thread count)."""
    seeds: int = 1
    """How many runs, with seeds --seed, --seed + 1 …."""
    engine: Literal["auto", "stacked", "sequence", "local", "ray"] = "auto"
    """How several runs are made: stacked in one batched model, one after the other, in local processes, on a Ray cluster."""
    workers: int = 0
    """Processes of --engine local; 0 = one per core."""
    address: str = ""
    """Of the Ray cluster, as ray.init takes it ("auto", "ray://host:10001"); empty = one on this machine."""
    gpus: float = 0.0
    """Share of a GPU that each run takes on a Ray cluster."""
    device: str = "cpu"
    """Where to train: auto, cpu, cuda, mps."""
    threads: int = 0
    """CPU threads; 0 = PyTorch's choice."""


def main(arguments: list[str]) -> None:
    """`interp train` with the words after it. Raises ValueError for an unknown task."""
    from interp.tasks import TASKS, as_task

    if not arguments or arguments[0].startswith("-"):
        names = "\n".join(f"  {name:22} {_about(as_task(name))}" for name in TASKS)
        print(
            f"usage: interp train TASK --folder FOLDER [options]; interp train TASK --help lists them\n\ntasks:\n{names}"
        )
        sys.exit(0 if arguments in ([], ["-h"], ["--help"]) else 2)
    task = as_task(arguments[0])
    command = tyro.cli(_command(task), args=arguments[1:], prog=f"interp train {arguments[0]}")
    _run(task, command)


def _about(task: Any) -> str:
    """What a task is, from the head of its file, and the options that make it this one."""
    sentence = " ".join((sys.modules[type(task).__module__].__doc__ or "").split("\n\n")[0].split())
    plain = type(task)() if dataclasses.is_dataclass(task) else task
    changed = [
        f"{name}={value!r}"
        for name, value in vars(task).items()
        if getattr(plain, name, value) != value and name != "name"
    ]
    return sentence.partition(": ")[2].rstrip(".") + (f" ({', '.join(changed)})" if changed else "")


def _command(task: Any) -> Any:
    """The command line of one task: `Train`, then --task.…, --model.… and the training's own options."""
    from interp.model.config import ModelConfig

    model, training = task.model_config(), task.train_config()
    groups = [
        ("task", _changes(type(task), task, "Task")),
        ("model", _changes(ModelConfig, model, "Model")),
        ("train", tyro.conf.OmitArgPrefixes[_changes(type(training), training, "Training")]),
    ]
    made = [(name, kind, field(default_factory=_plain(kind))) for name, kind in groups]
    made_class = dataclasses.make_dataclass("Command", made, bases=(Train,), frozen=True)
    made_class.__doc__ = Train.__doc__
    return made_class


def _plain(kind: Any) -> Any:
    return typing.get_args(kind)[0] if typing.get_origin(kind) is typing.Annotated else kind


def _changes(kind: type, default: Any, name: str) -> Any:
    """A dataclass with the fields of `kind`, each None unless it is given; help says what the default is."""
    hints = typing.get_type_hints(kind)
    made = []
    for one in dataclasses.fields(kind):
        if not one.init or one.name == "name":
            continue
        value = getattr(default, one.name)
        hint = (
            str
            if typing.get_origin(typing.get_args(hints[one.name])[:1] and typing.get_args(hints[one.name])[0]) is dict
            else hints[one.name]
        )
        said = "JSON; " if hint is str and hints[one.name] is not str else ""
        shown = sorted(value) if isinstance(value, frozenset) else value
        about = tyro.conf.arg(help=f"{said}unless given: {shown}", help_behavior_hint="")
        made.append((one.name, typing.Annotated[hint | None, about], field(default=None)))
    return dataclasses.make_dataclass(name, made, frozen=True)


def _given(changes: Any, kind: type) -> dict[str, Any]:
    """The options that were given."""
    given = {name: value for name, value in vars(changes).items() if value is not None}
    hints = typing.get_type_hints(kind)
    return {name: json.loads(value) if isinstance(value, str) and "dict" in str(hints[name]) else value
            for name, value in given.items()}  # fmt: skip


def _run(task: Any, command: Any) -> None:
    import torch

    from interp.device import device_named
    from interp.model.config import ModelConfig
    from interp.report import runs
    from interp.tasks.train_config import TrainConfig
    from interp.training import train
    from interp.training.many import train_many

    if command.seeds < 1:
        raise ValueError(f"seeds={command.seeds} is not allowed; allowed: 1 or more")
    if command.threads:
        torch.set_num_threads(command.threads)
    device = device_named(command.device)
    task = dataclasses.replace(task, **_given(command.task, type(task)))
    model = task.model_config(**_given(command.model, ModelConfig))
    config = task.train_config(**_given(command.train, TrainConfig))
    if command.seeds == 1:
        found = {"run": train(model, task, config, command.folder, command.resume, device=device)}
    else:
        configs = [dataclasses.replace(config, seed=config.seed + i) for i in range(command.seeds)]
        more: dict[str, Any] = {}
        if command.engine in ("local", "ray") or command.workers:
            more["workers"] = command.workers or None
        if command.engine == "ray":
            more |= {"address": command.address or None, "resources": {"num_cpus": 1, "num_gpus": command.gpus}}
        found = train_many(model, task, configs, command.folder, command.engine, command.resume, device=device, **more)
    if os.environ.get("RANK", "0") != "0":
        return  # under torchrun the first process speaks for all
    print("\n".join(runs.words(found)))
    page = runs.build(command.folder, found)
    print(f"wrote {page}" + (f"; the model is in {command.folder}/model" if command.seeds == 1 else ""))
