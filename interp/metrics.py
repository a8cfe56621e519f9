"""What a run is judged by: a metric states the positions and entries of the logits it reads and returns [batch] floats."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interp.at import SelectionError, positions
from interp.model.inputs import Inputs, InputsError


class MetricError(ValueError):
    """A metric that returned something other than one number per example."""


@dataclass(frozen=True, eq=False)
class Metric:
    """`function` is called on logits[:, positions, entries], shape [batch n_positions n_entries] -> [batch].

    positions: an int, an int tensor [batch], a role name, or None = all. entries: int tensor [batch n], or None = the
    whole vocabulary. unit: for axes and tables.
    """

    name: str
    function: Callable[[Tensor], Tensor]
    positions: Any = None
    entries: Tensor | None = None
    unit: str = ""

    def read(self, logits: Tensor, inputs: Inputs) -> Tensor:
        """The slice of full logits [batch pos vocab] that the metric reads."""
        if self.positions is not None:
            index = positions(inputs, self.positions, f"position of metric {self.name!r}")
            logits = logits[torch.arange(inputs.batch, device=logits.device), index][:, None]
        if self.entries is None:
            return logits
        entries = self.entries.to(logits.device).expand(logits.shape[0], -1)
        if int(entries.min()) < 0 or int(entries.max()) >= logits.shape[-1]:
            raise SelectionError(f"metric {self.name!r} reads token id {_outside(entries, logits.shape[-1])}; "
                                 f"allowed: 0 … {logits.shape[-1] - 1}")  # fmt: skip
        return logits.gather(-1, entries[:, None].expand(-1, logits.shape[1], -1))

    def __call__(self, logits: Tensor) -> Tensor:
        """The metric of the slice that `read` gives; `evaluate(metric, logits, inputs)` does both from full logits."""
        return self.function(logits)


def evaluate(metric: Metric | Callable[[Tensor], Tensor], logits: Tensor, inputs: Inputs) -> Tensor:
    """The metric of each example [batch]. A plain function is given the full logits. Raises MetricError."""
    value = metric(wide(metric.read(logits, inputs))) if isinstance(metric, Metric) else metric(logits)
    name = getattr(metric, "name", getattr(metric, "__name__", "metric"))
    if not isinstance(value, Tensor) or tuple(value.shape) != (inputs.batch,) or not value.dtype.is_floating_point:
        got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
        raise MetricError(f"metric {name!r} must return floats of shape [batch] = ({inputs.batch},), got {got}")
    return value


def wide(logits: Tensor) -> Tensor:
    """16-bit logits in float32, so that softmax, differences and ranks are not rounded again; others as they are."""
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


def logit_difference(correct: Any, wrong: Any, position: Any = -1) -> Metric:
    """logit(correct) − logit(wrong) at `position`, in logits; ids are ints or int tensors [batch]."""
    entries = torch.stack(torch.broadcast_tensors(_ids(correct), _ids(wrong)), -1)
    return Metric("logit_difference", lambda x: x[:, 0, 0] - x[:, 0, 1], position, entries, "logits")


def probability(token: Any, position: Any = -1) -> Metric:
    """P(token) at `position`; token is an int or int tensor [batch]."""
    ids = _ids(token)
    return Metric("probability", lambda x: _pick(x[:, 0].softmax(-1), ids), position, None, "probability")


def log_probability(token: Any, position: Any = -1) -> Metric:
    """ln P(token) at `position`, in nats."""
    ids = _ids(token)
    return Metric("log_probability", lambda x: _pick(x[:, 0].log_softmax(-1), ids), position, None, "nats")


def kl_divergence(reference: Any, position: Any = -1) -> Metric:
    """D(reference ‖ run) of the next-token distributions at `position`, in nats.

    reference: a Run, or logits at that position [batch vocab].
    """
    if hasattr(reference, "logits"):
        index = positions(reference.inputs, position)
        reference = reference.logits[torch.arange(reference.inputs.batch), index]
    wanted = reference.log_softmax(-1)

    def function(x: Tensor) -> Tensor:
        return (wanted.exp() * (wanted - x[:, 0].log_softmax(-1))).sum(-1)

    return Metric("kl_divergence", function, position, None, "nats")


def loss(inputs: Inputs) -> Metric:
    """Mean next-token cross-entropy of `inputs` over their real tokens, in nats per token.

    Tokens inside a prefix decoder's prefix are seen, not predicted, and do not count. (For an encoder, which sees every token,
    the number says nothing.)
    """
    if inputs.length < 2:
        raise InputsError(f"the loss of next tokens needs at least 2 positions, got {inputs.length}")
    targets = inputs.tokens[:, 1:]
    real = torch.ones_like(targets, dtype=torch.bool)
    if inputs.mask is not None:
        real = inputs.mask[:, 1:] & inputs.mask[:, :-1]
    if inputs.prefix_length is not None:
        place = torch.ones_like(inputs.tokens) if inputs.mask is None else inputs.mask.long()
        place = place.cumsum(1) - 1
        real = real & (place[:, 1:] >= inputs.prefix_length[:, None].to(place.device))
    if not bool(real.any(1).all()):
        rows = (~real.any(1)).nonzero()[:, 0].tolist()
        raise InputsError(f"the loss of next tokens needs at least 2 real tokens; example(s) {rows[:5]} have fewer")

    def function(x: Tensor) -> Tensor:
        nats = -x[:, :-1].log_softmax(-1).gather(-1, targets.to(x.device)[..., None])[..., 0]
        keep = real.to(x.device)
        return torch.where(keep, nats, 0.0).sum(1) / keep.sum(1)

    return Metric("loss", function, None, None, "nats per token")


def _ids(token: Any) -> Tensor:
    ids = torch.as_tensor(token)
    if ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.ndim > 1:
        raise SelectionError(f"a token id must be an int or an int tensor [batch], got {ids.dtype} {tuple(ids.shape)}")
    return ids if ids.ndim else ids[None]


def _pick(values: Tensor, ids: Tensor) -> Tensor:
    ids = ids.to(values.device).expand(values.shape[0])
    if int(ids.min()) < 0 or int(ids.max()) >= values.shape[-1]:
        raise SelectionError(f"token id {_outside(ids, values.shape[-1])} is outside 0 … {values.shape[-1] - 1}")
    return values.gather(-1, ids[:, None])[:, 0]


def _outside(ids: Tensor, vocab: int) -> int:
    return int(ids[(ids < 0) | (ids >= vocab)].flatten()[0])
