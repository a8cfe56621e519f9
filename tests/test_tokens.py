"""Any tokenizer object behind one small protocol; nothing is prepended."""

from __future__ import annotations

import pytest
import torch

from interp import Vocabulary, tokenize
from interp.tokens import TokenizerError, as_tokenizer, labels


class Special:
    """A tokenizer that adds a special token unless told not to, as transformers' do."""

    padding_side = "left"

    def encode(self, text, add_special_tokens=True):
        ids = [ord(c) - 96 for c in text]
        return [0, *ids] if add_special_tokens else ids

    def decode(self, ids, clean_up_tokenization_spaces=True):
        return "".join(chr(96 + i) for i in ids)


def test_vocabulary_round_trip_and_errors():
    words = Vocabulary(["a", "b", "c"])
    assert words.ids("c a") == [2, 0] and [words.text(i) for i in (2, 0)] == ["c", "a"] and len(words) == 3
    with pytest.raises(TokenizerError, match="'d' is not in the vocabulary of 3 words"):
        words.ids("a d")
    with pytest.raises(TokenizerError, match="listed twice: \\['a'\\]"):
        Vocabulary(["a", "b", "a"])


def test_nothing_is_added_and_the_tokenizer_is_left_alone():
    tokenizer = Special()
    before = dict(vars(tokenizer))
    assert tokenize("abc", tokenizer).tokens.tolist() == [[1, 2, 3]]
    assert tokenize("abc", tokenizer, prefix=[0, 0]).tokens.tolist() == [[0, 0, 1, 2, 3]]
    assert vars(tokenizer) == before and tokenizer.padding_side == "left"


def test_shorter_texts_are_padded_on_the_right_under_a_mask():
    got = tokenize(["abc", "a"], Special())
    assert got.tokens.tolist() == [[1, 2, 3], [1, 0, 0]]
    assert got.mask is not None and got.mask.tolist() == [[True] * 3, [True, False, False]]
    assert tokenize(["ab", "cd"], Special()).mask is None


def test_labels_and_refusals():
    assert labels(["x", "y"], torch.tensor([1, 0])) == ["y", "x"]
    assert labels(None, [3, 4]) == ["3", "4"] and labels(Special(), [1]) == ["a"]
    with pytest.raises(TokenizerError, match="int"):
        as_tokenizer(3)
    with pytest.raises(TokenizerError, match="no tokens"):
        tokenize([""], Special())
