"""The toy task "dyck": masked brackets of two kinds for an encoder, with the exact answer known.

Words are drawn uniformly from all balanced words of a length and a largest depth. Not every masked bracket can be
known (when both partners are masked, a guess is right half the time), so the exact posterior given the visible
brackets is computed by dynamic programming, and the model is judged where one answer is certain.
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

WORDS = ["(", "[", ")", "]", "<mask>"]  # kind = token % 2, opening below 2
MASK = 4


@dataclass(frozen=True)
class Dyck:
    """Words of even length `shortest` … `longest`, brackets nested at most `depth` deep; 15% of them masked (at least one).

    Training masks as BERT does: of the chosen positions 80% become <mask>, 10% another bracket, 10% stay. Judging masks all
    of them. Ground truth: `posterior` and `partner`.
    """

    shortest: int = 12
    longest: int = 24
    depth: int = 6
    share: float = 0.15
    name: Literal["dyck"] = "dyck"

    def __post_init__(self) -> None:
        if self.shortest % 2 or self.longest % 2 or not 2 <= self.shortest <= self.longest:
            raise TaskError(
                f"shortest={self.shortest}, longest={self.longest} are not allowed; allowed: even, 2 or more"
            )
        if not 1 <= self.depth <= 8 or not 0 < self.share < 1:
            raise TaskError(
                f"depth={self.depth}, share={self.share} are not allowed; allowed: 1 … 8, a share in (0, 1)"
            )

    @property
    def vocabulary(self) -> Vocabulary:
        """The four brackets and the mask."""
        return Vocabulary(WORDS)

    def words(self, lengths: Tensor, generator: torch.Generator, longest: int) -> tuple[Tensor, Tensor]:
        """Uniform balanced words of the given lengths [batch], padded on the right to `longest`, and each bracket's partner
        [batch pos]."""
        counts, size = self._counts(longest), len(lengths)
        tokens, partner = torch.zeros(2, size, longest, dtype=torch.long)
        depth, rows, places = torch.zeros(size, dtype=torch.long), torch.arange(size), torch.arange(longest)
        opened = torch.zeros(size, self.depth + 1, dtype=torch.long)  # position of the bracket open at each depth
        depths = torch.arange(self.depth + 1)
        for t in range(longest):
            left = (lengths - t).clamp(min=0)
            ways = counts[(left - 1).clamp(min=0), depth + 1] * 2 / counts[left, depth]
            opens = (torch.rand(size, generator=generator, dtype=torch.float64) < ways) & (left > 0)
            closes = ~opens & (left > 0)
            kind = torch.randint(2, (size,), generator=generator)
            start = opened[rows, (depth - 1).clamp(min=0)]
            tokens[:, t] = torch.where(opens, kind, torch.where(closes, tokens[rows, start] + 2, 0))
            partner[:, t] = torch.where(closes, start, t)
            partner = torch.where(closes[:, None] & (places == start[:, None]), t, partner)
            opened = torch.where(opens[:, None] & (depths == depth[:, None]), t, opened)
            depth = depth + opens.long() - closes.long()
        return tokens, partner

    def _counts(self, longest: int) -> Tensor:
        """[left depth]: how many ways to end balanced from a depth with so many brackets left (float64; depth+1 has none)."""
        counts = torch.zeros(longest + 1, self.depth + 2, dtype=torch.float64)
        counts[0, 0] = 1
        for left in range(1, longest + 1):
            counts[left, :-1] = 2 * counts[left - 1, 1:]
            counts[left, 1:-1] += counts[left - 1, :-2]
        return counts

    def posterior(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """P(bracket | everything visible) at every position [batch pos 4], over all words equally likely; exact.

        A stack of brackets is a number with a leading 1 and one bit per open bracket; forward and backward counts over
        stacks, as in a hidden Markov model.
        """
        size, length = tokens.shape
        n = 2 << self.depth
        stack = torch.arange(n)
        after = torch.stack([2 * stack, 2 * stack + 1, stack // 2, stack // 2])
        possible = torch.stack([2 * stack < n, 2 * stack < n, *((stack > 1) & (stack % 2 == kind) for kind in (0, 1))])
        possible[:, 0] = False  # no number
        allowed = (tokens[..., None] == torch.arange(4)) | (tokens[..., None] == MASK)
        forward, backward = torch.zeros(2, length + 1, size, n, dtype=torch.float64)
        forward[0, :, 1] = 1
        for t in range(length):
            step = torch.zeros_like(forward[0])
            for bracket in range(4):
                ok = possible[bracket]
                step.index_add_(1, after[bracket][ok], forward[t][:, ok] * allowed[:, t, bracket, None])
            forward[t + 1] = torch.where(mask[:, t, None], step, forward[t])  # padding leaves the stack as it is
        backward[length, :, 1] = 1
        result = torch.zeros(size, length, 4, dtype=torch.float64)
        for t in reversed(range(length)):
            for bracket in range(4):
                ok = possible[bracket]
                come = backward[t + 1][:, after[bracket][ok]] * allowed[:, t, bracket, None]
                backward[t][:, ok] += come
                result[:, t, bracket] = (forward[t][:, ok] * come).sum(1)
            backward[t] = torch.where(mask[:, t, None], backward[t], backward[t + 1])
        return result / result.sum(-1, keepdim=True)

    def sample(self, size: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
        """(words, mask of real positions, chosen positions), each [batch pos]."""
        lengths = 2 * torch.randint(self.shortest // 2, self.longest // 2 + 1, (size,), generator=generator)
        words, _ = self.words(lengths, generator, self.longest)
        mask = torch.arange(self.longest) < lengths[:, None]
        luck = torch.rand(size, self.longest, generator=generator).masked_fill(~mask, 2.0)
        chosen = (luck < self.share) | (luck == luck.amin(1, keepdim=True))  # at least one, or a word asks nothing
        return words, mask, chosen

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Fresh words; the original is asked for at the chosen positions, whatever was put there."""
        generator = stream(seed, step)
        words, mask, chosen = self.sample(size, generator)
        fate = torch.rand(words.shape, generator=generator)
        other = torch.randint(4, words.shape, generator=generator)
        shown = torch.where(chosen & (fate < 0.8), MASK, torch.where(chosen & (fate < 0.9), other, words))
        return _batch(shown, mask, torch.where(chosen, words, NOT_ASKED))

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        words, mask, chosen = self.sample(1024, held_out())
        shown = torch.where(chosen, MASK, words)
        certain = self.posterior(shown, mask).amax(-1) > 1 - 1e-9
        return {
            "certain": _batch(shown, mask, torch.where(chosen & certain, words, NOT_ASKED)),
            "masked": _batch(shown, mask, torch.where(chosen, words, NOT_ASKED)),
        }

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """1,024 fresh words. `certain`: asked where only one bracket fits; `masked`: asked at every masked position."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Over 95% of the masked brackets that can be known."""
        return (Goal("certain", "accuracy", 0.95),)

    @property
    def best_accuracy(self) -> float:
        """What the exact posterior's most likely bracket scores on `masked`: no model can expect more."""
        batch = self.evaluation["masked"]
        assert batch.inputs.mask is not None
        asked = batch.targets != NOT_ASKED
        return float(self.posterior(batch.inputs.tokens, batch.inputs.mask).amax(-1)[asked].mean())

    def pairs(self, n: int = 64, seed: int = 0, length: int = 20) -> Pairs:
        """Words with one masked closing bracket; in the corrupted word its partner is of the other kind.

        Roles: `partner` (the only difference), `masked` (where the answer is read).
        """
        if length % 2 or not 2 <= length <= self.longest:
            raise TaskError(f"length={length} is not allowed; allowed: even, 2 … {self.longest}")
        generator, rows = held_out(1 + seed), torch.arange(n)
        words, partner = self.words(torch.full((n,), length), generator, length)
        closing = words >= 2
        place = torch.where(closing, torch.rand(words.shape, generator=generator), -1.0).argmax(1)
        start = partner[rows, place]
        clean, correct = words.clone(), words[rows, place]
        clean[rows, place] = MASK
        corrupted = clean.clone()
        corrupted[rows, start] = 1 - clean[rows, start]
        roles = {"partner": start, "masked": place}
        table = pd.DataFrame({"partner": start, "masked": place, "answer": [WORDS[i] for i in correct]})
        wrong = 5 - correct  # the closing bracket of the other kind
        return Pairs(Inputs(clean, roles=roles), Inputs(corrupted, roles=roles), correct, wrong, table, "masked")

    def model_config(self, **changes: Any) -> ModelConfig:
        """An encoder of four layers, d_model 64, the textbook's block."""
        defaults: dict[str, Any] = {
            "kind": "encoder", "vocab": len(WORDS), "n_layers": 4, "n_heads": 4, "d_model": 64, "n_ctx": self.longest,
        }  # fmt: skip
        return ModelConfig(**{**defaults, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """How it is learned on two CPU cores; `changes` override."""
        defaults: dict[str, Any] = {"steps": 1000, "batch_size": 128, "learning_rate": 3e-3}
        return TrainConfig(**{**defaults, **changes})


def _batch(shown: Tensor, mask: Tensor, targets: Tensor) -> Batch:
    return Batch(Inputs(shown, mask=mask), torch.arange(shown.shape[1]).expand(shown.shape), targets)
