"""Text and token ids as TransformerLens's methods name them, over any tokenizer that `interp.tokens` reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.model.inputs import Inputs, InputsError
from interp.model.transformer import Transformer
from interp.run import prepare
from interp.tokens import HuggingFaceTokenizer, Tokenizer, TokenizerError, as_tokenizer


class LensText:
    """Nothing is prepended unless `prepend_bos=True`, or `cfg.default_prepend_bos` is set, which it is not by default."""

    model: Transformer
    tokenizer: Any
    cfg: Any  # a LensConfig; Any, so that type checkers take it for TransformerLens's own

    def as_inputs(
        self, input: Any, attention_mask: Tensor | None, prepend_bos: bool | None, side: str | None
    ) -> Inputs:
        """Ids [batch pos], an array, text, texts or Inputs, checked against the model. Raises InputsError, TokenizerError."""
        if isinstance(input, str) or (isinstance(input, list | tuple) and input and isinstance(input[0], str)):
            input = self._text_inputs(input, prepend_bos, side)
        elif not isinstance(input, Inputs | Tensor | list | tuple):
            input = torch.as_tensor(input)  # an array
        if attention_mask is not None:
            given = input if isinstance(input, Inputs) else Inputs(torch.atleast_2d(torch.as_tensor(input)))
            input = replace(given, mask=torch.atleast_2d(torch.as_tensor(attention_mask)).bool())
        return prepare(self.model, input)

    def _reader(self) -> Tokenizer:
        if self.tokenizer is None:
            raise TokenizerError("text needs a tokenizer: to_transformer_lens(model, tokenizer), or pass token ids")
        return as_tokenizer(self.tokenizer)

    def _special(self, name: str) -> int | None:
        return getattr(self.tokenizer, f"{name}_token_id", None)

    def _prefix(self, prepend_bos: bool | None) -> list[int]:
        """The ids before every text: none, or BOS."""
        if not (self.cfg.default_prepend_bos if prepend_bos is None else prepend_bos):
            return []
        bos = self._special("bos")
        if bos is None:
            raise TokenizerError(
                "prepend_bos=True, but the tokenizer has no bos_token_id; allowed: False, or token ids"
            )
        return [bos]

    def _text_inputs(self, texts: Any, prepend_bos: bool | None, padding_side: str | None) -> Inputs:
        """Token ids of one or more texts, shorter ones padded and masked."""
        side = padding_side or "right"
        if side not in ("left", "right"):
            raise InputsError(f"padding_side={padding_side!r} is not allowed; allowed: 'right', 'left', None (right)")
        reader, prefix = self._reader(), self._prefix(prepend_bos)
        rows = [prefix + reader.ids(text) for text in ([texts] if isinstance(texts, str) else texts)]
        if not rows or min(map(len, rows)) == 0:
            raise TokenizerError(f"a text without any token cannot be run: {texts!r}")
        length = max(map(len, rows))
        fill, mask = self._special("pad") or 0, torch.zeros(len(rows), length, dtype=torch.bool)
        tokens = torch.full((len(rows), length), fill)
        for number, row in enumerate(rows):
            where = slice(length - len(row), None) if side == "left" else slice(len(row))
            tokens[number, where], mask[number, where] = torch.tensor(row), True
        return Inputs(tokens, mask=None if bool(mask.all()) else mask)

    def to_tokens(
        self,
        input: str | Sequence[str],
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
        move_to_device: bool = True,
        truncate: bool = False,
    ) -> Tensor:
        """Token ids [batch pos]; nothing is cut off unless `truncate` (TransformerLens cuts by default).

        padding_side: "right" (default) or "left". A padded result carries no mask: pass attention_mask= when you run it,
        or run the texts themselves. TokenizerError without a tokenizer.
        """
        tokens = self._text_inputs(input, prepend_bos, padding_side).tokens
        tokens = tokens[:, : self.cfg.n_ctx] if truncate else tokens
        return tokens.to(self.cfg.device) if move_to_device else tokens

    def to_string(self, tokens: Any) -> str | list[str]:
        """The text of ids [pos] or one id; a list of texts of ids [batch pos]."""
        tokens = torch.as_tensor(tokens)
        if tokens.ndim > 2:
            raise InputsError(f"tokens must have axes [batch pos] or [pos], got shape {tuple(tokens.shape)}")
        if tokens.ndim == 2:
            return [self._joined(row.tolist()) for row in tokens]
        return self._joined(tokens.reshape(-1).tolist())

    def _joined(self, ids: list[int]) -> str:
        reader = self._reader()
        if isinstance(reader, HuggingFaceTokenizer):  # a character may be spread over several tokens
            return reader.tokenizer.decode(ids, clean_up_tokenization_spaces=False)
        return " ".join(reader.text(i) for i in ids)

    def to_str_tokens(self, input: Any, prepend_bos: bool | None = None, padding_side: str | None = None) -> Any:
        """The printed form of each token of a text or of ids [pos] or [1 pos]; a list gives a list of such lists."""
        if isinstance(input, list) and not (input and isinstance(input[0], int)):
            return [self.to_str_tokens(one, prepend_bos, padding_side) for one in input]
        if isinstance(input, str):
            input = self.to_tokens(input, prepend_bos, padding_side)
        tokens = torch.as_tensor(np.asarray(input) if isinstance(input, list) else input)
        if tokens.ndim == 2 and tokens.shape[0] == 1:
            tokens = tokens[0]
        if tokens.ndim > 1:
            raise InputsError(
                f"one sequence at a time: tokens must be [pos] or [1 pos], got shape {tuple(tokens.shape)}"
            )
        reader = self._reader()
        return [reader.text(i) for i in tokens.reshape(-1).tolist()]

    def to_single_token(self, string: str) -> int:
        """The id of a text that is one token. TokenizerError naming the tokens otherwise."""
        ids = self._reader().ids(string)
        if len(ids) != 1:
            raise TokenizerError(
                f"{string!r} is {len(ids)} tokens: {[self._reader().text(i) for i in ids]}; allowed: one"
            )
        return ids[0]

    def to_single_str_token(self, int_token: int) -> str:
        """The printed form of one id."""
        return self._reader().text(int(int_token))

    def get_token_position(
        self,
        single_token: str | int,
        input: str | Tensor,
        mode: str = "first",
        prepend_bos: bool | None = None,
        padding_side: str | None = None,
    ) -> int:
        """Where a token stands in a text or in ids [pos] or [1 pos]; mode "first" or "last". TokenizerError if nowhere."""
        if mode not in ("first", "last"):
            raise ValueError(f"mode={mode!r} is not allowed; allowed: 'first', 'last'")
        tokens = self.to_tokens(input, prepend_bos, padding_side) if isinstance(input, str) else input
        if tokens.ndim == 2 and tokens.shape[0] != 1:
            raise InputsError(
                f"one sequence at a time: tokens must be [pos] or [1 pos], got shape {tuple(tokens.shape)}"
            )
        token = self.to_single_token(single_token) if isinstance(single_token, str) else int(single_token)
        found = (tokens.reshape(-1) == token).nonzero()[:, 0].tolist()
        if not found:
            raise TokenizerError(f"token {single_token!r} does not occur in {tokens.reshape(-1).tolist()}")
        return found[0 if mode == "first" else -1]
