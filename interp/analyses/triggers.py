"""What sets off every neuron of every layer, over a corpus that never is in memory: running best, batch by batch (Geva 2021)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from interp.activations import Activations
from interp.analyses.corpus_batches import corpus_batches, recorded_batches
from interp.analyses.ffn_memory import TRIGGER_COLUMNS, NeuronError, chosen_neurons, joined, signs_of
from interp.analyses.subupdates import FFNError, ffn_layers
from interp.hookable import Hookable
from interp.model.inputs import Inputs
from interp.record import write_atomic
from interp.run import check_weights
from interp.sites import Site
from interp.tokens import labels

_TENSORS = ("coefficient", "example", "position", "token", "next_token", "next_counts")


@dataclass(frozen=True, eq=False)
class Triggers:
    """The strongest coefficients of every neuron over a corpus, one per sentence: tensors [layer sign neuron k], strongest first.

    coefficient (signed; 0 where fewer than k sentences fire the neuron with that sign), example (number in the corpus, −1
    there), position (in the batch as given), token, next_token (−1 where no real token follows). `layers` and `signs` name the
    first two axes. sentences: token ids of every sentence listed, first to last real one, and the position of the first.
    next_counts [vocab]: how often each token follows a position read. examples, positions: how many were read.
    """

    layers: tuple[int, ...]
    signs: tuple[int, ...]
    coefficient: Tensor
    example: Tensor
    position: Tensor
    token: Tensor
    next_token: Tensor
    sentences: Mapping[int, tuple[tuple[int, ...], int]]
    next_counts: Tensor
    examples: int
    positions: int

    def __repr__(self) -> str:
        layers, signs, neurons, k = self.coefficient.shape
        return (f"Triggers(top {k} of {self.examples:,} sentences ({self.positions:,} positions) for {neurons:,} neurons of "
                f"{layers} layer(s), {signs} sign(s))")  # fmt: skip

    def save(self, path: str | Path) -> Path:
        """One safetensors file, whole or absent; an hour of text need not be read twice."""
        tensors = {name: getattr(self, name).contiguous() for name in _TENSORS}
        tensors["sentence"] = torch.tensor(list(self.sentences), dtype=torch.long)
        tensors["first"] = torch.tensor([first for _, first in self.sentences.values()], dtype=torch.long)
        tensors["length"] = torch.tensor([len(ids) for ids, _ in self.sentences.values()], dtype=torch.long)
        tensors["ids"] = torch.tensor([one for ids, _ in self.sentences.values() for one in ids], dtype=torch.long)
        about = {name: getattr(self, name) for name in ("layers", "signs", "examples", "positions")}
        return write_atomic(path, lambda to: save_file(tensors, to, metadata={"triggers": json.dumps(about)}))

    @classmethod
    def load(cls, path: str | Path) -> Triggers:
        """What `save` wrote. Raises NeuronError for a truncated or foreign file, FileNotFoundError."""
        try:
            with safe_open(path, "pt") as file:
                about = json.loads((file.metadata() or {})["triggers"])
                tensors = {name: file.get_tensor(name) for name in (*_TENSORS, "sentence", "first", "length", "ids")}
        except (SafetensorError, KeyError, ValueError) as error:
            raise NeuronError(f"{path} is truncated, or no file that Triggers.save wrote: {error}") from None
        pieces = tensors.pop("ids").split(tensors.pop("length").tolist())
        named = zip(tensors.pop("sentence").tolist(), pieces, tensors.pop("first").tolist(), strict=True)
        sentences = {number: (tuple(ids.tolist()), first) for number, ids, first in named}
        about |= {name: tuple(about[name]) for name in ("layers", "signs")}
        return cls(**about, **tensors, sentences=sentences)

    def axis(self, layer: int) -> int:
        """Where a layer stands on the first axis. Raises NeuronError."""
        if layer not in self.layers:
            raise NeuronError(f"layer={layer!r} is not allowed; allowed: {', '.join(map(str, self.layers))}")
        return self.layers.index(layer)

    def table(
        self, layer: int, neurons: Sequence[int] | None = None, tokenizer: Any = None, k: int | None = None
    ) -> pd.DataFrame:
        """The chosen neurons' triggers, the best `k` (default all): columns as of `ffn_triggers`."""
        at, chosen = self.axis(layer), chosen_neurons(self.coefficient.shape[2], neurons)
        fields = {
            name: getattr(self, name)[at][:, chosen, :k].tolist()
            for name in ("coefficient", "example", "position", "token")
        }
        rows, text = [], {}
        for column, neuron in enumerate(chosen.tolist()):
            for s, sign in enumerate(self.signs):
                found = zip(*(fields[name][s][column] for name in fields), strict=True)
                for rank, (coefficient, example, position, token) in enumerate(found):
                    if example < 0:
                        break
                    tokens, start = self.sentences[example]
                    if example not in text:
                        text[example] = labels(tokenizer, tokens)
                    here = position - start
                    rows.append((layer, neuron, sign, rank, coefficient, example, position, token, text[example][here],
                                 joined(text[example][: here + 1])))  # fmt: skip
        return pd.DataFrame(rows, columns=TRIGGER_COLUMNS)


