"""The toy tasks "copy", "reverse" and "sort": an encoder-decoder writes a source again, in another order.

Which source position each output comes from is known, so cross-attention can be checked against the truth (A3).
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
from interp.model.inputs import Inputs, teacher_forced
from interp.tasks.task import NOT_ASKED, Batch, Goal, Pairs, TaskError, distinct, held_out, stream
from interp.tasks.train_config import TrainConfig
from interp.tokens import Vocabulary

BOS, EOS = 0, 1
FIRST = 2  # token of the first symbol


@dataclass(frozen=True)
class Rewriting:
    """A source of `shortest` … `longest` different symbols; the target is the source copied, reversed or sorted, then EOS.

    Ground truth: `alignment`, the source position of every target symbol.
    """

    name: Literal["copy", "reverse", "sort"] = "copy"
    n_symbols: int = 32
    shortest: int = 8
    longest: int = 12

    def __post_init__(self) -> None:
        if self.name not in ("copy", "reverse", "sort"):
            raise TaskError(f"name={self.name!r} is not allowed; allowed: 'copy', 'reverse', 'sort'")
        if not 2 <= self.shortest <= self.longest <= self.n_symbols:
            raise TaskError(f"shortest={self.shortest}, longest={self.longest} are not allowed; allowed: 2 <= shortest <= "
                            f"longest <= n_symbols={self.n_symbols}")  # fmt: skip

    @property
    def bos(self) -> int:
        """Token that a target starts after."""
        return BOS

    @property
    def eos(self) -> int:
        """Token that ends a target."""
        return EOS

    @property
    def vocabulary(self) -> Vocabulary:
        """BOS, EOS and the symbols, in sorting order."""
        return Vocabulary(["<s>", "</s>", *(f"s{i:02d}" for i in range(self.n_symbols))])

    def order(self, source: Tensor, n: Tensor) -> Tensor:
        """Source position of each target symbol [batch longest], −1 after the last; n [batch 1] real symbols."""
        place = torch.arange(source.shape[1]).expand(source.shape)
        if self.name == "copy":
            order = place
        elif self.name == "reverse":
            order = n - 1 - place
        else:
            order = torch.where(place < n, source, self.n_symbols + FIRST).argsort(dim=1, stable=True)
        return torch.where(place < n, order, -1)

    def rewrite(self, source: Tensor, n: Tensor) -> Batch:
        """Teacher forcing of sources [batch longest] with n [batch 1] real symbols: BOS and the target's start in, target out."""
        order = self.order(source, n)
        target = torch.where(order >= 0, source.gather(1, order.clamp(min=0)), EOS)
        target = torch.cat([target, torch.full_like(n, EOS)], 1)  # EOS after the last symbol, and padding behind it
        mask = torch.arange(target.shape[1]) <= n
        inputs = teacher_forced(target, BOS, mask=mask, source=source, source_mask=mask[:, 1:])
        positions = torch.arange(target.shape[1]).expand(len(target), -1)
        return Batch(inputs, positions, torch.where(mask, target, NOT_ASKED))

    def sample(self, size: int, generator: torch.Generator) -> Batch:
        """`size` fresh sources of random lengths with their targets."""
        source = FIRST + distinct(size, self.longest, self.n_symbols, generator)
        return self.rewrite(source, torch.randint(self.shortest, self.longest + 1, (size, 1), generator=generator))

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Fresh sources, every target position in one pass."""
        return self.sample(size, stream(seed, step))

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        return {"held_out": self.sample(1024, held_out())}

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """`held_out`: 1,024 fresh sources."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Over 99% of targets right from the first symbol to EOS."""
        return (Goal("held_out", "exact", 0.99),)

    def alignment(self, inputs: Inputs) -> Tensor:
        """The true source position of the symbol that each target position predicts [batch pos]; −1 for EOS and padding."""
        assert inputs.source is not None and inputs.source_mask is not None
        order = self.order(inputs.source, inputs.source_mask.sum(1, keepdim=True))
        return torch.nn.functional.pad(order, (0, 1), value=-1)

    def pairs(self, n: int = 64, seed: int = 0, length: int = 10, at: int = 4) -> Pairs:
        """Sources of `length` that differ in the one symbol that target position `at` (from 0) asks for.

        The target is given up to there. Roles: `final` (where it is predicted); of the source: `source` (the differing
        position).
        For sort the other symbol has the same rank, so that nothing else moves.
        """
        if not (2 <= length <= self.longest and 0 <= at < length):
            raise TaskError(
                f"length={length}, at={at} are not allowed; allowed: 0 <= at < length <= longest={self.longest}"
            )
        count = torch.full((n, 1), length)
        sources, others, generator = [], [], held_out(1 + seed)
        while sum(map(len, sources)) < n:
            source = FIRST + distinct(n, length, self.n_symbols, generator)
            order = self.order(source, count)
            other = source.clone()
            new = FIRST + torch.randint(self.n_symbols, (n, 1), generator=generator)
            other.scatter_(1, order[:, at : at + 1], new)
            fits = ~(source == new).any(1) & (self.order(other, count) == order).all(1)
            sources.append(source[fits])
            others.append(other[fits])
        clean, corrupted = (self.rewrite(torch.cat(x)[:n], count) for x in (sources, others))
        place = self.alignment(clean.inputs)[:, at]
        roles, source_roles = {"final": torch.full((n,), at)}, {"source": place}
        shown = clean.inputs.tokens[:, : at + 1]  # the target so far is the same in both
        inputs = [
            Inputs(shown, source=batch.inputs.source, roles=roles, source_roles=source_roles)
            for batch in (clean, corrupted)
        ]
        correct, wrong = clean.targets[:, at], corrupted.targets[:, at]
        table = pd.DataFrame({"source_position": place, "answer": correct - FIRST, "corrupted_answer": wrong - FIRST})
        return Pairs(inputs[0], inputs[1], correct, wrong, table)

    def model_config(self, **changes: Any) -> ModelConfig:
        """An encoder and a decoder of two layers, d_model 64, the textbook's block; as many heads a layer as align best."""
        defaults: dict[str, Any] = {
            "kind": "encoder-decoder", "vocab": len(self.vocabulary), "n_layers": 2,
            "n_heads": 1 if self.name == "sort" else 2, "d_model": 64,
            "n_ctx": self.longest + 1, "positions": "learned",
        }  # fmt: skip
        return ModelConfig(**{**defaults, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """How it is learned on two CPU cores; `changes` override."""
        defaults: dict[str, Any] = {"steps": 750, "batch_size": 128, "learning_rate": 3e-3}
        return TrainConfig(**{**defaults, **changes})
