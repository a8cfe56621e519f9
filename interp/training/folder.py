"""A training run's folder: claimed once, never mixed with another run, opened again by `open_run`.

config.json      task, model and training config, written first
state.safetensors  what an unfinished run goes on from
steps/000128/    models kept along the way (`keep`)
model/, curves.parquet, samples.csv, provenance.json    when it has finished
"""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from interp import record
from interp.model.checkpoint import CheckpointError, load, save
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer
from interp.tasks import restore
from interp.tasks.task import Task, TaskError
from interp.tasks.train_config import TrainConfig
from interp.training.judge import goals_met, samples

STATE, MODEL, CURVES, STEPS, FAILED = "state.safetensors", "model", "curves.parquet", "steps", "failed.json"
FROM_THE_SEED = "from the seed"


class TrainingFolderError(RuntimeError):
    """A folder that holds another run, one that has not been asked to resume, or one that cannot be read or written."""


@dataclass(frozen=True)
class Trained:
    """A model, its curves (one row per evaluation and split) and whether every goal was met at the last one.

    curves: step, split, loss (the training batch's, nats), learning_rate, seconds, accuracy (share of asked tokens right),
    exact (share of examples with all of them right), nats (mean cross-entropy per asked token), n (examples). note: why a run
    among many ended early. how: the way it was trained (`train_many`).
    """

    model: Transformer
    curves: pd.DataFrame
    success: bool
    seconds: float
    task: Any = None
    config: TrainConfig | None = None
    folder: Path | None = None
    note: str = ""
    how: str = "alone"

    def __repr__(self) -> str:
        if self.note:
            return f"Trained(diverged: {self.note})"
        return f"Trained({'learned' if self.success else 'not learned'} in {self.seconds:.0f} s; {len(self.curves)} curve rows)"

    @property
    def last(self) -> pd.DataFrame:
        """The last evaluation's rows, by split."""
        if self.note:
            return self.curves
        return self.curves[self.curves["step"] == self.curves["step"].max()].set_index("split")

    @property
    def kept(self) -> tuple[int, ...]:
        """The steps at which a model was kept, in order; 0 is before training."""
        if self.folder is None or not (self.folder / STEPS).is_dir():
            return ()
        return tuple(sorted(int(path.name) for path in (self.folder / STEPS).iterdir() if path.name.isdecimal()))

    def at(self, step: int) -> Transformer:
        """The model after `step` steps. TrainingFolderError for a step that was not kept."""
        if step not in self.kept:
            raise TrainingFolderError(f"step {step!r} was not kept; allowed: {', '.join(map(str, self.kept)) or 'none'} "
                                      "(TrainConfig(keep=n) keeps n of them)")  # fmt: skip
        assert self.folder is not None
        return load(self.folder / STEPS / f"{step:06d}")


def result_of(
    model: Transformer, task: Task, config: TrainConfig, rows: list[dict], folder: Path | None, how: str = "alone"
) -> Trained:
    """What a run gives, from its curve rows."""
    curves = pd.DataFrame(rows)
    last = [row for row in rows if row["step"] == rows[-1]["step"]]
    return Trained(model, curves, goals_met(task, last), float(rows[-1]["seconds"]), task, config, folder, how=how)


def described(model: ModelConfig, task: Task, config: TrainConfig) -> dict[str, dict[str, Any]]:
    """What a run is: its task, its model's config and its training config, field by field."""
    options = dataclasses.asdict(task) if dataclasses.is_dataclass(task) else {"name": task.name}  # type: ignore[arg-type]
    return {"task": options, "model": model.to_dict(), "train": dataclasses.asdict(config)}


