"""What an analysis needs of a model: our own Transformer and every bridged model offer this and no more is asked."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from interp.sites import Site


class UnsupportedModelError(ValueError):
    """An analysis that needs what this model does not have."""


@runtime_checkable
class Hookable(Protocol):
    """A model that can be read and changed at named sites.

    `config`: at least vocab, n_layers, n_ctx. `sites`: every site, in the order reached. `additive_stream`: the stream
    is the sum of what was written to it. `can_resume`: `blocks(stream, start, stop, tap, inputs, keys_values=None)`
    runs blocks start … stop−1.
    """

    config: Any
    sites: tuple[Site, ...]
    can_resume: bool

    @property
    def additive_stream(self) -> bool:
        """Whether the stream is the sum of everything written to it."""
        ...

    def __call__(self, inputs: Any, tap: Any = None) -> Tensor: ...

    def unembed(self, stream: Tensor) -> Tensor:
        """Final norm and head: stream [… d_model] -> logits [… vocab]."""
        ...

    def weight(self, kind: str, layer: int | None = None, stack: str | None = None) -> Tensor | None:
        """A weight in the researcher's layout, None when absent."""
        ...


def require_hookable(model: Any) -> None:
    """UnsupportedModelError for an object that is no Hookable, with what to pass instead."""
    if not hasattr(model, "sites"):
        instead = "an interp.Transformer, or interp.from_transformer_lens(model) around another library's"
        if hasattr(model, "original_model") and hasattr(model.original_model, "sites"):
            instead = "the Transformer behind it, its .original_model"
        raise UnsupportedModelError(f"a {type(model).__name__} cannot be read or changed here; allowed: {instead}")


def require_head(model: Hookable) -> None:
    """UnsupportedModelError when the model has no unembedding, so that its output would not be logits."""
    require_hookable(model)
    if model.weight("W_U") is None:
        raise UnsupportedModelError("this needs logits, and the model has no unembedding (head=False)")


def require_weight(model: Hookable, kind: str, layer: int | None = None) -> Tensor:
    """The weight, or UnsupportedModelError naming what the model lacks."""
    found = model.weight(kind, layer)
    if found is None:
        where = "" if layer is None else f" in layer {layer}"
        raise UnsupportedModelError(f"this analysis needs the weight {kind!r}{where}, which this model does not have")
    return found
