"""AdamW with weight-decay groups (Loshchilov & Hutter 2019)."""

from __future__ import annotations

import torch

from interp.model.transformer import Transformer
from interp.tasks.train_config import TrainConfig


def decayed(model: Transformer, config: TrainConfig) -> set[str]:
    """Names of the parameters that decay: every matrix but the embeddings, or all of them."""
    named = dict(model.named_parameters())
    if config.decay == "all":
        return set(named)
    return {name for name, p in named.items() if p.ndim >= 2 and "embedding" not in name and name != "W_pos"}


def make_optimizer(model: Transformer, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW whose first group decays; fused where PyTorch has a fused kernel."""
    named, shrinks = dict(model.named_parameters()), decayed(model, config)
    groups = [
        {"params": [p for name, p in named.items() if name in shrinks], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named.items() if name not in shrinks], "weight_decay": 0.0},
    ]
    fused = model.device.type in ("cuda", "cpu")
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=fused)