def corpus_triggers(
    model: Hookable,
    corpus: Any,
    layers: Sequence[int] | int | None = None,
    k: int = 50,
    *,
    skip: int = 0,
    followed: bool = False,
    previous: Triggers | None = None,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
    batch_tokens: int = 2048,
) -> Triggers:
    """The `k` strongest triggers of every neuron of `layers` (default all) over a corpus that is streamed (Geva 2021).

    corpus: what `run` accepts; an iterable of such batches; an iterable of sentences, each ids [pos]; or `Activations` with the
    layers' ffn_act. One batch of about `batch_tokens` tokens is in memory at a time, one layer's activations of it, and the k
    best so far; passes end at the last layer asked for. Per sentence the extreme over its positions counts; of equal ones the
    earlier. skip: leading real positions that nobody reads (1 = a one-token prefix, whose value is the same in every sentence).
    followed: read only positions that a real token follows. previous: an earlier result of the same choices to go on from; the
    corpus is then what comes next. Raises FFNError, and what `run` raises.
    """
    if not isinstance(k, int) or isinstance(k, bool) or k < 1 or not isinstance(skip, int) or skip < 0:
        raise FFNError(f"k={k!r}, skip={skip!r} is not allowed; allowed: an int k from 1, an int skip from 0")
    search = TriggerSearch(model, ffn_layers(model, layers), k, skip, followed, previous)
    if isinstance(corpus, Activations):
        for inputs, acts in recorded_batches(corpus, [search.site(layer) for layer in search.layers], batch_tokens):
            search.add(inputs, acts)
    else:
        for inputs in corpus_batches(model, corpus, batch_tokens, tokenizer, prefix):
            search.read(inputs)
    return search.result()


class _Enough(Exception):
    """Every layer asked for has been read: the rest of the pass is not needed."""


