"""The training loop: AdamW, a schedule, held-out goals, exact resume."""

from __future__ import annotations

import dataclasses
import json
import math
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor
from tqdm.auto import tqdm

from interp import record
from interp.model.checkpoint import load, save
from interp.model.config import ModelConfig
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.tasks import as_task
from interp.tasks.task import NOT_ASKED, Batch, Task
from interp.tasks.train_config import TrainConfig
from interp.training.state import read_state, write_state

STATE, MODEL, CURVES = "state.safetensors", "model", "curves.parquet"


class DivergedError(RuntimeError):
    """A loss that became NaN or infinite."""


class TrainingFolderError(RuntimeError):
    """A folder that holds another run, or one that has not been asked to resume."""


@dataclass(frozen=True)
class Trained:
    """The model, its curves (one row per evaluation and split) and whether every goal was met at the last one.

    curves: step, split, loss (the training batch's, nats), learning_rate, seconds, accuracy (share of asked tokens right),
    exact (share of examples with all of them right), nats (mean cross-entropy per asked token), n (examples).
    """

    model: Transformer
    curves: pd.DataFrame
    success: bool
    seconds: float

    def __repr__(self) -> str:
        return f"Trained({'learned' if self.success else 'not learned'} in {self.seconds:.0f} s; {len(self.curves)} curve rows)"


def train(
    model: Transformer | ModelConfig | None,
    task: Task | str,
    config: TrainConfig | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    device: torch.device | str = "cpu",
) -> Trained:
    """Train on `task`; with `folder`, leave config.json, curves.parquet, model/ and a state to resume from.

    model: a Transformer (trained in place), a ModelConfig (initialised from config.seed) or None (the task's default).
    task: a task, or the name of one with its default options ("copy"). config: None is the task's own.
    resume: go on from the folder's last state; the result equals an uninterrupted run bit for bit at the same thread
    count. Raises TrainingFolderError, DivergedError.
    """
    task = as_task(task)
    config = config or task.train_config()
    if not isinstance(model, Transformer):
        model = Transformer(model or task.model_config(), seed=config.seed)
    model = model.to(device).train()
    folder = None if folder is None else Path(folder)
    finished = _open_folder(folder, model, task, config, resume)
    if finished is not None:
        return finished
    optimizer = make_optimizer(model, config)
    start, rows, seconds = 0, [], 0.0
    if folder is not None and resume and (folder / STATE).exists():
        try:
            start, rows, seconds = read_state(folder / STATE, model, optimizer)
        except (SafetensorError, KeyError, TypeError, ValueError) as error:
            raise TrainingFolderError(
                f"{folder / STATE} is truncated or foreign: {error}; train into a new folder"
            ) from error
    began = time.perf_counter() - seconds
    bar = tqdm(range(start, config.steps), initial=start, total=config.steps, disable=not progress, desc=str(task.name))
    for step in bar:
        loss = train_step(model, optimizer, task, config, step)
        done = step + 1
        if done % config.evaluate_every == 0 or done == config.steps:
            rows += _evaluate(model, task, done, loss, config.rate(step), time.perf_counter() - began)
            shown = {row["split"]: f"{row['accuracy']:.3f}" for row in rows if row["step"] == done}
            bar.set_postfix({"loss": f"{loss:.3f}", **shown})
        if folder is not None and done % config.checkpoint_every == 0 and done < config.steps:
            write_state(folder / STATE, model, optimizer, done, rows, time.perf_counter() - began)
    result = _result(model.eval(), task, rows)
    if folder is not None:
        _close_folder(folder, result, task, config)
    return result


def train_step(
    model: Transformer, optimizer: torch.optim.Optimizer, task: Task, config: TrainConfig, step: int
) -> float:
    """One update; returns the batch's loss in nats per read position. Raises DivergedError."""
    batch = task.batch(step, config.batch_size, config.seed)
    for group in optimizer.param_groups:
        group["lr"] = config.rate(step)
    logits = read(model, batch.inputs.to(model.device), batch.positions.to(model.device))
    loss = F.cross_entropy(logits.flatten(0, 1), batch.targets.to(model.device).flatten())
    value = loss.item()
    if not math.isfinite(value):
        raise DivergedError(f"the loss is {value} at step {step} (learning rate {config.rate(step):.2g}); lower "
                            "learning_rate or raise warmup")  # fmt: skip
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
    optimizer.step()
    return value


def read(model: Transformer, inputs: Inputs, positions: Tensor) -> Tensor:
    """Logits at `positions` [batch n] only, [batch n vocab]: the head is not computed elsewhere."""
    stream = model.stream(inputs)
    index = positions[..., None].expand(-1, -1, stream.shape[-1])
    return model.unembed(stream.gather(1, index))