class RunFolder:
    """The folder of one run with these settings; path=None: nothing is written."""

    def __init__(
        self, path: str | Path | None, model: ModelConfig | Transformer, task: Task, config: TrainConfig
    ) -> None:
        """model: a config, from which the seed draws the weights, or the weights to start from, whose `digest` is then a part of
        what the run is."""
        self.path = None if path is None else Path(path)
        self.start = model if isinstance(model, Transformer) else None
        self.model = model.config if isinstance(model, Transformer) else model
        self.task, self.config = task, config
        start = {"dtype": "torch.float32", "weights": FROM_THE_SEED}
        if self.start is not None and path is not None:
            start = {"dtype": str(self.start.dtype), "weights": digest(self.start)}
        document = {**described(self.model, task, config), "start": start}
        self.document: dict[str, Any] = json.loads(json.dumps(document))
        self.identity = hashlib.blake2b(json.dumps(self.document, sort_keys=True).encode(), digest_size=16).hexdigest()

    def first(self) -> Transformer:
        """A new model with the weights before training."""
        return Transformer(self.model, seed=self.config.seed) if self.start is None else copy.deepcopy(self.start)

    def held(self) -> AbstractContextManager[None]:
        """Keeps other programs out for the time of a training. Raises TrainingFolderError while another has it."""
        return nullcontext() if self.path is None else held(self.path)

    def claim(self, resume: bool) -> bool:
        """Whether the run has ended here. Raises TrainingFolderError for a folder that is not this run's."""
        if self.path is None:
            return False
        path = self.path / "config.json"
        if not path.exists():
            ours = not self.path.exists() or all(entry.name.startswith(".") for entry in self.path.iterdir())
            if not ours:  # a name with a dot is a write of ours that was killed
                raise TrainingFolderError(f"{self.path} is not empty and holds no run of ours; choose a new folder")
            record.write_json(path, {**self.document, "interp": version("interp")})
            return False
        if not resume:
            raise TrainingFolderError(
                f"{self.path} holds a run; resume it (resume=True, --resume) or choose a new folder"
            )
        self._compare(path, _read_document(path))
        return (self.path / MODEL).is_dir() or (self.path / FAILED).is_file()

    def _compare(self, path: Path, old: dict[str, Any]) -> None:
        """Raises TrainingFolderError naming what differs."""
        written = old.pop("interp", "an earlier version")
        old.setdefault("start", {})
        for part, fields in self.document.items():
            there = old.get(part, {})
            if part != "task" and there.keys() != fields.keys():
                unknown, lacking = sorted(there.keys() - fields.keys()), sorted(fields.keys() - there.keys())
                raise TrainingFolderError(f"{path} was written by interp {written}: its {part} config has unknown fields "
                                          f"{unknown} and lacks {lacking}; this is interp {version('interp')}; allowed: that "
                                          "version, or a new folder")  # fmt: skip
        differing = [f"{part}.{name}: {old[part].get(name)!r} there, {fields.get(name)!r} asked for"
                     for part, fields in self.document.items() for name in {**old[part], **fields}
                     if old[part].get(name) != fields.get(name)]  # fmt: skip
        if differing:
            raise TrainingFolderError(f"{self.path} holds another run: {'; '.join(differing)}")

    def ended(self, into: Transformer | None = None, device: torch.device | str = "cpu") -> Trained:
        """The result of a run that has ended here, well or not. into: a model that takes its weights."""
        assert self.path is not None
        path, diverged = self.path, (self.path / FAILED).is_file()
        try:
            curves = pd.read_parquet(path / CURVES)
            if diverged:
                note = str(json.loads((path / FAILED).read_text())["message"])
                return Trained(self.first().to(device), curves, False, 0.0, self.task, self.config, path, note)
            model = load(path / MODEL, device)
            how = json.loads((path / "provenance.json").read_text()).get("how", "alone")
            if model.config != self.model:
                raise ValueError("its model has another config than its config.json says")
            if into is not None:
                into.load_state_dict(model.state_dict())
        except (CheckpointError, RuntimeError, OSError, ValueError, TypeError, KeyError) as error:
            raise TrainingFolderError(f"{path} is damaged: {error}; train into a new folder") from error
        rows: Any = curves.to_dict("records")
        return result_of((into or model).eval(), self.task, self.config, rows, path, how)

    def fail(self, message: str, rows: Sequence[dict]) -> None:
        """The run diverged: its curves until then, and no model."""
        if self.path is not None:
            record.write_table(self.path / CURVES, pd.DataFrame(rows))
            record.write_json(self.path / FAILED, {"message": message})

    def keep(self, model: Transformer, step: int) -> None:
        """Save the model of a step that is to be kept; one that a run before an interruption has saved is the same."""
        assert self.path is not None
        if not (self.path / STEPS / f"{step:06d}").exists():
            save(model, self.path / STEPS / f"{step:06d}", extra={"task": self.document["task"], "step": step})

    def close(self, result: Trained) -> None:
        """Everything that a finished run leaves; the model comes last, so that a folder with one is complete."""
        if self.path is None:
            return
        seed = self.config.seed
        record.write_table(self.path / CURVES, result.curves)
        about = record.provenance(config=self.document, seed=seed, training_seconds=result.seconds, how=result.how)
        record.write_json(self.path / "provenance.json", about)
        table = samples(result.model, self.task)
        record.write_atomic(self.path / "samples.csv", lambda temporary: table.to_csv(temporary, index=False))
        save(result.model, self.path / MODEL, extra={"task": self.document["task"]})
        (self.path / STATE).unlink(missing_ok=True)


def open_run(folder: str | Path, task: Task | None = None) -> Trained:
    """The finished run in a training folder: model, curves, task, config, kept models; of one that diverged its note.

    task: needed where the run was of a task of your own. Raises TrainingFolderError.
    """
    folder = Path(folder)
    document = _read_document(folder / "config.json")
    if not (folder / MODEL).is_dir() and not (folder / FAILED).is_file():
        raise TrainingFolderError(f"{folder} holds a training that has not finished (train(…, resume=True) goes on)")
    try:
        task, config = task or restore(document["task"]), TrainConfig(**document["train"])
        model = ModelConfig.from_dict(document["model"])
    except (TaskError, TypeError, ValueError) as error:
        raise TrainingFolderError(
            f"{folder} cannot be opened: {error} (for a task of your own: open_run(folder, task))"
        ) from error
    home = RunFolder(folder, model, task, config)  # type: ignore[arg-type]
    return home.ended()


def digest(model: Transformer) -> str:
    """A hash of a model's weights."""
    digest = hashlib.blake2b(digest_size=16)
    for value in model.state_dict().values():
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """A folder that one program at a time writes to; the system lets go of it when the program ends, however it ends."""
    try:
        release = record.hold(folder)
    except NotADirectoryError as error:
        raise TrainingFolderError(f"{folder} is a file, or lies below one; choose a folder") from error
    except BlockingIOError:
        raise TrainingFolderError(
            f"{folder} is being trained into by another program; wait for it, or choose a new folder"
        ) from None
    try:
        yield
    finally:
        release()


def _read_document(path: Path) -> dict[str, Any]:
    if not path.is_file():
        raise TrainingFolderError(
            f"{path.parent} is no training folder: {path.name} is missing; allowed: a folder that train wrote"
        )
    try:
        old = json.loads(path.read_text())
        parts = {name: dict(old[name]) for name in ("task", "model", "train")}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise TrainingFolderError(
            f"{path} is not a run's config ({error!r}); allowed: a folder that train wrote"
        ) from error
    return {**parts, **{name: old[name] for name in ("start", "interp") if name in old}}
