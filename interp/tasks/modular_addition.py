"""The toy task "modular-addition": a b "=" -> (a + b) mod p, from a share of all p² pairs.

Small enough that training sees its whole data at every step. A model first knows its pairs by heart and much later, under
strong weight decay, turns to a few Fourier frequencies that hold for every pair: grokking (Power 2022; Nanda et al. 2023).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor

from interp.model.config import ModelConfig
from interp.model.inputs import Inputs
from interp.tasks.task import Batch, Copies, Goal, Pairs, TaskError, held_out
from interp.tasks.train_config import TrainConfig
from interp.tokens import Vocabulary


@dataclass(frozen=True)
class ModularAddition:
    """Numbers 0 … `modulus`−1; `share` of all pairs, chosen by `split`, is for training, the rest is held out.

    Roles: `a`, `b`, `final` ("=", where the answer is read). Ground truth: `answers`.
    """

    modulus: int = 59
    share: float = 0.4
    split: int = 0
    name: Literal["modular-addition"] = "modular-addition"

    def __post_init__(self) -> None:
        if not 3 <= self.modulus <= 512:
            raise TaskError(f"modulus={self.modulus} is not allowed; allowed: 3 … 512")
        if not 1 <= self.n_train < self.modulus**2:
            raise TaskError(
                f"share={self.share} is not allowed; allowed: a share in (0, 1) that leaves both splits a pair"
            )

    @property
    def n_train(self) -> int:
        """How many pairs are for training: a training step's batch."""
        return round(self.share * self.modulus**2)

    @property
    def vocabulary(self) -> Vocabulary:
        """The numbers, then "="."""
        return Vocabulary([*map(str, range(self.modulus)), "="])

    def answers(self, pairs: Tensor) -> Tensor:
        """(a + b) mod p of pairs [batch 2] -> [batch]."""
        return pairs.sum(1) % self.modulus

    def inputs(self, pairs: Tensor) -> Inputs:
        """The prompts of pairs [batch 2] -> tokens [batch 3], with roles."""
        tokens = torch.nn.functional.pad(pairs, (0, 1), value=self.modulus)
        return Inputs(tokens, roles={role: torch.full((len(pairs),), i) for i, role in enumerate(("a", "b", "final"))})

    @cached_property
    def splits(self) -> Mapping[str, Tensor]:
        """The pairs [n 2] of `train` and of `held_out`, each in the order of a·p + b; no pair is in both."""
        p = self.modulus
        order = torch.randperm(p * p, generator=torch.Generator().manual_seed(self.split))
        parts = {"train": order[: self.n_train], "held_out": order[self.n_train :]}
        return {name: torch.stack([part.sort()[0] // p, part.sort()[0] % p], 1) for name, part in parts.items()}

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        return {
            name: Batch(self.inputs(pairs), torch.full((len(pairs), 1), 2), self.answers(pairs)[:, None])
            for name, pairs in self.splits.items()
        }

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """Every pair of `train` and of `held_out`; how long the first is ahead of the second is grokking's delay."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """99% of the pairs that training never saw."""
        return (Goal("held_out", "accuracy", 0.99),)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Every training pair, whatever step, size and seed say: full-batch training, as in the paper."""
        return self._train.on(torch.get_default_device())

    @cached_property
    def _train(self) -> Copies[Batch]:
        with torch.device("cpu"):  # where the splits are drawn, whoever asks first
            return Copies(self._evaluation["train"])

    def pairs(self, n: int = 64, seed: int = 0) -> Pairs:
        """`n` different held-out pairs; the corrupted prompt has another b, so another answer.

        Roles: `a`, `b` (the only difference), `final`.
        """
        pairs, generator = self.splits["held_out"], held_out(1 + seed)
        if not 1 <= n <= len(pairs):
            raise TaskError(f"n={n} is not allowed; allowed: 1 … {len(pairs)}, the held-out pairs")
        clean = pairs[torch.randperm(len(pairs), generator=generator)[:n]]
        shift = torch.randint(1, self.modulus, (n,), generator=generator)
        corrupted = torch.stack([clean[:, 0], (clean[:, 1] + shift) % self.modulus], 1)
        correct, wrong = self.answers(clean), self.answers(corrupted)
        numbers = {"a": clean[:, 0], "b": clean[:, 1], "corrupted_b": corrupted[:, 1]}
        table = pd.DataFrame({**numbers, "answer": correct, "corrupted_answer": wrong})
        return Pairs(self.inputs(clean), self.inputs(corrupted), correct, wrong, table)

    def model_config(self, **changes: Any) -> ModelConfig:
        """Nanda's: one layer, d_model 128, no norm, biases in the FFN alone; `norm="layernorm"` is the pre-norm variant."""
        defaults: dict[str, Any] = {
            "vocab": self.modulus + 1, "n_layers": 1, "n_heads": 4, "d_model": 128, "n_ctx": 3, "norm": "none",
            "bias": frozenset({"ffn"}),
        }  # fmt: skip
        return ModelConfig(**{**defaults, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """Full batches at a constant rate, with weight decay on everything; it groks in some 500 steps, by heart before 100.

        Three times the paper's rate and twice its decay, so that the wait is minutes on one core; the paper's own are
        `learning_rate=1e-3, weight_decay=1.0`, with some 6 times the steps. `changes` override.
        """
        defaults: dict[str, Any] = {
            "steps": 1000, "batch_size": self.n_train, "learning_rate": 3e-3, "weight_decay": 2.0, "decay": "all",
            "schedule": "constant", "warmup": 0.01, "clip": 1e3,
        }  # fmt: skip
        return TrainConfig(**{**defaults, **changes})
