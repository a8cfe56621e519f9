"""A corpus in batches that a model can run: batches as they come, sentences grouped and padded, a recording's whole sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.activations import Activations
from interp.analyses.subupdates import FFNError
from interp.hookable import Hookable
from interp.model.inputs import Inputs
from interp.run import prepare
from interp.sites import Site
from interp.tokens import pad


def corpus_batches(
    model: Hookable, corpus: Any, batch_tokens: int, tokenizer: Any = None, prefix: Sequence[int] | None = None
) -> Iterator[Inputs]:
    """Checked inputs of about `batch_tokens` tokens each, padding included, in the corpus's order; see `corpus_triggers`."""
    if not isinstance(batch_tokens, int) or isinstance(batch_tokens, bool) or batch_tokens < 1:
        raise FFNError(f"batch_tokens={batch_tokens!r} is not allowed; allowed: an int from 1")
    waiting: list[list[int]] = []
    for part in _parts(corpus):
        sentence = _sentence(part)
        if sentence is not None:
            if waiting and max(len(sentence), *map(len, waiting)) * (len(waiting) + 1) > batch_tokens:
                yield prepare(model, pad(waiting))
                waiting = []
            waiting.append(sentence)
            continue
        if waiting:
            yield prepare(model, pad(waiting))
            waiting = []
        inputs = prepare(model, part, tokenizer, prefix)
        size = max(1, batch_tokens // inputs.length)
        for begin in range(0, inputs.batch, size):
            yield inputs.select(slice(begin, begin + size))
    if waiting:
        yield prepare(model, pad(waiting))


def _parts(corpus: Any) -> Iterable[Any]:
    """One batch as a list of one; an iterable of batches or sentences as it is."""
    if isinstance(corpus, Tensor | Inputs | str | np.ndarray):
        return [torch.as_tensor(corpus) if isinstance(corpus, np.ndarray) else corpus]
    if not isinstance(corpus, Iterable):
        raise FFNError(f"corpus is a {type(corpus).__name__}; allowed: Inputs, token ids [batch pos], text, Activations, or an "
                       "iterable of batches or of sentences")  # fmt: skip
    texts = isinstance(corpus, list | tuple) and bool(corpus) and isinstance(corpus[0], str | int)
    return [corpus] if texts else corpus


def _sentence(part: Any) -> list[int] | None:
    """A sentence's ids, None when the part is a batch."""
    if isinstance(part, Inputs | str) or (
        isinstance(part, list | tuple) and any(isinstance(one, str) for one in part[:1])
    ):
        return None
    array = part.cpu().numpy() if isinstance(part, Tensor) else np.asarray(part)
    if array.ndim == 2:
        return None
    if array.ndim != 1 or array.dtype.kind not in "iu" or not len(array):
        raise FFNError(f"a sentence must be ints [pos], at least one; got {array.dtype} {array.shape}")
    return array.tolist()


def recorded_batches(
    activations: Activations, sites: Sequence[Site], batch_tokens: int
) -> Iterator[tuple[Inputs, list[Tensor]]]:
    """Whole sentences of a recording, about `batch_tokens` rows at a time: their tokens, and each site's values [batch pos …].

    Positions that were not recorded are padding. KeyError for a site that was not recorded.
    """
    rows, begin, size = len(activations), 0, batch_tokens
    every = [activations[site] for site in sites]
    while begin < rows:
        end = min(begin + size, rows)
        about = activations.table(slice(begin, end))
        example = about["example"].to_numpy()
        if end < rows:  # the last sentence may go on in the next rows
            whole = int(np.searchsorted(example, example[-1]))
            if whole == 0:
                size *= 2
                continue
            end = begin + whole
            about, example = about.iloc[:whole], example[:whole]
        _, row = np.unique(example, return_inverse=True)
        place = torch.from_numpy(row), torch.tensor(about["position"].to_numpy())
        shape = (int(row.max()) + 1, int(place[1].max()) + 1)
        tokens, mask = torch.zeros(shape, dtype=torch.long), torch.zeros(shape, dtype=torch.bool)
        tokens[place], mask[place] = torch.tensor(about["token"].to_numpy()).long(), True
        values = []
        for site in every:
            read = site[begin:end]
            dense = read.new_zeros(*shape, *read.shape[1:])
            dense[place] = read
            values.append(dense)
        yield Inputs(tokens, mask=mask), values
        begin, size = end, batch_tokens