class TriggerSearch:
    """The best so far of every neuron, and what a tap adds to it: one layer's activations at a time, reduced as they come."""

    def __init__(
        self, model: Hookable, layers: Sequence[int], k: int, skip: int, followed: bool, previous: Triggers | None
    ):
        self.model, self.layers, self.k, self.skip, self.followed = model, tuple(sorted(layers)), k, skip, followed
        self.stack: Any = model.sites[-1].stack
        self.signs = signs_of(model)
        self.sites = {self.site(layer): i for i, layer in enumerate(self.layers)}
        self.best: list[dict[str, Tensor]] = [{} for _ in self.layers]
        self.sentences: dict[int, tuple[tuple[int, ...], int]] = {}
        self.counts, self.examples, self.positions = torch.zeros(model.config.vocab, dtype=torch.long), 0, 0
        self.kept = 0  # sentences still listed when last looked at
        if previous is not None:
            self._go_on(previous)

    def _go_on(self, previous: Triggers) -> None:
        held = (previous.layers, previous.signs, previous.coefficient.shape[-1])
        if held != (self.layers, self.signs, self.k):
            raise FFNError(f"previous has layers, signs, k = {held}, this call asks for {(self.layers, self.signs, self.k)}; "
                           "allowed: the same")  # fmt: skip
        for i in range(len(self.layers)):
            self.best[i] = {name: getattr(previous, name)[i] for name in FIELDS}
        self.sentences, self.counts = dict(previous.sentences), previous.next_counts.clone()
        self.examples, self.positions = previous.examples, previous.positions

    def site(self, layer: int) -> Site:
        """A layer's coefficients."""
        return Site("ffn_act", layer, self.stack)

    def wants(self, site: Site) -> bool:
        """Whether a pass must tell this site."""
        return site in self.sites

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        if site in self.sites:
            self._merge(self.sites[site], value)
            if self.sites[site] == len(self.layers) - 1:
                raise _Enough
        return value

    @torch.no_grad()
    def read(self, inputs: Inputs) -> None:
        """One pass over a batch, ended at the last layer asked for."""
        self._begin(inputs)
        try:
            self.model(inputs, self)
        except _Enough:
            self._end(inputs)
            return
        raise FFNError(f"the forward pass never reached {self.site(self.layers[-1])}")

    def add(self, inputs: Inputs, acts: Sequence[Tensor]) -> None:
        """A batch whose activations [batch pos neuron] are known, one per layer."""
        self._begin(inputs)
        for i, act in enumerate(acts):
            self._merge(i, act)
        self._end(inputs)

    def _begin(self, inputs: Inputs) -> None:
        real = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
        self.tokens, self.real = inputs.tokens, real
        following = torch.full_like(self.tokens, -1)
        following[:, :-1] = torch.where(real[:, :-1] & real[:, 1:], self.tokens[:, 1:], -1)
        self.following = following
        self.reads = real & (real.long().cumsum(1) > self.skip)
        if self.followed:
            self.reads = self.reads & (following >= 0)

    def _merge(self, i: int, act: Tensor) -> None:
        """The best k of the best so far and this batch's strongest per sentence, for each sign [sign neuron k]."""
        act, wide = act.detach(), torch.float64 if act.dtype == torch.float64 else torch.float32
        rows = torch.arange(len(act), device=act.device)[:, None]
        merged = []
        for s, sign in enumerate(self.signs):
            strongest, where = (sign * act).masked_fill(~self.reads[..., None], -torch.inf).max(1)  # [example neuron]
            if not bool((strongest < torch.inf).all()):
                check_weights(self.model)
                raise FFNError(f"{self.site(self.layers[i])} is not finite")
            found = (strongest.to(wide).clamp(min=0), (self.examples + rows).expand_as(where), where,
                     self.tokens.gather(1, where), self.following.gather(1, where))  # fmt: skip
            new = {name: value.T.cpu() for name, value in zip(FIELDS, found, strict=True)}  # [neuron example]
            if self.best[i]:
                held = {name: self.best[i][name][s] for name in FIELDS}
                held["coefficient"] = sign * held["coefficient"]
                new = {name: torch.cat([held[name], new[name]], 1) for name in FIELDS}
            order = (
                new["coefficient"].sort(dim=1, descending=True, stable=True).indices[:, : self.k]
            )  # equal: the earlier
            merged.append({name: new[name].gather(1, order) for name in FIELDS})
            merged[-1]["coefficient"] = sign * merged[-1]["coefficient"]
        self.best[i] = {name: torch.stack([one[name] for one in merged]) for name in FIELDS}

    def _end(self, inputs: Inputs) -> None:
        """Count the batch, keep its sentences, and now and then forget those that no neuron lists any more."""
        following = self.following[self.reads]
        self.counts += torch.bincount(following[following >= 0].cpu(), minlength=len(self.counts))
        self.positions += int(self.reads.sum())
        for row, (tokens, real) in enumerate(zip(self.tokens.cpu(), self.real.cpu(), strict=True)):
            place = real.nonzero()[:, 0]
            start = int(place[0])
            self.sentences[self.examples + row] = (tuple(tokens[start : int(place[-1]) + 1].tolist()), start)
        self.examples += inputs.batch
        if len(self.sentences) > 2 * max(KEPT, self.kept):
            self._forget()

    def _forget(self) -> None:
        listed = set(
            np.unique(torch.cat([best["example"][best["coefficient"] != 0] for best in self.best]).numpy()).tolist()
        )
        self.sentences = {example: said for example, said in self.sentences.items() if example in listed}
        self.kept = len(self.sentences)

    def result(self) -> Triggers:
        """What was found; k is what was asked for, also where the corpus has fewer sentences."""
        if not self.best[0]:
            raise FFNError("the corpus holds no sentence; allowed: at least one")
        self._forget()
        fields = {}
        for name in FIELDS:
            value = torch.stack([best[name] for best in self.best])  # [layer sign neuron found]
            value = torch.nn.functional.pad(value, (0, self.k - value.shape[-1]))
            fields[name] = value
        silent = fields["coefficient"] == 0
        for name in FIELDS[1:]:
            fields[name] = fields[name].masked_fill(silent, -1).int()
        return Triggers(self.layers, self.signs, **fields, sentences=self.sentences, next_counts=self.counts,
                        examples=self.examples, positions=self.positions)  # fmt: skip


KEPT = 5_000  # so many sentences are kept before those that no neuron lists are looked for
FIELDS = ("coefficient", "example", "position", "token", "next_token")
