"""Where a token stands: sinusoidal tables (Vaswani 2017) and rotary embeddings (Su 2021)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from interp.model.config import ModelConfig


def _table_dtype(device: torch.device) -> torch.dtype:
    # float64 so that a .double() model is exact to the last digit; MPS has no float64.
    return torch.float32 if device.type == "mps" else torch.float64


def sinusoidal(ids: Tensor, d_model: int, dtype: torch.dtype) -> Tensor:
    """PE(p, 2i) = sin(p / 10000^(2i/d)), PE(p, 2i+1) = cos(…) (Vaswani 2017, 3.5): [batch pos] -> [batch pos d_model]."""
    wide = _table_dtype(ids.device)
    pairs = torch.arange(0, d_model, 2, dtype=wide, device=ids.device)
    angle = ids.to(wide)[..., None] / 10000.0 ** (pairs / d_model)
    return torch.stack([angle.sin(), angle.cos()], -1).flatten(-2).to(dtype)


def rotary_frequencies(config: ModelConfig, device: torch.device) -> Tensor:
    """Radians per position of each rotated pair [rotary_dims / 2], after `rotary_scaling`."""
    wide = _table_dtype(device)
    n = config.rotary_dims
    frequency = config.rotary_base ** (-torch.arange(0, n, 2, dtype=wide, device=device) / n)
    scaling = config.rotary_scaling
    if scaling is None:
        return frequency
    slowed = frequency / scaling["factor"]
    if scaling["type"] == "linear":
        return slowed
    # llama3: long wavelengths are slowed by `factor`, short ones kept, those between interpolated.
    turns = scaling["original_n_ctx"] * frequency / (2 * math.pi)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return keep * frequency + (1 - keep) * slowed


def rotary_table(config: ModelConfig, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of each position's angles, [batch pos 1 rotary_dims/2], to broadcast over heads."""
    frequency = rotary_frequencies(config, ids.device)
    angle = ids.to(frequency.dtype)[..., None, None] * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, table: tuple[Tensor, Tensor]) -> Tensor:
    """Turn pair (i, i + n/2) of the first n entries of each head by its position's angle: [batch pos head d_head].

    The halves convention of Llama and GPT-NeoX; entries beyond `rotary_dims` pass unchanged.
    """
    cos, sin = table
    half = cos.shape[-1]
    if x.shape[-1] > 2 * half:
        return torch.cat([rotate(x[..., : 2 * half], table), x[..., 2 * half :]], -1)
    pair = x.unflatten(-1, (2, half))  # (a, b) -> (a cos − b sin, b cos + a sin), a whole head at a time
    turned = pair * cos.unsqueeze(-2) + pair.flip(-2) * torch.stack([-sin, sin], -2)
    return turned.flatten(-2)
