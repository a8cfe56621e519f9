"""What a metric reads of a run, and the metric of many cells from those entries alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.at import SelectionError, positions
from interp.metrics import Metric, MetricError, evaluate, wide
from interp.model.inputs import Inputs


class Reading:
    """The logits that a metric declares, `positions` [batch n_positions] and `entries` [batch n_entries] (None = all).

    A plain function declares nothing, so it is given everything. `needed` [batch pos]: the positions as a mask.
    """

    def __init__(self, metric: Metric | Callable[[Tensor], Tensor], inputs: Inputs, vocab: int) -> None:
        if not callable(metric):
            raise MetricError(f"metric={metric!r} is not allowed; allowed: a Metric such as logit_difference(correct, wrong), or "
                              "a function of logits [batch pos vocab]")  # fmt: skip
        self.metric, self.inputs = metric, inputs
        self.name = getattr(metric, "name", getattr(metric, "__name__", "metric"))
        self.unit = getattr(metric, "unit", "")
        self.entries: Tensor | None = None
        self.positions = torch.arange(inputs.length, device=inputs.tokens.device).expand(inputs.batch, -1)
        if isinstance(metric, Metric):
            if metric.positions is not None:
                at = positions(inputs, metric.positions, f"position of metric {metric.name!r}")
                self.positions = at[:, None]
            if metric.entries is not None:
                entries = metric.entries.to(inputs.tokens.device)
                low, high = int(entries.min()), int(entries.max())
                if low < 0 or high >= vocab:
                    raise SelectionError(f"metric {metric.name!r} reads token id {low if low < 0 else high}; "
                                         f"allowed: 0 … {vocab - 1}")  # fmt: skip
                self.entries = entries.expand(inputs.batch, -1)
        self.needed = np.zeros(tuple(inputs.tokens.shape), dtype=bool)
        np.put_along_axis(self.needed, self.positions.cpu().numpy(), True, axis=1)
        self._mapped: bool | None = None

    def of_run(self, logits: Tensor) -> Tensor:
        """From a run's full logits [batch pos vocab] to the slice [batch n_positions n_entries]."""
        rows = logits.gather(1, self.positions[..., None].expand(-1, -1, logits.shape[-1]))
        return rows if self.entries is None else rows.gather(-1, self.at_entries())

    def at_entries(self) -> Tensor:
        """The entries of every position that is read [batch n_positions n_entries]."""
        assert self.entries is not None
        return self.entries[:, None].expand(-1, self.positions.shape[1], -1)

    def of_slice(self, one: Tensor) -> Tensor:
        """The metric [batch] of one run's slice. Raises MetricError."""
        one = one.clone()  # a metric that works in place has its own
        value = self.metric(wide(one)) if isinstance(self.metric, Metric) else self.metric(one)
        batch = self.inputs.batch
        if not isinstance(value, Tensor) or tuple(value.shape) != (batch,) or not value.dtype.is_floating_point:
            got = f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)
            raise MetricError(f"metric {self.name!r} must return floats of shape [batch] = ({batch},), got {got}")
        return value

    def of_slices(self, many: Tensor) -> Tensor:
        """The metric [cell batch] of many runs' slices [cell batch n_positions n_entries].

        Mapped over cells by `torch.func.vmap` where that gives the same bits as one call per cell, tried on the first two.
        """
        if len(many) > 2 and self._mapped is not False:
            try:
                mapped = torch.func.vmap(self.of_slice)(many)
            except Exception:  # a function that cannot be mapped; one that is wrong fails below, too
                self._mapped = False
            else:
                if self._mapped is None:
                    self._mapped = all(torch.equal(mapped[i], self.of_slice(many[i])) for i in (0, 1))
                if self._mapped:
                    return mapped
        return torch.stack([self.of_slice(one) for one in many])

    def of_full(self, logits: Tensor, inputs: Inputs | None = None) -> Tensor:
        """The metric [batch] of full logits, read by the metric itself."""
        return evaluate(self.metric, logits, inputs or self.inputs)

    def at(self, model: Any, stream: Tensor, examples: Any = slice(None), tap: Any = None) -> Tensor:
        """The slice [n n_positions n_entries] of streams after the last block [n pos d_model]; examples: which those are."""
        positions = self.positions[examples]
        rows = stream.gather(1, positions[..., None].expand(-1, -1, stream.shape[-1]))
        return model.unembed(rows, tap, None if self.entries is None else self.at_entries()[examples])

    def alone(self, one: Tensor, example: int) -> Tensor:
        """The metric of one example's slice [n_positions n_entries]."""
        return self.of_slice(one.expand(self.inputs.batch, *one.shape))[example]
