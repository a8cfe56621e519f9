"""AdamW or SGD with weight-decay groups (Loshchilov & Hutter 2019), for all weights or for named groups of them."""

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


class Holding(torch.optim.Optimizer):
    """An optimiser that leaves some rows of its parameters exactly where they are. held: (parameter, bool [rows])."""

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


class AdamW(Holding, torch.optim.AdamW):
    """AdamW of `Holding`."""


class SGD(Holding, torch.optim.SGD):
    """SGD of `Holding`, with AdamW's decoupled decay: p ← p − ηλp, then p ← p − η·(momentum's step)."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update."""
        shrinks = [group["weight_decay"] for group in self.param_groups]
        for group, decay in zip(self.param_groups, shrinks, strict=True):
            for parameter in group["params"]:
                parameter.mul_(1 - group["lr"] * decay)
            group["weight_decay"] = 0.0  # torch's own is added to the gradient and so enters the momentum
        done = super().step(closure)
        for group, decay in zip(self.param_groups, shrinks, strict=True):
            group["weight_decay"] = decay
        return done


def make_optimizer(model: Transformer, config: TrainConfig) -> Holding:
    """The config's optimiser of the trained weights, whose first group decays; fused where PyTorch has a fused kernel."""
    rows, shrinks = trained_rows(model, config), decayed(model, config)
    named = {name: p for name, p in model.named_parameters() if name in rows}
    groups: list[dict[str, Any]] = [
        {"params": [p for name, p in named.items() if name in shrinks], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named.items() if name not in shrinks], "weight_decay": 0.0},
    ]
    held = [(named[name], ~chosen) for name, chosen in rows.items() if not bool(chosen.all())]
    fused = model.device.type in ("cuda", "cpu")
    if config.optimizer == "sgd":
        return SGD(groups, held, lr=config.learning_rate, momentum=config.betas[0], fused=fused)
    return AdamW(groups, held, lr=config.learning_rate, betas=config.betas, fused=fused)
