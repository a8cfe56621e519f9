"""What every task gives: batches to train on, batches to be judged on, goals, and contrast pairs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Generic, Literal, Protocol, TypeVar

import pandas as pd
import torch
from torch import Tensor

from interp.model.config import ModelConfig
from interp.model.inputs import Inputs
from interp.tasks.train_config import TrainConfig

NOT_ASKED = -100  # the target of a position at which nothing is asked; cross-entropy skips it


class TaskError(ValueError):
    """A task's option outside its range."""


@dataclass(frozen=True, eq=False)
class Batch:
    """inputs; the positions read [batch n]; the token wanted at each [batch n], NOT_ASKED where nothing is."""

    inputs: Inputs
    positions: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return self.inputs.batch

    def select(self, rows: slice) -> Batch:
        """The examples of a slice."""
        return Batch(self.inputs.select(rows), self.positions[rows], self.targets[rows])

    def to(self, device: torch.device | str) -> Batch:
        """The same batch on `device`."""
        return Batch(self.inputs.to(device), self.positions.to(device), self.targets.to(device))


Held = TypeVar("Held", Tensor, Batch)


class Copies(Generic[Held]):
    """A tensor or a batch, copied to each device once."""

    def __init__(self, value: Held) -> None:
        self._value, self._copies = value, dict[torch.device, Held]()

    def on(self, device: torch.device) -> Held:
        """The copy on a device."""
        if device not in self._copies:
            self._copies[device] = self._value.to(device)
        return self._copies[device]


@dataclass(frozen=True, eq=False)
class Pairs:
    """Contrast pairs: clean and corrupted prompts of equal length whose right answers differ.

    Row i of both has the same length and role positions. correct, wrong: first tokens of the clean and of the corrupted
    answer [batch]. position: where the answer is read, as metrics take it (an int or a role).
    """

    clean: Inputs
    corrupted: Inputs
    correct: Tensor
    wrong: Tensor
    table: pd.DataFrame
    position: int | str = -1

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        roles = ", ".join([*self.clean.roles, *self.clean.source_roles])
        return f"Pairs({len(self)} of {self.clean.length} positions; roles: {roles})"


@dataclass(frozen=True)
class Goal:
    """A number that counts as learned, on one split.

    quantity: "accuracy" (share of asked tokens that are the model's most likely), "exact" (share of examples with all of
    them right; for a decoder that is greedy generation's exact match) are wanted at least; "nats" (mean cross-entropy per
    asked token) at most.
    """

    split: str
    quantity: Literal["accuracy", "exact", "nats"]
    value: float

    def met(self, found: float) -> bool:
        """Whether a measured value is good enough."""
        return found <= self.value if self.quantity == "nats" else found >= self.value

    def __str__(self) -> str:
        sign = "at most" if self.quantity == "nats" else "at least"
        return f"{self.split} {self.quantity} {sign} {self.value:g}"


class Task(Protocol):
    """What the training loop needs. `batch` is a function of (step, size, seed) and PyTorch's default device alone, so
    resuming needs no state; it draws on that device, whose random numbers are its own."""

    @property
    def name(self) -> str:
        """What the progress bar and the folder call it."""
        ...

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """Examples to be judged on, by split."""
        ...

    @property
    def goals(self) -> tuple[Goal, ...]:
        """What counts as learned: all of these at once."""
        ...

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """The training batch of a step."""
        ...

    def model_config(self) -> ModelConfig:
        """The task's default model."""
        ...

    def train_config(self) -> TrainConfig:
        """How the default model learns it on two CPU cores."""
        ...


def stream(seed: int, step: int) -> torch.Generator:
    """The random numbers of a training step on the default device: a function of (seed, step) alone."""
    return torch.Generator(torch.get_default_device()).manual_seed(seed * 1_000_003 + step)


def drawn_on(device: torch.device, task: Task, step: int, size: int, seed: int) -> Batch:
    """The batch of a step, drawn where the model is and without the names of positions, which training does not read."""
    if device.type == "cpu":  # the default; a context would slow every call
        batch = task.batch(step, size, seed)
    else:
        with device:
            batch = task.batch(step, size, seed).to(device)
    return replace(batch, inputs=replace(batch.inputs, roles={}, source_roles={}))


def held_out(number: int = 0) -> torch.Generator:
    """Random numbers that no training step of a seed below 4,000 draws; `number` tells evaluation sets and pairs apart."""
    return torch.Generator().manual_seed(0xFFFFFFFF - number)  # PyTorch's CPU generator reads 32 bits of a seed


def distinct(batch: int, n: int, of: int, generator: torch.Generator) -> Tensor:
    """`n` different ints of 0 … of−1 per row, in random order [batch n]."""
    return torch.rand(batch, of, generator=generator).argsort(1)[:, :n]
