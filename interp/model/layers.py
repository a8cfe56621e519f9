"""Linear and embedding layers without PyTorch's own initialisation: every weight is drawn from the model's seed.

PyTorch would draw each twice and move its global generator, which belongs to the caller.
"""

from __future__ import annotations

from typing import cast

from torch import nn
from torch.nn.utils import skip_init


def linear(d_in: int, d_out: int, bias: bool) -> nn.Linear:
    """x W + b, stored [out in], uninitialised."""
    return cast(nn.Linear, skip_init(nn.Linear, d_in, d_out, bias=bias))


def embedding(n: int, d: int) -> nn.Embedding:
    """n vectors of size d, uninitialised."""
    return cast(nn.Embedding, skip_init(nn.Embedding, n, d))
