"""The toy task "lookahead" (SCIENCE T7): a prefix of slots that point at each other, then questions about them.

A slot holds a value or a pointer at another slot. A question names a slot; its answer is the value at the end of the
chain. With links followed in pairs at once (each slot reads the one it points at, then the question reads that slot)
two layers do for two links, but where a link points forward only attention that sees the whole prefix can read ahead:
a prefix decoder has it, a causal decoder has to find another way.
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

BOS = 0


@dataclass(frozen=True)
class Lookahead:
    """BOS and `n_chains` · (`links` + 1) slots are the prefix; then one question per chain, in random order, with its answer.

    A chain is `links` pointers and a value, in slots drawn at random. Token i (from 1) points at slot i, which stands at
    position i; a question is a pointer at the chain's first slot. Ground truth: the value at each chain's end. causal: the
    control, the same prompts for a causal decoder.
    """

    n_chains: int = 5
    links: int = 2
    n_values: int = 16
    causal: bool = False
    name: Literal["lookahead"] = "lookahead"

    def __post_init__(self) -> None:
        for field, least in (("n_chains", 1), ("links", 1), ("n_values", 2)):
            if getattr(self, field) < least:
                raise TaskError(f"{field}={getattr(self, field)} is not allowed; allowed: {least} or more")

    @property
    def n_slots(self) -> int:
        """How many slots the prefix has."""
        return self.n_chains * (self.links + 1)

    @property
    def vocabulary(self) -> Vocabulary:
        """BOS, a pointer at each slot, values."""
        return Vocabulary(["<s>", *(f">{i + 1}" for i in range(self.n_slots)), *(f"v{i}" for i in range(self.n_values))])

    @property
    def prefix_length(self) -> int:
        """How many tokens stand before the first question: they see each other."""
        return 1 + self.n_slots

    def sample(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """(tokens [batch pos], slots of each question's chain from the first to the value [batch question links+1])."""
        chains = 1 + distinct(size, self.n_slots, self.n_slots, generator).unflatten(1, (self.n_chains, self.links + 1))
        values = 1 + self.n_slots + torch.randint(self.n_values, (size, self.n_chains), generator=generator)
        tokens = torch.full((size, self.prefix_length), BOS)
        tokens.scatter_(1, chains[..., :-1].flatten(1), chains[..., 1:].flatten(1))
        tokens.scatter_(1, chains[..., -1], values)
        questions = torch.stack([chains[..., 0], values], -1).flatten(1)  # chains come in random order already
        return torch.cat([tokens, questions], 1), chains

    def _prefix(self, size: int) -> Tensor | None:
        return None if self.causal else torch.full((size,), self.prefix_length)

    def as_batch(self, tokens: Tensor, keep: Tensor | None = None) -> Batch:
        """Teacher forcing: at every question its answer is asked for (where `keep` [batch question])."""
        positions = self.prefix_length + 2 * torch.arange(self.n_chains)
        targets = tokens[:, positions + 1]
        if keep is not None:
            targets = torch.where(keep, targets, NOT_ASKED)
        inputs = Inputs(tokens[:, :-1], prefix_length=self._prefix(len(tokens)))
        return Batch(inputs, positions.expand(len(tokens), -1), targets)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Fresh prompts."""
        return self.as_batch(self.sample(size, stream(seed, step))[0])

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        tokens, chains = self.sample(2048, held_out())
        ahead = chains[..., -1] > chains[..., -2]
        return {"look_ahead": self.as_batch(tokens, ahead), "look_back": self.as_batch(tokens, ~ahead)}

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """2,048 fresh prompts, judged where the chain's last link points forward (`look_ahead`) and back (`look_back`)."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Over 99% of both."""
        return tuple(Goal(split, "accuracy", 0.99) for split in ("look_ahead", "look_back"))

    def pairs(self, n: int = 64, seed: int = 0) -> Pairs:
        """Prompts up to the first question, whose chain's last link points forward; the corrupted value is another one.

        Roles: `first`, `pointer` (the chain's first slot and the one before its value), `value` (the only difference), `final`
        (the question).
        """
        generator, kept, slots = held_out(1 + seed), [], []
        while sum(map(len, kept)) < n:
            tokens, chains = self.sample(4 * n, generator)
            ahead = chains[:, 0, -1] > chains[:, 0, -2]
            kept.append(tokens[ahead])
            slots.append(chains[ahead, 0])
        tokens, chain, rows = torch.cat(kept)[:n], torch.cat(slots)[:n], torch.arange(n)
        clean, correct = tokens[:, : self.prefix_length + 1], tokens[:, self.prefix_length + 1]
        first_value = 1 + self.n_slots
        shift = torch.randint(1, self.n_values, (n,), generator=generator)
        wrong = first_value + (correct - first_value + shift) % self.n_values
        corrupted = clean.clone()
        corrupted[rows, chain[:, -1]] = wrong
        roles = {"first": chain[:, 0], "pointer": chain[:, -2], "value": chain[:, -1],
                 "final": torch.full((n,), self.prefix_length)}  # fmt: skip
        inputs = [Inputs(tokens, prefix_length=self._prefix(n), roles=roles) for tokens in (clean, corrupted)]
        table = pd.DataFrame({"value": chain[:, -1], "answer": correct - first_value, "corrupted_answer": wrong - first_value})
        return Pairs(inputs[0], inputs[1], correct, wrong, table)

    def model_config(self, **changes: Any) -> ModelConfig:
        """A prefix decoder of two layers, d_model 64 (causal: a decoder)."""
        defaults: dict[str, Any] = {
            "kind": "decoder" if self.causal else "prefix-decoder", "vocab": len(self.vocabulary), "n_layers": 2, "n_heads": 4, "d_model": 64,
            "n_ctx": self.prefix_length + 2 * self.n_chains,
        }  # fmt: skip
        return ModelConfig(**{**defaults, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """How it is learned on two CPU cores; `changes` override."""
        defaults: dict[str, Any] = {"steps": 2000, "batch_size": 128, "learning_rate": 3e-3}
        return TrainConfig(**{**defaults, **changes})
