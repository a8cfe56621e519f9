"""Many runs of one model config, as fast as the machine allows: stacked into one batched model, one after the other, in
processes of their own, or on a cluster."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from tqdm.auto import tqdm

from interp import record
from interp.engines import run_units
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer
from interp.tasks import as_task, restore
from interp.tasks.task import Task, TaskError, drawn_on
from interp.tasks.train_config import TrainConfig
from interp.training.ensemble import Ensemble, EnsembleError, check_configs
from interp.training.folder import FAILED, RunFolder, Trained, TrainingFolderError, result_of
from interp.training.judge import goals_met
from interp.training.train import DivergedError, Watch, evaluate, train

How = Literal["auto", "stacked", "sequence", "local", "ray"]
HOWS = ("auto", "stacked", "sequence", "local", "ray")
STATE = "ensemble.safetensors"
FEW_NUMBERS = 1 << 17  # numbers of the stream per step and member, up to which a processor waits for instructions


def train_many(
    model: ModelConfig | None,
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

    model: every run's (None: the task's default). configs: by name, or a list, whose names are seed_0000 … where seeds
    differ, else run_000 …. how: "stacked" (one batched model, `Ensemble`), "sequence" (one after the other), "local" (processes
    with one thread each), "ray" (a cluster); "auto" chooses by size (`chosen`). engine: further arguments of `run_units` for the
    last two (workers, address, resources …). A run that diverges ends alone: its result has `.note` and no success.
    Raises EnsembleError, TrainingFolderError, EngineError.
    """
    task, named = as_task(task), names_of(configs)
    if how not in HOWS:
        raise EnsembleError(f"how={how!r} is not allowed; allowed: {', '.join(map(repr, HOWS))}")
    if model is not None and not isinstance(model, ModelConfig):
        raise EnsembleError(f"model={type(model).__name__} is not allowed; allowed: a ModelConfig, from which each run draws "
                            "its own weights, or None")  # fmt: skip
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise EnsembleError(
            "many runs under torchrun are not allowed; allowed: one run under torchrun, or many without it"
        )
    model = model or task.model_config()
    device = torch.device(device)
    if how == "auto":
        how = chosen(model, task, list(named.values()), device)
    if engine and how not in ("local", "ray"):
        raise EnsembleError(f"{', '.join(engine)} are not allowed with how={how!r}; allowed: with 'local' and 'ray'")
    with tempfile.TemporaryDirectory() if folder is None else _Kept(folder) as home:
        run = {"stacked": _stacked, "sequence": _sequence}.get(how, _units)
        found = run(model, task, named, Path(home), resume or folder is None, progress, device, how, engine)
    nowhere = {"folder": None} if folder is None else {}
    return {name: dataclasses.replace(found[name], how=how, **nowhere) for name in named}


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


class _Kept:
    """A folder that stays."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    def __enter__(self) -> Path:
        self.path.mkdir(parents=True, exist_ok=True)
        return self.path

    def __exit__(self, *error: object) -> None:
        pass


def _sequence(model, task, named, home: Path, resume, progress, device, how, engine) -> dict[str, Trained]:
    """One run after the other."""
    found = {}
    for name, config in tqdm(named.items(), disable=not progress, desc="runs"):
        failed = _failed(home / name, model, task, config)
        try:
            found[name] = failed or train(
                model, task, config, home / name, resume or not (home / name).exists(), False, device
            )
        except DivergedError as error:
            found[name] = _fail(home / name, model, task, config, str(error))
    return found


def _units(model, task, named, home: Path, resume, progress, device, how, engine) -> dict[str, Trained]:
    """Each run in a process or on a machine of its own; what comes back is its folder's files."""
    if not _is_ours(task):
        raise EnsembleError(f"a {type(task).__name__} is not allowed with how={how!r}: another process knows tasks by name and "
                            "options; allowed: a task of interp.tasks, or how='stacked' or 'sequence'")  # fmt: skip
    todo = {}
    for name, config in named.items():
        run = RunFolder(home / name, Transformer(model, seed=config.seed), task, config)
        if (home / name).exists() and (run.claim(resume) or (home / name / FAILED).exists()):
            continue
        todo[name] = {**run.document, "device": str(device)}
    if todo:
        table = run_units(_unit, todo, home / ".units", engine=how, progress=progress, **engine)
        for name, files in table.groupby("unit"):
            _unpack(home / str(name), files)
        shutil.rmtree(home / ".units")
    return {name: _failed(home / name, model, task, config) or train(model, task, config, home / name, True, False, device)
            for name, config in named.items()}  # fmt: skip


