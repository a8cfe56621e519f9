"""The position-wise feed-forward layer: plain (two matrices) or gated (three, 7.22)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from interp.model.config import ModelConfig
from interp.model.layers import linear
from interp.model.tap import Tap
from interp.sites import layer_sites

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "reglu": F.relu,
    "geglu": F.gelu,
    "bilinear": lambda x: x,
}


def swish(x: Tensor, beta: float | Tensor) -> Tensor:
    """Swish_β(x) = x σ(βx) (7.21); β = 1 is SiLU."""
    if isinstance(beta, float | int) and beta == 1:
        return F.silu(x)
    return x * torch.sigmoid(beta * x)


class FeedForward(nn.Module):
    """FFN(x) = act(xW1 + b1) W2 + b2, or gated: (act(xW1 + b1) ⊗ (xW2 + b2)) W3 + b3 (7.22).

    Views: `W_in` [d_model d_ff] (plain: the book's W1; gated: W2), `W_gate` (gated: W1), `W_out` [d_ff d_model]
    (the last matrix; row i is value i), `b_in`, `b_gate`, `b_out` (None when absent). A gated layer stores gate and
    up as one matrix `gate_up`.
    """

    def __init__(self, config: ModelConfig, layer: int, stack: str | None = None) -> None:
        super().__init__()
        self.config, self.sites = config, layer_sites(layer, stack)
        bias = "ffn" in config.biases
        if config.gated:
            self.gate_up = linear(config.d_model, 2 * config.ffn_size, bias=bias)
        else:
            self.up = linear(config.d_model, config.ffn_size, bias=bias)
        self.down = linear(config.ffn_size, config.d_model, bias=bias)
        self.beta = nn.Parameter(torch.tensor(1.0)) if config.swish_beta == "learned" else config.swish_beta

    def forward(self, t4: Tensor, tap: Tap) -> Tensor:
        s = self.sites
        if self.config.gated:
            gate, up = self.gate_up(t4).chunk(2, -1)
            gate = tap(s.ffn_pre, gate)  # xW1 + b1
            up = tap(s.ffn_up, up)  # xW2 + b2
            act = self.activation(gate) * up  # Swish_β(xW1 + b1) ⊗ (xW2 + b2)
        else:
            act = self.activation(tap(s.ffn_pre, self.up(t4)))
        return self.down(tap(s.ffn_act, act))  # m W3 + b3 (7.22)

    def activation(self, x: Tensor) -> Tensor:
        """The config's non-linearity."""
        if self.config.ffn in ("swish", "swiglu"):
            return swish(x, self.beta)
        return ACTIVATIONS[self.config.ffn](x)

    @property
    def W_in(self) -> Tensor:
        """[d_model d_ff], a view."""
        return self.gate_up.weight[self.config.ffn_size :].T if self.config.gated else self.up.weight.T

    @property
    def W_gate(self) -> Tensor | None:
        """[d_model d_ff], a view; None for a plain FFN."""
        return self.gate_up.weight[: self.config.ffn_size].T if self.config.gated else None

    @property
    def W_out(self) -> Tensor:
        """[d_ff d_model], a view; row i is what neuron i writes."""
        return self.down.weight.T

    @property
    def b_in(self) -> Tensor | None:
        """[d_ff], a view, or None."""
        if not self.config.gated:
            return self.up.bias
        return None if self.gate_up.bias is None else self.gate_up.bias[self.config.ffn_size :]

    @property
    def b_gate(self) -> Tensor | None:
        """[d_ff], a view, or None."""
        if not self.config.gated or self.gate_up.bias is None:
            return None
        return self.gate_up.bias[: self.config.ffn_size]

    @property
    def b_out(self) -> Tensor | None:
        """[d_model], or None."""
        return self.down.bias
