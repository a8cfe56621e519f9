"""How long and how fast to train: a task states its own defaults, the loop obeys."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from interp.model.weights import GROUPS

_CHOICES = {
    "schedule": ("cosine", "linear", "constant"),
    "decay": ("matrices", "all"),
    "stop": ("steps", "goals"),
    "precision": ("float32", "bfloat16"),
    "optimizer": ("adamw", "sgd"),
}


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How to train: `steps` of `batch_size` sequences.

    learning_rate: peak; warmup: share of steps that rise linearly to it; schedule: how it falls to `final_rate` of the
    peak. weight_decay: on matrices only (not on norms, biases, embeddings) unless decay="all". clip: largest gradient norm.
    evaluate_every, checkpoint_every: in steps. stop: "goals" ends at the first evaluation that meets all of the task's goals.
    keep: how many log-spaced steps' models to keep, beside that before training. precision: of matrix products; "bfloat16" is
    autocast, weights and optimizer stay as they are. compile: by torch.compile. seed: initial weights and, without data_seed,
    data order. trainable: weight groups ("ffn", "ov", …: `interp.model.weights.GROUPS`) that are trained while all others stay
    exactly as they are; None is all. optimizer: "sgd" has momentum betas[0] and the same decoupled decay.
    """

    steps: int = 1000
    batch_size: int = 256
    learning_rate: float = 3e-3
    warmup: float = 0.05
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_rate: float = 0.0
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    decay: Literal["matrices", "all"] = "matrices"
    clip: float = 1.0
    evaluate_every: int = 100
    checkpoint_every: int = 100
    stop: Literal["steps", "goals"] = "steps"
    keep: int = 0
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: bool = False
    seed: int = 0
    data_seed: int | None = None
    trainable: tuple[str, ...] | None = None
    optimizer: Literal["adamw", "sgd"] = "adamw"

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        for name in ("steps", "batch_size", "evaluate_every", "checkpoint_every"):
            self._need(name, _whole(getattr(self, name)) and getattr(self, name) >= 1, "an integer of 1 or more")
        for name in ("learning_rate", "clip"):
            self._need(name, _finite(getattr(self, name)) and getattr(self, name) > 0, "a finite number above 0")
        for name in ("weight_decay", "final_rate"):
            self._need(name, _finite(getattr(self, name)) and getattr(self, name) >= 0, "a finite number of 0 or more")
        ok = len(self.betas) == 2 and all(_finite(beta) and 0 <= beta < 1 for beta in self.betas)
        self._need("betas", ok, "two numbers in [0, 1)")
        self._need("compile", isinstance(self.compile, bool), "True or False")
        for name in ("seed", "data_seed"):
            value = getattr(self, name)
            ok = (name == "data_seed" and value is None) or (_whole(value) and 0 <= value < 1 << 40)
            self._need(name, ok, "an integer from 0 to 2^40")
        if not 0 <= self.warmup < 1:
            raise ValueError(f"warmup={self.warmup} is not allowed; allowed: a share of steps in [0, 1)")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(
                    f"{name}={getattr(self, name)!r} is not allowed; allowed: {', '.join(map(repr, allowed))}"
                )
        if self.trainable is not None:
            names = (self.trainable,) if isinstance(self.trainable, str) else tuple(self.trainable)
            object.__setattr__(self, "trainable", names)
            self._need("trainable", bool(names) and set(names) <= set(GROUPS), f"None or some of {', '.join(GROUPS)}")
        self._need("keep", _whole(self.keep) and self.keep >= 0 and self.keep != 1, "0, or 2 or more")

    def _need(self, name: str, ok: bool, allowed: str) -> None:
        if not ok:
            raise ValueError(f"{name}={getattr(self, name)!r} is not allowed; allowed: {allowed}")

    @property
    def data(self) -> int:
        """The seed of the data's order."""
        return self.seed if self.data_seed is None else self.data_seed

    @property
    def kept(self) -> tuple[int, ...]:
        """The steps whose models are kept: 0 and `keep` log-spaced ones from 1 to the last."""
        if not self.keep:
            return ()
        return tuple(sorted({0, *(round(self.steps ** (i / (self.keep - 1))) for i in range(self.keep))}))

    def rate(self, step: int) -> float:
        """Learning rate of a step (from 0)."""
        rise = max(1, round(self.warmup * self.steps))
        if step < rise:
            return self.learning_rate * (step + 1) / rise
        done = (step - rise) / max(1, self.steps - rise)
        fall = {"cosine": (1 + math.cos(math.pi * done)) / 2, "linear": 1 - done, "constant": 1.0}[self.schedule]
        return self.learning_rate * (self.final_rate + (1 - self.final_rate) * fall)
