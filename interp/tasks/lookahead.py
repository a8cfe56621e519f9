"""The toy task "lookahead": for every symbol of a prefix, does it come again, and has it come before?

Whether a symbol comes again (look-ahead) can stand at the symbol itself only if attention sees the whole prefix, as a
prefix decoder's does; whether it has come before (look-back) a causal decoder can tell there too.
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
from interp.tasks.task import NOT_ASKED, Batch, Goal, Pairs, TaskError, held_out, stream
from interp.tasks.train_config import TrainConfig
from interp.tokens import Vocabulary

BOS, ANSWER, FIRST = 0, 1, 2
MARKS = ("", "<", ">", "<>")  # came before = 1, comes again = 2


@dataclass(frozen=True)
class Lookahead:
    """BOS and `length` symbols of `n_symbols`, repeats allowed, are the prefix; then "=" and the symbols again, each marked.

    The mark "<" says that the symbol has come before, ">" that it comes again. Ground truth: the marks. causal: the control,
    the same prompts for a causal decoder.
    """

    length: int = 12
    n_symbols: int = 16
    causal: bool = False
    name: Literal["lookahead"] = "lookahead"

    def __post_init__(self) -> None:
        for field in ("length", "n_symbols"):
            if getattr(self, field) < 2:
                raise TaskError(f"{field}={getattr(self, field)} is not allowed; allowed: 2 or more")

    @property
    def vocabulary(self) -> Vocabulary:
        """BOS, "=", symbols, marked symbols (each with all four marks)."""
        marked = [f"{i}{mark or '.'}" for i in range(self.n_symbols) for mark in MARKS]
        return Vocabulary(["<s>", "=", *(f"s{i}" for i in range(self.n_symbols)), *marked])

    @property
    def prefix_length(self) -> int:
        """How many tokens stand before "=": they see each other."""
        return 1 + self.length

    def answers(self, symbols: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(marked tokens, came before?, comes again?) of symbols [batch length], numbers from 0; each [batch length]."""
        same = symbols[:, :, None] == symbols[:, None, :]
        before, again = same.tril(-1).any(2), same.triu(1).any(2)
        return FIRST + self.n_symbols + 4 * symbols + before + 2 * again, before, again

    def as_batch(self, symbols: Tensor, keep: Tensor | None = None) -> Batch:
        """Teacher forcing: every marked symbol is asked for (where `keep` [batch length])."""
        size, marked = len(symbols), self.answers(symbols)[0]
        column = torch.zeros(size, 1, dtype=torch.long)
        tokens = torch.cat([column + BOS, symbols + FIRST, column + ANSWER, marked[:, :-1]], 1)
        positions = (self.prefix_length + torch.arange(self.length)).expand(size, -1)
        targets = marked if keep is None else torch.where(keep, marked, NOT_ASKED)
        return Batch(Inputs(tokens, prefix_length=self._prefix(size)), positions, targets)

    def _prefix(self, size: int) -> Tensor | None:
        return None if self.causal else torch.full((size,), self.prefix_length)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Fresh prompts."""
        return self.as_batch(torch.randint(self.n_symbols, (size, self.length), generator=stream(seed, step)))

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        symbols = torch.randint(self.n_symbols, (1024, self.length), generator=held_out())
        _, before, again = self.answers(symbols)
        return {"look_ahead": self.as_batch(symbols, again), "look_back": self.as_batch(symbols, before)}

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """1,024 fresh prompts, judged on symbols that come again (`look_ahead`) and that came before (`look_back`)."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Over 99% of both."""
        return tuple(Goal(split, "accuracy", 0.99) for split in ("look_ahead", "look_back"))

    def pairs(self, n: int = 64, seed: int = 0, at: int = 3) -> Pairs:
        """Prompts up to the answer about symbol `at` (from 0), which comes once more; in the corrupted prompt it does not.

        The second occurrence is replaced by a symbol that the prompt does not hold, so that no earlier answer changes.
        Roles: `symbol`, `again` (the second occurrence: the only difference), `final` (where its answer is predicted).
        """
        if not 0 <= at < self.length - 1 or self.n_symbols <= 2:
            raise TaskError(f"at={at} is not allowed; allowed: 0 … {self.length - 2}, with over 2 symbols")
        generator, kept, replaced, places = held_out(1 + seed), [], [], []
        while sum(map(len, kept)) < n:
            symbols = torch.randint(self.n_symbols, (8 * n, self.length), generator=generator)
            same = symbols == symbols[:, at : at + 1]
            other = torch.randint(self.n_symbols, (8 * n, 1), generator=generator)
            fits = (same.sum(1) == 2) & ~same[:, :at].any(1) & ~(symbols == other).any(1)
            symbols, other = symbols[fits], other[fits]
            second = same[fits].long().cumsum(1).argmax(1)  # the first maximum: where the count reaches 2
            kept.append(symbols)
            replaced.append(symbols.scatter(1, second[:, None], other))
            places.append(second)
        symbols, other, second = (torch.cat(x)[:n] for x in (kept, replaced, places))
        batches = [self.as_batch(x) for x in (symbols, other)]
        final = torch.full((n,), self.prefix_length + at)
        roles = {"symbol": torch.full((n,), 1 + at), "again": 1 + second, "final": final}
        end = self.prefix_length + at + 1
        inputs = [Inputs(b.inputs.tokens[:, :end], prefix_length=self._prefix(n), roles=roles) for b in batches]
        correct, wrong = (b.targets[:, at] for b in batches)
        table = pd.DataFrame({"symbol": symbols[:, at], "again": second})
        return Pairs(inputs[0], inputs[1], correct, wrong, table)

    def model_config(self, **changes: Any) -> ModelConfig:
        """A prefix decoder of two layers, d_model 64 (causal: a decoder)."""
        defaults: dict[str, Any] = {
            "kind": "decoder" if self.causal else "prefix-decoder", "vocab": len(self.vocabulary),
            "n_layers": 2, "n_heads": 4, "d_model": 64,
            "n_ctx": self.prefix_length + 1 + self.length,
        }  # fmt: skip
        return ModelConfig(**{**defaults, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """How it is learned on two CPU cores; `changes` override."""
        defaults: dict[str, Any] = {"steps": 750, "batch_size": 128, "learning_rate": 3e-3}
        return TrainConfig(**{**defaults, **changes})
