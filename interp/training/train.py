"""The training loop: AdamW or SGD, a schedule, held-out goals, exact resume."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm.auto import tqdm

from interp.model.config import ModelConfig
from interp.model.inputs import Inputs, InputsError
from interp.model.transformer import Transformer
from interp.run import check_inputs
from interp.tasks import as_task
from interp.tasks.task import NOT_ASKED, Batch, Task, drawn_on
from interp.tasks.train_config import TrainConfig
from interp.training.folder import STATE, RunFolder, Trained, result_of
from interp.training.judge import goals_met, judge, read
from interp.training.optimizer import Holding, make_optimizer
from interp.training.parallel import Ranks
from interp.training.state import load_state, read_state, state_of, write_state


class DivergedError(RuntimeError):
    """A loss or gradient that became NaN or infinite, or a loss far above that of a guess. rows: the curves until then."""

    def __init__(self, message: str, rows: Sequence[dict] = ()) -> None:
        super().__init__(message)
        self.rows = list(rows)


def train(
    model: Transformer | ModelConfig | None,
    task: Task | str,
    config: TrainConfig | None = None,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: bool = True,
    device: torch.device | str = "cpu",
) -> Trained:
    """Train on `task`; with `folder`, leave config.json, curves.parquet, samples.csv, model/ and a state to resume from.

    model: a Transformer (trained in place), a ModelConfig (initialised from config.seed) or None (the task's default).
    task: a task, or the name of one with its default options ("copy"). config: None is the task's own.
    resume: go on from the folder's last state; the result equals an uninterrupted run bit for bit at the same thread
    count. Under torchrun every process takes its share of each batch and the first one writes.
    Raises TrainingFolderError, DivergedError.
    """
    task = as_task(task)
    config = config or task.train_config()
    home = RunFolder(folder, task.model_config() if model is None else model, task, config)
    found = train_into(home, home.start, resume, progress, device)
    if found.note:
        raise DivergedError(found.note, found.curves.to_dict("records"))  # type: ignore[arg-type]
    return found


def train_into(
    home: RunFolder,
    model: Transformer | None = None,
    resume: bool = False,
    progress: bool = True,
    device: torch.device | str = "cpu",
    how: str = "alone",
) -> Trained:
    """The run of a folder, or what it left when it ended before; one that diverges says so there.

    model: trained in place; None is a new one with the folder's first weights. Raises as `train` does.
    """
    ranks = Ranks.current(device)
    model = (model or home.first()).to(ranks.device).train()
    check_fit(model, home.task)  # before the folder is this run's
    with home.held() if ranks.first else nullcontext():
        if ranks.agreed(lambda: home.claim(resume)):
            return home.ended(model)
        try:
            return _train(model, home, ranks, resume, progress, how)
        except DivergedError as error:
            if ranks.first:
                home.fail(str(error), error.rows)
            raise


def check_fit(model: Transformer, task: Task) -> None:
    """Raises InputsError for a model that cannot read the task's batches: too few token ids, too short a context, …."""
    words, vocab = len(getattr(task, "vocabulary", ())), model.config.vocab
    if words > vocab:
        raise InputsError(f"vocab={vocab} is too small for {task.name!r}; allowed: at least its {words} token ids")
    check_inputs(model, drawn_on(model.device, task, 0, 2, 0).inputs)


def _train(model: Transformer, home: RunFolder, ranks: Ranks, resume: bool, progress: bool, how: str) -> Trained:
    """The loop."""
    task, config = home.task, home.config
    optimizer = make_optimizer(model, config)
    start, rows, seconds = _resumed(home, model, optimizer) if resume else (0, [], 0.0)
    began = time.perf_counter() - seconds
    loss, watch = ranks.wrap(_compiled(Loss(model), config)), Watch(model, config, rows)
    keep = set(config.kept) if home.path is not None and ranks.first else set()
    if start == 0 and 0 in keep:
        home.keep(model, 0)
    bar = tqdm(range(start, config.steps), initial=start, total=config.steps, disable=not (progress and ranks.first),
               desc=str(task.name))  # fmt: skip
    for step in bar:
        batch = drawn_on(model.device, task, step, config.batch_size, config.data)
        value, norm = train_step(
            loss, optimizer, ranks.share(batch), config, step, asked=_asked(batch), world=ranks.world
        )
        watch(step, ranks.total(value), norm)
        done, stop = step + 1, False
        if done % config.evaluate_every == 0 or done == config.steps:
            watch.settle()
            seconds = time.perf_counter() - began
            new = ranks.agreed(lambda: evaluate(model, task, done, watch.loss, config.rate(step), seconds))  # noqa: B023
            rows += new
            stop = config.stop == "goals" and goals_met(task, new)
            bar.set_postfix({"loss": f"{watch.loss:.3f}", **{row["split"]: f"{row['accuracy']:.3f}" for row in new}})
        if done in keep:
            home.keep(model, done)
        if stop:
            break
        if home.path is not None and ranks.first and done % config.checkpoint_every == 0 and done < config.steps:
            watch.settle()
            about = {"step": done, "rows": rows, "seconds": time.perf_counter() - began, "run": home.identity}
            write_state(home.path / STATE, state_of(model, optimizer), about)
    result = result_of(model.eval(), task, config, rows, home.path, how)
    ranks.agreed(lambda: home.close(result))
    return result


class Loss(nn.Module):
    """Cross-entropy (nats) at the positions that a batch reads, summed and divided by `asked` tokens."""

    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Inputs, positions: Tensor, targets: Tensor, asked: Tensor | int) -> Tensor:
        logits = read(self.model, inputs, positions)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=NOT_ASKED, reduction="sum") / asked