def _unit(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """One run's folder as a table: path, content."""
    task, model = restore(config["task"]), ModelConfig.from_dict(config["model"])
    training = TrainConfig(**config["train"])
    folder = Path(scratch) / "run"
    try:
        train(model, task, training, folder, resume=True, progress=False, device=config["device"])
    except DivergedError as error:
        _fail(folder, model, task, training, str(error))
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return pd.DataFrame(
        {"path": [str(path.relative_to(folder)) for path in files], "content": [path.read_bytes() for path in files]}
    )


def _unpack(folder: Path, files: pd.DataFrame) -> None:
    """The folder that these files make, whole or not at all."""
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    for path, content in zip(files["path"], files["content"], strict=True):
        (temporary / path).parent.mkdir(parents=True, exist_ok=True)
        (temporary / path).write_bytes(content)
    temporary.chmod(0o755)
    if folder.exists():  # an unfinished run of ours, which this one has overtaken
        shutil.rmtree(folder)
    temporary.rename(folder)


def _fail(folder: Path, model: ModelConfig, task: Task, config: TrainConfig, message: str) -> Trained:
    """A run that diverged says so in its folder."""
    record.write_json(folder / FAILED, {"message": message})
    failed = _failed(folder, model, task, config)
    assert failed is not None
    return failed


def _failed(folder: Path, model: ModelConfig, task: Task, config: TrainConfig) -> Trained | None:
    """The result of a run that diverged before."""
    if not (folder / FAILED).exists():
        return None
    RunFolder(folder, Transformer(model, seed=config.seed), task, config).claim(True)  # the same run?
    note = json.loads((folder / FAILED).read_text())["message"]
    return Trained(Transformer(model, seed=config.seed), pd.DataFrame(), False, 0.0, task, config, folder, note)


def _stacked(model, task, named, home: Path, resume, progress, device, how, engine) -> dict[str, Trained]:
    """All runs in one batched model."""
    homes = {
        name: RunFolder(home / name, Transformer(model, seed=config.seed), task, config)
        for name, config in named.items()
    }
    found: dict[str, Trained] = {}
    for name, run in homes.items():
        failed = _failed(home / name, model, task, named[name])
        done = run.claim(resume or failed is not None)
        if failed or done:
            found[name] = failed or run.finished(Transformer(model, seed=None).to(device))
    if (home / STATE).exists() and not resume:
        raise TrainingFolderError(f"{home} holds an unfinished stack of runs; resume it (resume=True, --resume) or choose a new "
                                  "folder")  # fmt: skip
    if len(found) < len(named):
        _Stack(model, task, named, homes, home / STATE, progress, device, found).run(found)
        (home / STATE).unlink(missing_ok=True)
    return found


class _Stack:
    """The runs that go on together: names, their ensemble, their curves."""

    def __init__(
        self, model, task, named, homes, state: Path, progress: bool, device: torch.device, finished: Collection[str]
    ) -> None:
        self.task, self.homes, self.named, self.state, self.progress = task, homes, named, state, progress
        self.names, self.start, self.seconds = list(named), 0, 0.0
        self.rows: dict[str, list[dict]] = {name: [] for name in named}
        members = [Transformer(model, seed=config.seed).to(device) for config in named.values()]
        self.ensemble = Ensemble(members, list(named.values()))
        if state.exists():
            self._read()
            lacking = [name for name in named if name not in self.names and name not in finished]
            if lacking:
                raise TrainingFolderError(f"{state} holds {', '.join(self.names)} on their way, without {', '.join(lacking)}; "
                                          "allowed: the same runs, or a new folder")  # fmt: skip
        self.config = next(iter(named.values()))

    def run(self, found: dict[str, Trained]) -> None:
        """Until every run has met its end; `found` gets those that it lacks."""
        began, config = time.perf_counter() - self.seconds, self.config
        watches = {name: self._watch(name, k) for k, name in enumerate(self.names)}
        keep, device = set(config.kept), self.ensemble.device
        if self.start == 0 and 0 in keep:
            self._keep(0, found)
        bar = tqdm(range(self.start, config.steps), initial=self.start, total=config.steps, disable=not self.progress,
                   desc=f"{len(self.names)} × {self.task.name}")  # fmt: skip
        for step in bar:
            configs = self.ensemble.configs
            drawn = [drawn_on(device, self.task, step, one.batch_size, one.data) for one in configs]
            losses, norms = self.ensemble.step(drawn, step)
            done, ends = step + 1, {}
            settle = done % config.evaluate_every == 0 or done % config.checkpoint_every == 0 or done == config.steps
            if settle or device.type == "cpu":
                losses, norms = losses.cpu(), norms.cpu()
            for name, loss, norm in zip(self.names, losses, norms, strict=True):
                try:
                    watches[name](step, loss, norm)
                    if settle:
                        watches[name].settle()
                except DivergedError as error:
                    ends[name] = str(error)
            if done % config.evaluate_every == 0 or done == config.steps:
                self._evaluate(done, watches, time.perf_counter() - began, ends)
            if done in keep:
                self._keep(done, found)
            if ends or done == config.steps:
                self._leave(ends, done == config.steps, found)
                if not self.names:
                    break
            if done % config.checkpoint_every == 0 and done < config.steps:
                self._write(done, time.perf_counter() - began)
            if settle:
                bar.set_postfix({"runs": len(self.names), "loss": f"{float(losses.mean()):.3f}"})

    def _watch(self, name: str, k: int) -> Watch:
        return Watch(self.ensemble.member(k), self.ensemble.configs[k])

    def _evaluate(self, done: int, watches: dict[str, Watch], seconds: float, ends: dict[str, str]) -> None:
        """One row per run and split; runs that may stop at their goals and meet them end."""
        for k, name in enumerate(self.names):
            if name in ends:
                continue
            config = self.ensemble.configs[k]
            new = evaluate(self.ensemble.member(k), self.task, done, watches[name].loss, config.rate(done - 1), seconds)
            self.rows[name] += new
            if config.stop == "goals" and goals_met(self.task, new):
                ends[name] = ""

    def _keep(self, done: int, found: dict[str, Trained]) -> None:
        for k, name in enumerate(self.names):
            if name not in found:
                self.homes[name].keep(self.ensemble.member(k), done)

    def _leave(self, ends: dict[str, str], everyone: bool, found: dict[str, Trained]) -> None:
        """Close the folders of runs that have ended and go on with the others."""
        for k, name in enumerate(self.names):
            if not (everyone or name in ends) or name in found:
                continue
            run, config = self.homes[name], self.named[name]
            if ends.get(name):
                found[name] = _fail(run.path, self.ensemble.loss.model.config, self.task, config, ends[name])
                continue
            alone = self.ensemble.alone(k)
            found[name] = result_of(alone, self.task, config, self.rows[name], run.path)
            run.close(found[name], "stacked")
        stay = [] if everyone else [k for k, name in enumerate(self.names) if name not in ends]
        self.names = [self.names[k] for k in stay]
        if stay and ends:
            self.ensemble = self.ensemble.pick(stay)

    def _write(self, done: int, seconds: float) -> None:
        """The state that a killed training goes on from, runs that have ended since included."""
        about = {
            "step": done,
            "seconds": seconds,
            "runs": {name: self.homes[name].identity for name in self.names},
            "rows": {name: self.rows[name] for name in self.names},
        }
        tensors = {name: value.cpu().contiguous() for name, value in self.ensemble.state().items()}
        record.write_atomic(self.state, lambda path: save_file(tensors, path, metadata={"about": json.dumps(about)}))

    def _read(self) -> None:
        try:
            with safe_open(self.state, framework="pt") as file:
                about = json.loads(file.metadata()["about"])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            names = list(about["runs"])
            if any(name not in self.homes or self.homes[name].identity != run for name, run in about["runs"].items()):
                raise ValueError(f"it is the state of {', '.join(names)} with their settings")
            self.ensemble = self.ensemble.pick([self.names.index(name) for name in names])
            self.ensemble.load_state(tensors)
        except (SafetensorError, KeyError, TypeError, ValueError, RuntimeError) as error:
            raise TrainingFolderError(
                f"{self.state} is truncated or belongs to other runs: {error}; train into a new folder"
            ) from error
        self.start, self.seconds, self.names = about["step"], about["seconds"], names
        self.rows |= about["rows"]