@torch.no_grad()
def judge(model: Transformer, examples: Batch, batch_size: int = 1024) -> dict[str, float]:
    """accuracy, exact and nats (see `Goal`) over the examples' asked tokens, and n, how many examples ask any."""
    right, nats, asked = [], [], []
    for begin in range(0, len(examples), batch_size):
        part = examples.select(slice(begin, begin + batch_size))
        logits = read(model, part.inputs.to(model.device), part.positions.to(model.device)).float().cpu()
        nats.append(
            F.cross_entropy(logits.flatten(0, 1), part.targets.flatten(), reduction="none").view(part.targets.shape)
        )
        right.append(logits.argmax(-1) == part.targets)
        asked.append(part.targets != NOT_ASKED)
    hit, cost, wanted = torch.cat(right), torch.cat(nats), torch.cat(asked)
    some = wanted.any(1)
    return {
        "accuracy": float(hit[wanted].float().mean()),
        "exact": float((hit | ~wanted).all(1)[some].float().mean()),
        "nats": float(cost[wanted].mean()),
        "n": int(some.sum()),
    }


def make_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov & Hutter 2019) with decay on matrices, none on embeddings, norms and biases."""
    decayed = {
        name for name, p in model.named_parameters() if p.ndim >= 2 and "embedding" not in name and name != "W_pos"
    }
    named = dict(model.named_parameters())
    groups = [
        {"params": [p for name, p in named.items() if name in decayed], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named.items() if name not in decayed], "weight_decay": 0.0},
    ]
    fused = model.device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)


def _evaluate(model: Transformer, task: Task, step: int, loss: float, rate: float, seconds: float) -> list[dict]:
    model.eval()
    about = {"loss": loss, "learning_rate": rate, "seconds": seconds}
    rows = [{"step": step, "split": split, **about, **judge(model, batch)} for split, batch in task.evaluation.items()]
    model.train()
    return rows


def _result(model: Transformer, task: Task, rows: list[dict]) -> Trained:
    curves = pd.DataFrame(rows)
    last = curves[curves["step"] == curves["step"].max()].set_index("split")
    success = all(goal.met(float(last.loc[goal.split, goal.quantity])) for goal in task.goals)
    return Trained(model, curves, success, float(curves["seconds"].iloc[-1]))


def _document(model: Transformer, task: Task, config: TrainConfig) -> dict[str, Any]:
    described = dataclasses.asdict(task) if dataclasses.is_dataclass(task) else {"name": task.name}  # type: ignore[arg-type]
    document = {"task": described, "model": model.config.to_dict(), "train": dataclasses.asdict(config)}
    return json.loads(json.dumps(document))


def _open_folder(folder: Path | None, model, task, config, resume: bool) -> Trained | None:
    """Claim a new folder, or check that an old one is the same run; its result when it has finished."""
    if folder is None:
        return None
    document, path = _document(model, task, config), folder / "config.json"
    if not path.exists():
        if folder.exists() and any(
            not entry.name.startswith(".") for entry in folder.iterdir()
        ):  # not our unfinished files
            raise TrainingFolderError(f"{folder} is not empty and holds no run of ours; choose a new folder")
        record.write_json(path, document)
        return None
    if not resume:
        raise TrainingFolderError(f"{folder} holds a run; resume it (resume=True, --resume) or choose a new folder")
    try:
        old = {name: dict(values) for name, values in json.loads(path.read_text()).items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise TrainingFolderError(f"{path} is not a run's config: {error}") from error
    if old.keys() != document.keys():
        raise TrainingFolderError(f"{path} has the parts {sorted(old)}; allowed: {sorted(document)}")
    if old != document:
        differing = [f"{part}.{name}: {old[part].get(name)!r} there, {value!r} asked for"
                     for part in document for name, value in document[part].items() if old[part].get(name) != value]  # fmt: skip
        raise TrainingFolderError(f"{folder} holds another run: {'; '.join(differing) or 'fields differ'}")
    if (folder / MODEL).exists():
        model.load_state_dict(load(folder / MODEL).state_dict())
        return _result(model.eval(), task, pd.read_parquet(folder / CURVES).to_dict("records"))
    return None


def _close_folder(folder: Path, result: Trained, task: Task, config: TrainConfig) -> None:
    record.write_table(folder / CURVES, result.curves)
    about = record.provenance(
        config=_document(result.model, task, config), seed=config.seed, training_seconds=result.seconds
    )
    record.write_json(folder / "provenance.json", about)
    save(result.model, folder / MODEL, extra={"task": about["config"]["task"]})
    (folder / STATE).unlink(missing_ok=True)
