"""What an analysis needs of a tokenizer, over any Hugging Face tokenizer object or a plain toy vocabulary.

Nothing is ever prepended silently: `prefix` is a list of token ids that the caller writes out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from interp.model.inputs import Inputs


class TokenizerError(ValueError):
    """Text that the tokenizer cannot represent, or an object that is no tokenizer."""


@runtime_checkable
class Tokenizer(Protocol):
    """Text to ids and back, no special tokens added."""

    def ids(self, text: str) -> list[int]:
        """Token ids of `text`, nothing added."""
        ...

    def text(self, token: int) -> str:
        """The string of one token, as a person would print it."""
        ...


class Vocabulary:
    """A toy tokenizer: the words of a list, separated by spaces; id = index."""

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self._index = {word: i for i, word in enumerate(self.words)}
        if len(self._index) != len(self.words):
            twice = sorted({word for word in self.words if self.words.count(word) > 1})
            raise TokenizerError(f"a vocabulary's words must differ; listed twice: {twice[:5]}")

    def __len__(self) -> int:
        return len(self.words)

    def ids(self, text: str) -> list[int]:
        """Token ids of the space-separated words. TokenizerError for a word outside the vocabulary."""
        unknown = [word for word in text.split() if word not in self._index]
        if unknown:
            raise TokenizerError(f"{unknown[0]!r} is not in the vocabulary of {len(self)} words, e.g. {self.words[:4]}")
        return [self._index[word] for word in text.split()]

    def text(self, token: int) -> str:
        """The word with this id."""
        return self.words[token]


class HuggingFaceTokenizer:
    """Any transformers tokenizer object (slow or fast), read only: nothing about it is set or rebuilt."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer

    def ids(self, text: str) -> list[int]:
        """Token ids without special tokens."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def text(self, token: int) -> str:
        """The decoded token (may be part of a character)."""
        return self.tokenizer.decode([token], clean_up_tokenization_spaces=False)


def as_tokenizer(tokenizer: Any) -> Tokenizer:
    """Ours as it is, a transformers tokenizer wrapped, a list of words as a Vocabulary."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if isinstance(tokenizer, list | tuple):
        return Vocabulary(tokenizer)
    if hasattr(tokenizer, "encode") and hasattr(tokenizer, "decode"):
        return HuggingFaceTokenizer(tokenizer)
    raise TokenizerError(
        f"tokenizer must be a transformers tokenizer, a Vocabulary or a list of words, got {type(tokenizer).__name__}"
    )


def tokenize(texts: str | Sequence[str], tokenizer: Any, prefix: Sequence[int] | None = None) -> Inputs:
    """Inputs from text: `prefix` ids (none unless given) before each text, shorter texts padded on the right."""
    tokenizer = as_tokenizer(tokenizer)
    texts = [texts] if isinstance(texts, str) else list(texts)
    rows = [[*(prefix or ()), *tokenizer.ids(text)] for text in texts]
    empty = [text for text, row in zip(texts, rows, strict=True) if not row]
    if empty or not rows:
        raise TokenizerError(f"nothing to run: {empty[:1] or texts!r} has no tokens and no prefix was given")
    return pad(rows)


def pad(rows: Sequence[Sequence[int]]) -> Inputs:
    """Inputs from rows of token ids, padded on the right with a mask where lengths differ (id 0 under the mask)."""
    length = max(map(len, rows))
    tokens = torch.tensor([[*row, *[0] * (length - len(row))] for row in rows])
    if all(len(row) == length for row in rows):
        return Inputs(tokens)
    mask = torch.arange(length)[None] < torch.tensor([len(row) for row in rows])[:, None]
    return Inputs(tokens, mask=mask)


def labels(tokenizer: Any, tokens: Tensor | Sequence[int]) -> list[str]:
    """The printed form of each token id, for axes and tables; ids when there is no tokenizer."""
    ids = tokens.tolist() if isinstance(tokens, Tensor) else list(tokens)
    if tokenizer is None:
        return [str(i) for i in ids]
    tokenizer = as_tokenizer(tokenizer)
    return [tokenizer.text(i) for i in ids]
