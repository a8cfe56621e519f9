"""The toy task "lookahead" (SCIENCE T7): a prefix of key-value pairs with questions among them, answered after it.

A question asks for the value of a key. Where its pair stands later in the prefix (look-ahead), only attention that
sees the whole prefix can put the answer at the question; a causal decoder has to start over at the end.
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

BOS, QUESTION, ANSWER, FIRST = 0, 1, 2, 3


@dataclass(frozen=True)
class Lookahead:
    """BOS, then `n_pairs` pairs "key value" and `n_questions` questions "? key" in random order, then "=" and the answers.

    The prefix is everything before "=". Ground truth: the answers, in the order of the questions. causal: the control, the
    same prompts for a causal decoder.
    """

    n_pairs: int = 6
    n_questions: int = 2
    n_keys: int = 16
    n_values: int = 16
    causal: bool = False
    name: Literal["lookahead"] = "lookahead"

    def __post_init__(self) -> None:
        if not 1 <= self.n_questions <= self.n_pairs <= self.n_keys or self.n_values < 2:
            raise TaskError(f"n_questions={self.n_questions}, n_pairs={self.n_pairs}, n_values={self.n_values} are not allowed; "
                            f"allowed: 1 <= n_questions <= n_pairs <= n_keys={self.n_keys}, 2 or more values")  # fmt: skip

    @property
    def vocabulary(self) -> Vocabulary:
        """BOS, "?", "=", keys, values."""
        keys, values = ([f"{letter}{i}" for i in range(n)] for letter, n in (("k", self.n_keys), ("v", self.n_values)))
        return Vocabulary(["<s>", "?", "=", *keys, *values])

    @property
    def prefix_length(self) -> int:
        """How many tokens stand before "="."""
        return 1 + 2 * (self.n_pairs + self.n_questions)

    def sample(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """(tokens [batch pos] from BOS to the last answer, answers [batch question], look-ahead? [batch question])."""
        keys = FIRST + distinct(size, self.n_pairs, self.n_keys, generator)
        values = FIRST + self.n_keys + torch.randint(self.n_values, keys.shape, generator=generator)
        asked = distinct(size, self.n_questions, self.n_pairs, generator)  # which pair each question means
        question = torch.stack([torch.full_like(asked, QUESTION), keys.gather(1, asked)], -1)
        entries = torch.cat([torch.stack([keys, values], -1), question], 1)  # [batch entry 2]
        order = distinct(size, entries.shape[1], entries.shape[1], generator)
        place = order.argsort(1)  # where each entry went
        # Answers come in the order in which the questions stand.
        turn = place[:, self.n_pairs :].argsort(1)
        answers = values.gather(1, asked).gather(1, turn)
        ahead = (place.gather(1, asked) > place[:, self.n_pairs :]).gather(1, turn)
        prefix = entries.gather(1, order[..., None].expand(-1, -1, 2)).flatten(1)
        column = torch.full((size, 1), BOS)
        return torch.cat([column, prefix, column + ANSWER, answers], 1), answers, ahead

    def _prefix(self, size: int) -> Tensor | None:
        return None if self.causal else torch.full((size,), self.prefix_length)

    def as_batch(self, tokens: Tensor, answers: Tensor) -> Batch:
        """Teacher forcing: the answers are asked for from "=" on."""
        inputs = Inputs(tokens[:, :-1], prefix_length=self._prefix(len(tokens)))
        return Batch(inputs, (self.prefix_length + torch.arange(self.n_questions)).expand(len(tokens), -1), answers)

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Fresh prompts."""
        return self.as_batch(*self.sample(size, stream(seed, step))[:2])

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        tokens, answers, ahead = self.sample(2048, held_out())
        return {
            "look_ahead": self.as_batch(tokens, torch.where(ahead, answers, NOT_ASKED)),
            "look_back": self.as_batch(tokens, torch.where(ahead, NOT_ASKED, answers)),
        }

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """2,048 fresh prompts, judged on the questions that stand before (`look_ahead`) and after their pair (`look_back`)."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Over 99% of both."""
        return tuple(Goal(split, "accuracy", 0.99) for split in ("look_ahead", "look_back"))

    def pairs(self, n: int = 64, seed: int = 0) -> Pairs:
        """Prompts up to "=" whose first question looks ahead; the corrupted one has another value in the pair it means.

        Roles: `question` (the key asked for), `key`, `value` (the pair; the value is the only difference), `final` ("=").
        """
        generator, kept, answers = held_out(1 + seed), [], []
        while sum(map(len, kept)) < n:
            tokens, answer, ahead = self.sample(4 * n, generator)
            kept.append(tokens[ahead[:, 0]])
            answers.append(answer[ahead[:, 0]])
        clean, correct = torch.cat(kept)[:n, : self.prefix_length + 1], torch.cat(answers)[:n, 0]
        question = (clean == QUESTION).long().argmax(1) + 1
        rows = torch.arange(n)
        same_key = clean == clean[rows, question][:, None]
        same_key[rows, question] = False
        key = same_key.long().argmax(1)
        shift = torch.randint(1, self.n_values, (n,), generator=generator)
        first_value = FIRST + self.n_keys
        wrong = first_value + (correct - first_value + shift) % self.n_values
        corrupted = clean.clone()
        corrupted[rows, key + 1] = wrong
        final = torch.full((n,), self.prefix_length)
        roles = {"question": question, "key": key, "value": key + 1, "final": final}
        inputs = [Inputs(tokens, prefix_length=self._prefix(n), roles=roles) for tokens in (clean, corrupted)]
        table = pd.DataFrame({"question": question, "key": key, "answer": correct - first_value})
        return Pairs(inputs[0], inputs[1], correct, wrong, table)

    def model_config(self, **changes: Any) -> ModelConfig:
        """A prefix decoder of three layers, d_model 64 (causal: a decoder)."""
        defaults: dict[str, Any] = {
            "kind": "decoder" if self.causal else "prefix-decoder", "vocab": len(self.vocabulary), "n_layers": 3, "n_heads": 4, "d_model": 64,
            "n_ctx": self.prefix_length + 1 + self.n_questions,
        }  # fmt: skip
        return ModelConfig(**{**defaults, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """How it is learned on two CPU cores; `changes` override."""
        defaults: dict[str, Any] = {"steps": 3000, "batch_size": 256, "learning_rate": 2e-3}
        return TrainConfig(**{**defaults, **changes})
