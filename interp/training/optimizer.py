"""AdamW with weight-decay groups (Loshchilov & Hutter 2019), for all weights or for named groups of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from interp.model.transformer import Transformer
from interp.tasks.train_config import TrainConfig


def decayed(model: Transformer, config: TrainConfig) -> set[str]:
    """Names of the parameters that decay: every matrix but the embeddings, or all of them."""
    named = dict(model.named_parameters())
    if config.decay == "all":
        return set(named)
    return {name for name, p in named.items() if p.ndim >= 2 and "embedding" not in name and name != "W_pos"}


def trained_rows(model: Transformer, config: TrainConfig) -> dict[str, Tensor]:
    """Parameter name -> which of its rows are trained, bool [rows]; frozen parameters are left out. Raises WeightsError."""
    return model.weights.select("all" if config.trainable is None else config.trainable)


class AdamW(torch.optim.AdamW):
    """AdamW that leaves some rows of its parameters exactly where they are. held: (parameter, bool [rows])."""

    def __init__(self, groups: list[dict[str, Any]], held: Sequence[tuple[Tensor, Tensor]], **more: Any) -> None:
        super().__init__(groups, **more)
        self.held = [(parameter, rows, parameter.detach()[rows].clone()) for parameter, rows in held]

    def clip(self, most: float) -> Tensor:
        """Scale the gradients of what is trained to at most this norm; their norm before."""
        for parameter, rows, _ in self.held:
            if parameter.grad is not None:
                parameter.grad[rows] = 0
        return torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], most)

    def step(self, closure: Any = None) -> Any:
        """One update."""
        done = super().step(closure)
        with torch.no_grad():
            for parameter, rows, value in self.held:  # weight decay reaches them too
                parameter[rows] = value
        return done


def make_optimizer(model: Transformer, config: TrainConfig) -> AdamW:
    """AdamW of the trained weights, whose first group decays; fused where PyTorch has a fused kernel."""
    rows, shrinks = trained_rows(model, config), decayed(model, config)
    named = {name: p for name, p in model.named_parameters() if name in rows}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if name in shrinks], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named.items() if name not in shrinks], "weight_decay": 0.0},
    ]
    held = [(named[name], ~chosen) for name, chosen in rows.items() if not bool(chosen.all())]
    fused = model.device.type in ("cuda", "cpu")
    return AdamW(groups, held, lr=config.learning_rate, betas=config.betas, fused=fused)
