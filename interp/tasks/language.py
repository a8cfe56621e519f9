"""The task "language": a small language model of Python, read from the running interpreter's standard library.

Always present, a few megabytes, and full of what small models learn: names that come again, brackets, idioms. Tokens are
byte pairs learned from the training files. Whole files are held out, so nothing of what is judged was read.
"""

from __future__ import annotations

import hashlib
import math
import os
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, get_args

import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from interp.model.config import ModelConfig
from interp.model.inputs import Inputs
from interp.record import cache_folder, write_atomic
from interp.tasks.task import Batch, Copies, Goal, Pairs, TaskError, distinct, held_out, stream
from interp.tasks.train_config import TrainConfig
from interp.tokens import HuggingFaceTokenizer

Size = Literal["small", "medium", "large"]
NOT_READ = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}
"""Folders that are other people's packages, tests with data, or tables written as Python."""

BOF = 0  # the token before each file's first


@dataclass(frozen=True)
class Language:
    """Windows of `context` tokens of the library's files, every next token asked for; `vocab` byte pairs, at most `limit` bytes.

    size: the default model and its training, 4 layers of d_model 64 or 128, or 6 of 256 (for a GPU). text: SHA-256 of what is
    read, which differs between Python versions; "" fills it in, any other must be the one here.
    """

    size: Size = "medium"
    vocab: int = 2048
    context: int = 128
    limit: int = 10_000_000
    text: str = ""
    name: Literal["language"] = "language"

    def __post_init__(self) -> None:
        if self.size not in get_args(Size):
            raise TaskError(f"size={self.size!r} is not allowed; allowed: {', '.join(map(repr, get_args(Size)))}")
        if not 257 <= self.vocab <= 32768:
            raise TaskError(f"vocab={self.vocab} is not allowed; allowed: 257 (every byte, none joined) … 32768")
        if not 8 <= self.context <= 4096:
            raise TaskError(f"context={self.context} is not allowed; allowed: 8 … 4096")
        if self.limit < 500_000:
            raise TaskError(f"limit={self.limit} is not allowed; allowed: 500000 bytes or more")
        found = _digest(self.limit)
        if self.text not in ("", found):
            raise TaskError(f"text={self.text!r} is not allowed; allowed: {found!r}, this Python's library up to {self.limit} "
                            "bytes")  # fmt: skip
        object.__setattr__(self, "text", found)

    @cached_property
    def _stored(self) -> tuple[dict[str, Tensor], dict[str, str]]:
        """Tokens of `train` and `held_out` [n] (int16), and the tokenizer; learned and cut once, then read from the cache."""
        key = hashlib.sha256(f"1 {self.text} {self.vocab}".encode()).hexdigest()[:16]
        path = cache_folder() / f"language-{key}.safetensors"
        try:
            tensors, about = _read(path)
        except (FileNotFoundError, SafetensorError):  # none yet, or a damaged one
            tensors, about = _cut(self.vocab, self.limit)
            write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata=about))
        shortest = min(map(len, tensors.values()))
        if shortest <= self.context:
            raise TaskError(f"context={self.context} is not allowed; allowed: below the {shortest} tokens of a split")
        return tensors, about

    @property
    def tokens(self) -> Mapping[str, Tensor]:
        """Every token of the files of `train` and of `held_out` [n], file after file, each behind a `<|file|>`."""
        return self._stored[0]

    @cached_property
    def _copies(self) -> Mapping[str, Copies[Tensor]]:
        return {split: Copies(tokens) for split, tokens in self.tokens.items()}

    @property
    def vocabulary(self) -> BytePairs:
        """The tokenizer. Raises ImportError, naming the extra, where `tokenizers` is not installed."""
        return BytePairs(_tokenizers().Tokenizer.from_str(self._stored[1]["tokenizer"]))

    def bits_per_byte(self, nats: float) -> float:
        """Nats per token of the held-out files as bits per byte, which can be compared between vocabularies."""
        return nats / math.log(2) * len(self.tokens["held_out"]) / int(self._stored[1]["held_out_bytes"])

    def windows(self, split: Literal["train", "held_out"], starts: Tensor) -> Batch:
        """The windows of a split that begin at `starts` [batch]: tokens [batch context], the next token at each asked for."""
        place = torch.arange(self.context + 1, device=starts.device)
        rows = self._copies[split].on(starts.device)[starts[:, None] + place].long()
        positions = place[:-1].expand(len(starts), -1)
        return Batch(Inputs(rows[:, :-1]), positions, rows[:, 1:])

    def batch(self, step: int, size: int, seed: int) -> Batch:
        """Windows anywhere in the training files."""
        last = len(self.tokens["train"]) - self.context
        return self.windows("train", torch.randint(last, (size,), generator=stream(seed, step)))

    @cached_property
    def _evaluation(self) -> dict[str, Batch]:
        last = len(self.tokens["held_out"]) - self.context - 1
        n = min(256, 1 + last // self.context)
        return {"held_out": self.windows("held_out", torch.arange(n) * (last // max(1, n - 1)))}

    @property
    def evaluation(self) -> Mapping[str, Batch]:
        """`held_out`: 256 windows at equal distances through files that no training batch reads (fewer if they would overlap)."""
        return self._evaluation

    @property
    def goals(self) -> tuple[Goal, ...]:
        """Nats per token of the held-out files: measured for the small size, a mark to pass for the others."""
        return (Goal("held_out", "nats", {"small": 4.25, "medium": 3.7, "large": 3.5}[self.size]),)

    def pairs(self, n: int = 64, seed: int = 0, length: int = 16, at: int = 8) -> Pairs:
        """`<|file|>`, `length` different random tokens, and their start again up to token `at` (from 0).

        What follows is known from the first copy alone, never by heart; in the corrupted first copy another token stands
        there. Roles: `first` (token `at` in the first copy), `after` (what follows it there: the only difference), `final`
        (the token again, where the next is predicted).
        """
        if not (length >= 2 and 0 <= at < length - 1 and length + at + 2 <= self.context):
            raise TaskError(f"length={length}, at={at} are not allowed; allowed: 0 <= at < length-1, together below "
                            f"context-1={self.context - 1}")  # fmt: skip
        known = torch.arange(1, self.vocab)
        tokens = known[distinct(n, length + 1, len(known), held_out(1 + seed))]
        r, other = tokens[:, :length], tokens[:, length]
        clean = torch.cat([torch.full((n, 1), BOF), r, r[:, : at + 1]], 1)
        corrupted = clean.clone()
        corrupted[:, at + 2] = other
        place = {"first": at + 1, "after": at + 2, "final": clean.shape[1] - 1}
        roles = {name: torch.full((n,), position) for name, position in place.items()}
        table = pd.DataFrame({"token": r[:, at], "answer": r[:, at + 1], "corrupted_answer": other})
        return Pairs(Inputs(clean, roles=roles), Inputs(corrupted, roles=roles), r[:, at + 1], other, table)

    def model_config(self, **changes: Any) -> ModelConfig:
        """The textbook's pre-norm block with RMSNorm, SwiGLU and rotary positions, as large as `size` says."""
        layers, d_model, heads = {"small": (4, 64, 4), "medium": (4, 128, 4), "large": (6, 256, 8)}[self.size]
        defaults: dict[str, Any] = {
            "vocab": self.vocab, "n_layers": layers, "n_heads": heads, "d_model": d_model, "n_ctx": self.context,
            "norm": "rmsnorm", "ffn": "swiglu", "positions": "rotary", "bias": False,
        }  # fmt: skip
        return ModelConfig(**{**defaults, **changes})

    def train_config(self, **changes: Any) -> TrainConfig:
        """How the size is trained; the loss is still falling at the end. `changes` override."""
        steps, batch_size, rate = {
            "small": (500, 16, 6e-3), "medium": (2000, 32, 3e-3), "large": (3000, 32, 2e-3),
        }[self.size]  # fmt: skip
        defaults: dict[str, Any] = {
            "steps": steps, "batch_size": batch_size, "learning_rate": rate, "weight_decay": 0.1, "evaluate_every": 250,
        }  # fmt: skip
        return TrainConfig(**{**defaults, **changes})


class BytePairs(HuggingFaceTokenizer):
    """A byte-pair tokenizer of the package `tokenizers`; nothing is added, and any text comes back as it was."""

    def __len__(self) -> int:
        return self.tokenizer.get_vocab_size()

    def ids(self, text: str) -> list[int]:
        """Token ids, nothing added."""
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def text(self, token: int) -> str:
        """The decoded token (may be part of a character)."""
        return self.tokenizer.decode([token], skip_special_tokens=False)


@cache
def library(limit: int = 10_000_000) -> Mapping[str, str]:
    """The standard library's own modules, path -> text, in an order that the paths' hashes give; `limit` bytes at most.

    Left out: `NOT_READ`, what a build writes, empty files, and files that are no UTF-8 or equal to an earlier one.
    """
    root, paths = Path(sysconfig.get_path("stdlib")), []
    for folder, inside, names in os.walk(root):
        inside[:] = [name for name in inside if name not in NOT_READ and not name.startswith("config-")]
        paths += [(Path(folder) / name).relative_to(root).as_posix() for name in names if name.endswith(".py")]
    found: dict[str, str] = {}
    size = 0
    for path in sorted(paths, key=_hash):
        if path.startswith("_sysconfigdata"):
            continue
        data = (root / path).read_bytes()
        try:
            text = data.decode()
        except UnicodeDecodeError:
            continue
        if not text.strip() or text in found.values():
            continue
        size += len(data)
        if size > limit:
            break
        found[path] = text
    return found


def is_held_out(path: str) -> bool:
    """Whether a file of the library is for judging: one in twenty, by its path's hash alone, so alike in every version."""
    return int(_hash(path)[:8], 16) % 20 == 0


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


@cache
def _digest(limit: int) -> str:
    """SHA-256 of the library's paths and texts."""
    return _hash("\0".join(part for item in library(limit).items() for part in item))


def _cut(vocab: int, limit: int) -> tuple[dict[str, Tensor], dict[str, str]]:
    """A tokenizer learned from the training files, and every file cut by it: tokens by split, and what to know of them."""
    tokenizers = _tokenizers()
    files = library(limit)
    texts = {"train": [text for path, text in files.items() if not is_held_out(path)],
             "held_out": [text for path, text in files.items() if is_held_out(path)]}  # fmt: skip
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab, special_tokens=["<|file|>"], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts["train"], trainer)
    tensors = {
        split: torch.tensor(
            [token for code in tokenizer.encode_batch(parts) for token in (BOF, *code.ids)],
            dtype=torch.int16,
            device="cpu",
        )
        for split, parts in texts.items()
    }
    size = sum(len(text.encode()) for text in texts["held_out"])
    return tensors, {"tokenizer": tokenizer.to_str(), "held_out_bytes": str(size)}


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in ("train", "held_out")}, file.metadata()


def _tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ImportError("this needs tokenizers, which is not installed: pip install 'interp[hf]'") from error
    return tokenizers
