"""The toy task "induction": BOS r r, where r is a random sequence without repeats and of random length.

The second copy can be predicted from the first by looking for the current token there and reading what followed it
(Olsson 2022): that takes two layers of attention, a previous-token head and an induction head. Because the length of r
varies, position alone cannot solve it.
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
from interp.tasks.task import NOT_ASKED, Batch, Goal, Pairs, TaskError, distinct, held_out, stream
from interp.tasks.train_config import TrainConfig
from interp.tokens import Vocabulary


@dataclass(frozen=True)
class Induction:
    """`shortest` … `longest` different symbols of `n_symbols`, twice, after BOS.

    Ground truth: at the j-th symbol of the second copy the next token is the j+1-th symbol.
    """

    n_symbols: int = 64
    shortest: int = 16
    longest: int = 24
    name: Literal["induction"] = "induction"

    def __post_init__(self) -> None:
        if not 2 <= self.shortest <= self.longest < self.n_symbols:
            raise TaskError(f"shortest={self.shortest}, longest={self.longest} are not allowed; allowed: 2 <= shortest <= "
                            f"longest < n_symbols={self.n_symbols}")  # fmt: skip

    @property
    def vocabulary(self) -> Vocabulary:
        """BOS and the symbols."""
        return Vocabulary(["<s>", *(f"s{i}" for i in range(self.n_symbols))])

    def sample(self, size: int, generator: torch.Generator, second_copy_only: bool = False) -> Batch:
        """`size` sequences, padded on the right; every next token is asked for, or only those of the second copy."""
        symbols = 1 + distinct(size, self.longest, self.n_symbols, generator)
        n = torch.randint(self.shortest, self.longest + 1, (size, 1), generator=generator)
        place = torch.arange(2 * self.longest)
        tokens = symbols.gather(1, place % n) * (place < 2 * n)
        tokens = torch.cat([torch.zeros_like(n), tokens], 1)  # BOS is token 0
        mask = torch.arange(tokens.shape[1]) < 2 * n + 1
        positions = torch.arange(tokens.shape[1] - 1).expand(size, -1)
        asked = mask[:, 1:] & (positions > n if second_copy_only else positions >= 0)
        return Batch(Inputs(tokens, mask=mask), positions, torch.where(asked, tokens[:, 1:], NOT_ASKED))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Fresh sequences; the loss is the ordinary next-token loss at every position."""
        return self.sample(size, stream(seed, step))

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        return {"second_copy": self.sample(1024, held_out(), second_copy_only=True)}

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """`second_copy`: 1,024 fresh sequences, asked where the first copy tells the answer."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Under 0.1 nats in the second copy."""
        return (Goal("second_copy", "nats", 0.1),)

    def pairs(self, n: int = 64, seed: int = 0, length: int = 20, at: int = 10) -> Pairs:
        """Sequences cut after symbol `at` (from 0) of the second copy; the corrupted first copy has another symbol after it.

        Roles: `first` (the symbol in the first copy), `after` (what followed it there: the only difference), `final` (the
        symbol again, where the next token is predicted).
        """
        if not (2 <= length < self.n_symbols and 0 <= at < length - 1):
            raise TaskError(f"length={length}, at={at} are not allowed; allowed: 0 <= at < length-1 < n_symbols-1")
        symbols = 1 + distinct(n, length + 1, self.n_symbols, held_out(1 + seed))
        r, other = symbols[:, :length], symbols[:, length]
        clean = torch.cat([torch.zeros(n, 1, dtype=torch.long), r, r[:, : at + 1]], 1)
        corrupted = clean.clone()
        corrupted[:, at + 2] = other
        place = {"first": at + 1, "after": at + 2, "final": clean.shape[1] - 1}
        roles = {name: torch.full((n,), position) for name, position in place.items()}
        table = pd.DataFrame({"symbol": r[:, at] - 1, "answer": r[:, at + 1] - 1, "corrupted_answer": other - 1})
        return Pairs(Inputs(clean, roles=roles), Inputs(corrupted, roles=roles), r[:, at + 1], other, table)

    def induction_target(self, batch: Batch) -> Tensor:
        """Where an induction head should look from each position of the second copy [batch pos]; −1 elsewhere."""
        assert batch.inputs.mask is not None
        n = (batch.inputs.mask.sum(1, keepdim=True) - 1) // 2
        position = torch.arange(batch.inputs.length).expand(len(batch), -1)
        return torch.where((position > n) & (position < 2 * n), position - n + 1, -1)

    def model_config(self, **changes: Any) -> ModelConfig:
        """Two layers of attention and nothing else, with absolute positions; `n_layers=1` is the control."""
        defaults: dict[str, Any] = {
            "vocab": len(self.vocabulary), "n_layers": 2, "n_heads": 8, "d_model": 64, "n_ctx": 2 * self.longest + 1,
            "ffn": "none", "positions": "learned",
        }  # fmt: skip
        return ModelConfig(**{**defaults, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """How it is learned on two CPU cores; `changes` override."""
        defaults: dict[str, Any] = {"steps": 1500, "batch_size": 64, "learning_rate": 3e-3}
        return TrainConfig(**{**defaults, **changes})