def train_step(
    loss: nn.Module,
    optimizer: Holding,
    batch: Batch,
    config: TrainConfig,
    step: int,
    asked: Tensor | None = None,
    world: int = 1,
) -> tuple[Tensor, Tensor]:
    """One update; the loss in nats per asked token and the gradient's norm, both scalars where the model is.

    asked: how many tokens the whole batch asks for, default those of `batch`; world: over how many processes gradients are
    averaged, each of which has a share of it.
    """
    for group in optimizer.param_groups:
        group["lr"] = config.rate(step)
    with torch.autocast(batch.targets.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
        value = loss(batch.inputs, batch.positions, batch.targets, _asked(batch) if asked is None else asked)
    loss.zero_grad(set_to_none=True)
    (value * world if world > 1 else value).backward()  # averaged over processes: the sum over the whole batch
    norm = optimizer.clip(config.clip)
    optimizer.step()
    return value.detach(), norm


def _asked(batch: Batch) -> Tensor:
    return (batch.targets != NOT_ASKED).sum()


class Watch:
    """Looks for divergence: at every step on a CPU, every twenty on a GPU, where reading a number makes the program wait."""

    def __init__(
        self,
        model: Transformer,
        config: TrainConfig,
        rows: Sequence[dict] = (),
        gradients: Callable[[], dict[str, Tensor]] | None = None,
    ) -> None:
        """rows: the curves, as they grow. gradients: the last step's by name, where the model itself does not hold them."""
        self.model, self.config, self.rows, self.gradients = model, config, rows, gradients or self._gradients
        self.every = 1 if model.device.type == "cpu" else 20
        self.limit = 10 * math.log(max(model.config.vocab, 2))  # a guess costs log(vocab)
        self.recent: deque[float] = deque(maxlen=5)
        self._waiting: list[tuple[int, Tensor, Tensor]] = []

    @property
    def loss(self) -> float:
        """The last batch's loss."""
        return self.recent[-1]

    def __call__(self, step: int, loss: Tensor, norm: Tensor) -> None:
        self._waiting.append((step, loss, norm))
        if len(self._waiting) >= self.every:
            self.settle()

    def settle(self) -> None:
        """Read the losses that have not been looked at. Raises DivergedError."""
        for step, loss, norm in self._waiting:
            value, gradient = float(loss), float(norm)
            if not (math.isfinite(value) and math.isfinite(gradient)) or value > self.limit:
                raise DivergedError(self._report(step, value, gradient), self.rows)
            self.recent.append(value)
        self._waiting = []

    def _report(self, step: int, value: float, gradient: float) -> str:
        bad = [name for name, grad in self.gradients().items() if not bool(torch.isfinite(grad).all())]
        before = ", ".join(f"{one:.3g}" for one in self.recent) or "none"
        where = f"; not finite: gradients of {', '.join(bad[:3])}" if bad else ""
        return (f"the loss is {value:.4g} at step {step} (gradient norm {gradient:.3g}, learning rate "
                f"{self.config.rate(step):.2g}, losses before: {before}{where}); lower learning_rate, raise warmup or lower "
                "clip")  # fmt: skip

    def _gradients(self) -> dict[str, Tensor]:
        return {name: p.grad for name, p in self.model.named_parameters() if p.grad is not None}


def _compiled(loss: nn.Module, config: TrainConfig) -> nn.Module:
    return torch.compile(loss) if config.compile else loss  # type: ignore[return-value]


def evaluate(model: Transformer, task: Task, step: int, loss: float, rate: float, seconds: float) -> list[dict]:
    """The curves' rows of one evaluation, one per split."""
    model.eval()
    about = {"loss": loss, "learning_rate": rate, "seconds": seconds}
    rows = [{"step": step, "split": split, **about, **judge(model, batch)} for split, batch in task.evaluation.items()]
    model.train()
    return rows


def _resumed(home: RunFolder, model: Transformer, optimizer: torch.optim.Optimizer) -> tuple[int, list[dict], float]:
    """Next step, curve rows and seconds of an unfinished run, its weights and moments put in place."""
    if home.path is None or not (home.path / STATE).exists():
        return 0, [], 0.0

    def take(tensors: dict[str, Tensor], about: dict[str, Any]) -> tuple[int, list[dict], float]:
        if about.get("run") != home.identity:
            raise ValueError("it is the state of a run with other settings")
        load_state(tensors, model, optimizer)
        return about["step"], about["rows"], about["seconds"]

    return read_state(home.path / STATE, take)
