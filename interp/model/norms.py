"""LayerNorm (7.23-7.26) and RMSNorm (Zhang & Sennrich 2019), each normalising one token's vector."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.model.config import ModelConfig
from interp.model.tap import Tap
from interp.sites import Site


class _Norm(nn.Module):
    """Shared by both norms: fused unless somebody wants the scale or the normalised vector."""

    def __init__(self, size: int, eps: float, scale: Site | None, hat: Site | None, offset: bool) -> None:
        super().__init__()
        self.eps, self.scale_site, self.hat_site = eps, scale, hat
        self.weight = nn.Parameter(torch.ones(size))
        self.bias = nn.Parameter(torch.zeros(size)) if offset else None

    def forward(self, x: Tensor, tap: Tap) -> Tensor:
        scale, hat = self.scale_site, self.hat_site
        if scale is None or hat is None or not (tap.wants(scale) or tap.wants(hat)):
            return self.fused(x)
        # transformers also normalises 16-bit streams in 32 bits and rounds before the gain.
        wide = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
        centred = self.centre(wide)
        sigma = tap(scale, (centred.square().mean(-1, keepdim=True) + self.eps).sqrt())  # σ (7.24)
        x_hat = tap(hat, (centred / sigma).to(x.dtype))  # x̂ = (x - μ)/σ (7.25)
        return self.weight * x_hat if self.bias is None else self.weight * x_hat + self.bias  # γ x̂ + β (7.26)

    def centre(self, x: Tensor) -> Tensor:
        """x with whatever the norm subtracts subtracted."""
        raise NotImplementedError

    def fused(self, x: Tensor) -> Tensor:
        """The whole norm in one kernel."""
        raise NotImplementedError


class LayerNorm(_Norm):
    """γ (x - μ)/σ + β, σ = sqrt(mean((x - μ)²) + ε) (7.23-7.26; the book has ε = 0)."""

    def __init__(self, size: int, eps: float, scale: Site | None = None, hat: Site | None = None) -> None:
        super().__init__(size, eps, scale, hat, offset=True)

    def centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)  # μ (7.23)

    def fused(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class RMSNorm(_Norm):
    """γ x / sqrt(mean(x²) + ε): no centring, no offset."""

    def __init__(self, size: int, eps: float, scale: Site | None = None, hat: Site | None = None) -> None:
        super().__init__(size, eps, scale, hat, offset=False)

    def centre(self, x: Tensor) -> Tensor:
        return x

    def fused(self, x: Tensor) -> Tensor:
        if x.dtype in (torch.float16, torch.bfloat16):  # round before the gain, as transformers does
            wide = x.float()
            return self.weight * (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class NoNorm(nn.Module):
    """norm="none": the vector itself."""

    weight = None
    bias = None

    def forward(self, x: Tensor, tap: Tap) -> Tensor:
        return x


def make_norm(config: ModelConfig, scale: Site | None = None, hat: Site | None = None) -> nn.Module:
    """The config's norm over d_model, telling its two inner sites."""
    if config.norm == "none":
        return NoNorm()
    kind = LayerNorm if config.norm == "layernorm" else RMSNorm
    return kind(config.d_model, config.norm_eps, scale, hat)
