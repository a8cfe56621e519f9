"""The computational graph of a pre-norm model: who writes to the residual stream, who reads it, and every edge between them.

Names are those of the MIB circuit track (Mueller et al. 2025) and of EAP-IG: "input", "a3.h1", "m3", "logits"; an edge is
"a0.h1->a2.h0<k>".
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.hookable import UnsupportedModelError
from interp.model.transformer import Transformer


class CircuitError(ValueError):
    """An edge, mask or choice that does not fit the graph; the message says what is allowed."""


@dataclass(frozen=True)
class Graph:
    """Senders and receivers in the order in which they run; `admitted` [receiver sender] says which sender comes before.

    Every head has a receiver for its query; a key and a value belong to a kv head, which several query heads share under
    grouped-query attention.
    """

    n_layers: int
    n_heads: int
    kv_heads: int
    feeds: bool
    d_model: int

    @staticmethod
    def of(model: Any) -> Graph:
        """A model's graph. UnsupportedModelError unless it is ours, with one stack and an additive stream."""
        if not isinstance(model, Transformer):
            raise UnsupportedModelError(f"circuits need one of our models, not a {type(model).__name__}; allowed: a Transformer, "
                                        "such as from_huggingface gives")  # fmt: skip
        config = model.config
        if config.kind == "encoder-decoder":
            raise UnsupportedModelError("circuits read one stack; allowed: decoder, encoder, prefix-decoder")
        if not model.additive_stream:
            raise UnsupportedModelError("this model's stream is normed between its blocks (post-norm or an embedding norm): what "
                                        "a sender wrote has no share of its own in it; allowed: pre-norm models")  # fmt: skip
        return Graph(config.n_layers, config.n_heads, config.kv_heads, config.ffn != "none", config.d_model)

    @cached_property
    def senders(self) -> tuple[str, ...]:
        """What writes to the stream."""
        names = ["input"]
        for layer in range(self.n_layers):
            names += [f"a{layer}.h{head}" for head in range(self.n_heads)] + [f"m{layer}"] * self.feeds
        return tuple(names)

    @cached_property
    def receivers(self) -> tuple[str, ...]:
        """What reads it."""
        names = []
        for layer in range(self.n_layers):
            names += [f"a{layer}.h{head}<{part}>" for part, n in self.parts for head in range(n)]
            names += [f"m{layer}"] * self.feeds
        return (*names, "logits")

    @property
    def parts(self) -> tuple[tuple[str, int], ...]:
        """What heads read: (q, heads), (k, kv heads), (v, kv heads)."""
        return ("q", self.n_heads), ("k", self.kv_heads), ("v", self.kv_heads)

    @cached_property
    def admitted(self) -> Tensor:
        """Which edges there are [receiver sender], bool."""
        reads = torch.tensor([_depth(name, self.n_layers) for name in self.receivers])
        writes = torch.tensor([_depth(name, self.n_layers) for name in self.senders])
        return writes[None] < reads[:, None]

    @cached_property
    def _index(self) -> dict[str, tuple[int, int]]:
        rows, columns = self.admitted.nonzero(as_tuple=True)
        pairs = zip(rows.tolist(), columns.tolist(), strict=True)
        return {f"{self.senders[s]}->{self.receivers[r]}": (r, s) for r, s in pairs}

    @property
    def edges(self) -> tuple[str, ...]:
        """The names of all edges, receiver by receiver."""
        return tuple(self._index)

    def mask(self, edges: Iterable[str]) -> Tensor:
        """[receiver sender] bool, true at these edges. CircuitError for a name that is none."""
        found = torch.zeros_like(self.admitted)
        for name in [edges] if isinstance(edges, str) else edges:
            if name not in self._index:
                raise CircuitError(f"edge {name!r} is not one of this graph's {len(self._index)}; allowed: sender->receiver such "
                                   f"as {self.edges[0]!r}, the sender before the receiver")  # fmt: skip
            found[self._index[name]] = True
        return found

    def table(self, **columns: Tensor) -> pd.DataFrame:
        """One row per edge: edge, sender, receiver, and the given [receiver sender] values."""
        rows, senders = self.admitted.nonzero(as_tuple=True)
        table = pd.DataFrame({
            "edge": self.edges, "sender": [self.senders[s] for s in senders.tolist()],
            "receiver": [self.receivers[r] for r in rows.tolist()],
        })  # fmt: skip
        return table.assign(**{name: values[rows, senders].tolist() for name, values in columns.items()})


def _depth(name: str, n_layers: int) -> int:
    """When it runs: attention of layer l at 2l + 1, its FFN at 2l + 2."""
    if name in ("input", "logits"):
        return 0 if name == "input" else 2 * n_layers + 1
    layer = int(name[1:].split(".")[0])
    return 2 * layer + (1 if name[0] == "a" else 2)
