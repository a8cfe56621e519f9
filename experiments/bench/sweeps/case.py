"""What is swept: one model in two libraries, pairs of prompts, and what its peers are compared by."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import Tensor

import interp
from interp.bridges import from_huggingface, to_huggingface
from interp.report.real import choose
from sweeps.floor import Shape, shape_of

AXES = {"resid_pre": ("layer", "position"), "z": ("layer", "position", "head")}


@dataclass(frozen=True)
class Case:
    """Row i of clean and corrupted are a pair; correct, wrong: the two entries [batch] of the metric at the last position."""

    name: str
    ours: Any
    theirs: Any
    clean: Tensor
    corrupted: Tensor
    correct: Tensor
    wrong: Tensor
    site: str = "resid_pre"

    @property
    def grid(self) -> tuple[int, ...]:
        """Sizes of the swept axes."""
        config = self.ours.config
        sizes = {"layer": config.n_layers, "position": self.clean.shape[1], "head": config.n_heads}
        return tuple(sizes[axis] for axis in AXES[self.site])

    @property
    def cells(self) -> list[tuple[int, ...]]:
        """Every cell, the last axis fastest."""
        return list(itertools.product(*map(range, self.grid)))

    @property
    def first(self) -> int:
        """The first position at which any pair differs."""
        return self.shape.first

    @property
    def shape(self) -> Shape:
        """For the floor."""
        prompts, length = self.clean.shape
        changed = (self.clean != self.corrupted).any(0).nonzero()[:, 0].tolist()
        return shape_of(self.ours.config, prompts, length, tuple(changed))

    def metric(self, logits: Tensor) -> Tensor:
        """Logit difference at the last position [batch], as peers are given it: of logits [batch pos vocab]."""
        rows = torch.arange(len(logits))
        return logits[rows, -1, self.correct] - logits[rows, -1, self.wrong]


@dataclass(frozen=True)
class Lap:
    """One turn of a contender: seconds of a whole sweep (scaled up where only some cells ran), and what it found."""

    seconds: float
    values: Tensor | None = None
    """[cells it ran, example]"""
    work: dict[str, int] = field(default_factory=dict)


@dataclass
class Contender:
    """One way to do the sweep. ran: indices of the cells its laps run, in order; None = all."""

    name: str
    lap: Callable[[], Lap]
    warm: Callable[[], object]
    ran: Sequence[int] | None = None
    note: str = ""
    laps: list[Lap] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Median over laps."""
        return statistics.median(lap.seconds for lap in self.laps)


def alternate(contenders: Sequence[Contender], repeats: int) -> None:
    """Warm every contender up, then let them take turns."""
    for contender in contenders:
        contender.warm()
    for _ in range(repeats):
        for contender in contenders:
            contender.laps.append(contender.lap())


def timed(function: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds, and what it returned."""
    began = time.perf_counter()
    found = function()
    return time.perf_counter() - began, found


def spread(n: int, of: int) -> list[int]:
    """n of the numbers below `of`, one drawn from each of n equal stretches."""
    if n >= of:
        return list(range(of))
    generator = torch.Generator().manual_seed(0)
    places = (torch.arange(n) + torch.rand(n, generator=generator)) * of / n
    return places.long().tolist()


def gpt2_case(name: str, *, layers: int, width: int, heads: int, vocab: int, prompts: int, length: int,
              site: str = "resid_pre") -> Case:  # fmt: skip
    """GPT-2's architecture with random weights; pairs of random prompts that differ in the token in the middle.

    Weights are drawn wider than GPT-2's own start, norms and biases are not 1 and 0: at GPT-2's start attention is almost
    uniform and a patch hardly moves the metric.
    """
    generator = torch.Generator().manual_seed(0)
    config = transformers.GPT2Config(n_embd=width, n_layer=layers, n_head=heads, vocab_size=vocab, n_positions=1024,
                                     bos_token_id=0, eos_token_id=0)  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for one in theirs.parameters():
            noise = torch.randn(one.shape, generator=generator)
            one.copy_(noise * 1.2 / width**0.5 if one.ndim == 2 else one + 0.1 * noise)
    clean = torch.randint(0, vocab, (prompts, length), generator=generator)
    corrupted = clean.clone()
    corrupted[:, length // 2] = (
        clean[:, length // 2] + torch.randint(1, vocab, (prompts,), generator=generator)
    ) % vocab
    correct = torch.randint(0, vocab, (prompts,), generator=generator)
    return Case(name, from_huggingface(theirs), theirs, clean, corrupted, correct, (correct + 1) % vocab, site)


def smollm2_case(prompts: int) -> Case:
    """SmolLM2-135M on facts it knows ("The capital city of … is called"), pairs of equal length."""
    model, tokenizer = interp.smollm2()
    pairs = choose(tokenizer, prompts).pairs
    assert pairs.clean.mask is None and pairs.position == -1  # so that every library may read the last position
    tokens = pairs.clean.tokens, pairs.corrupted.tokens
    return Case("SmolLM2-135M", model, to_huggingface(model), *tokens, pairs.correct, pairs.wrong)
