"""QK and OV circuits of heads as low-rank products (Elhage 2021): what a head looks for and what it moves.

All of them fold the gain of the norm that reads the stream into the reading side, and its centring where it is a LayerNorm;
scales σ, biases and the attention scale stay outside. A row vector of the stream goes in on the left.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interp.analyses.norm_reading import NormReading, norm_readings
from interp.hookable import Hookable, UnsupportedModelError, require_hookable, require_weight
from interp.model.positions import rotary_table, rotate

ENDS = ("stream", "vocab")


class HeadCircuitError(ValueError):
    """A layer, head, offset or shape that a circuit cannot have."""


@dataclass(frozen=True, eq=False)
class Factored:
    """The matrix A B without ever forming it: A [m r], B [r n], r small."""

    A: Tensor
    B: Tensor

    def __post_init__(self) -> None:
        if self.A.ndim != 2 or self.B.ndim != 2 or self.A.shape[1] != self.B.shape[0]:
            raise HeadCircuitError(
                f"factors must be [m r] and [r n], got {tuple(self.A.shape)} and {tuple(self.B.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(m, n)."""
        return self.A.shape[0], self.B.shape[1]

    @property
    def T(self) -> Factored:
        """The transpose, B^T A^T."""
        return Factored(self.B.T, self.A.T)

    def __matmul__(self, other: Any) -> Any:
        """A B times a matrix or another product (again factored, of the smaller rank), or times a vector (a vector)."""
        if isinstance(other, Factored):
            middle = self.B @ other.A  # [r r']
            if middle.shape[0] <= middle.shape[1]:
                return Factored(self.A, middle @ other.B)
            return Factored(self.A @ middle, other.B)
        return self.A @ (self.B @ other) if other.ndim == 1 else Factored(self.A, self.B @ other)

    def __rmatmul__(self, other: Tensor) -> Any:
        return (other @ self.A) @ self.B if other.ndim == 1 else Factored(other @ self.A, self.B)

    def norm(self) -> Tensor:
        """Frobenius norm: ‖AB‖² = Σ (AᵀA) ∘ (BBᵀ), from r × r products."""
        return ((self.A.T @ self.A) * (self.B @ self.B.T)).sum().clamp(min=0).sqrt()

    def eigenvalues(self) -> Tensor:
        """The r eigenvalues [r] complex that can differ from 0: those of B A. HeadCircuitError unless A B is square."""
        if self.shape[0] != self.shape[1]:
            raise HeadCircuitError(f"only a square matrix has eigenvalues, this one is {self.shape}")
        return torch.linalg.eigvals(self.B @ self.A)

    def singular_values(self) -> Tensor:
        """The singular values [min(m, r, n)] that can differ from 0, largest first, by QR of both factors."""
        left, right = torch.linalg.qr(self.A).R, torch.linalg.qr(self.B.T).R
        return torch.linalg.svdvals(left @ right.T)

    def dense(self) -> Tensor:
        """A B itself [m n]."""
        return self.A @ self.B

    def rows(self, i: Any) -> Tensor:
        """Rows `i` of A B (an int, slice or int tensor)."""
        return self.A[i] @ self.B


@torch.no_grad()
def ov_circuit(model: Hookable, layer: int, head: int, ends: str = "stream") -> Factored:
    """What `head` writes for what it reads: W_V W_O [d_model d_model], or W_E W_V W_O W_U [vocab vocab] with ends="vocab".

    The norm's gain γ (and LayerNorm's centring) is folded into W_V, the final norm's into W_U. Grouped heads share W_V. Raises
    HeadCircuitError, or UnsupportedModelError for what the model lacks.
    """
    _check_ends(ends)
    weights = HeadWeights(model, layer)
    read, write = weights.values(head), weights.output(head)
    if ends == "stream":
        return Factored(read, write)
    [final] = norm_readings(model, "final")
    out = final.read(require_weight(model, "W_U").detach().to(write))
    return Factored(require_weight(model, "W_E").detach().to(read) @ read, write @ out)


@torch.no_grad()
def qk_circuit(model: Hookable, layer: int, head: int, offset: int | None = None, ends: str = "stream") -> Factored:
    """What `head` looks for: W_Q W_K^T, rows = query side; with ends="vocab" W_E W_Q W_K^T W_E^T.

    offset: for rotary models, how many positions before the query the key stands: W_Q R(offset) W_K^T. Such a model has no
    one QK matrix, so None is refused; a model without rotation has no offset. The norm's gain is folded into both sides.
    Raises HeadCircuitError, or UnsupportedModelError (q/k norm: the scores are not bilinear).
    """
    _check_ends(ends)
    weights = HeadWeights(model, layer)
    queries, keys = weights.queries(head, offset), weights.keys(head)
    if ends == "vocab":
        embedding = require_weight(model, "W_E").detach().to(queries)
        queries, keys = embedding @ queries, embedding @ keys
    return Factored(queries, keys.T)


class HeadWeights:
    """One layer's self-attention weights, each [d_model d_head] (W_O: [d_head d_model]), norm folded into what reads."""

    def __init__(self, model: Hookable, layer: int, norm: NormReading | None = None) -> None:
        require_hookable(model)
        n_layers = model.config.n_layers
        if not isinstance(layer, int) or isinstance(layer, bool) or not 0 <= layer < n_layers:
            raise HeadCircuitError(f"layer={layer!r} is not allowed; allowed: 0 … {n_layers - 1}")
        if not model.additive_stream:
            raise UnsupportedModelError("circuits of weights need a stream that heads read through a norm of their own; this "
                                        "model norms the stream itself (post-norm, or a norm of the embeddings)")  # fmt: skip
        self.model, self.layer = model, layer
        self.norm = norm if norm is not None else norm_readings(model, "norm1")[layer]
        self.n_heads = self._stored("W_O").shape[0]

    def _stored(self, name: str) -> Tensor:
        return require_weight(self.model, name, self.layer).detach()

    def _head(self, name: str, head: int) -> Tensor:
        if not isinstance(head, int) or isinstance(head, bool) or not 0 <= head < self.n_heads:
            raise HeadCircuitError(f"head={head!r} is not allowed; allowed: 0 … {self.n_heads - 1}")
        weight = self._stored(name)
        return weight[head * weight.shape[0] // self.n_heads]  # grouped heads share keys and values

    def values(self, head: int) -> Tensor:
        """W_V of the head's group as the stream sees it."""
        return self.norm.read(self._head("W_V", head))

    def output(self, head: int) -> Tensor:
        """W_O of the head, as it is."""
        return self._head("W_O", head)

    def keys(self, head: int) -> Tensor:
        """W_K of the head's group as the stream sees it."""
        return self.norm.read(self._head("W_K", head))

    def queries(self, head: int, offset: int | None) -> Tensor:
        """W_Q of the head as the stream sees it, turned by the angle of `offset` positions in a rotary model."""
        weight = self.norm.read(self._head("W_Q", head))
        if not rotary(self.model):
            if offset is not None:
                raise HeadCircuitError(
                    f"offset={offset!r} goes with rotary positions only; this model's QK circuit has none"
                )
            return weight
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise HeadCircuitError(
                f"offset={offset!r} is not allowed: under rotary positions W_Q W_K^T depends on how far apart query and key "
                "stand, so there is no one QK matrix; allowed: an integer, the query's position minus the key's"
            )
        table = rotary_table(self.model.config, torch.tensor([[offset]], device=weight.device), weight.dtype)
        return rotate(weight[None, :, None], table)[0, :, 0]


def rotary(model: Hookable) -> bool:
    """Whether queries and keys are rotated; UnsupportedModelError where scores are not bilinear, or one cannot know."""
    config, names = model.config, {site.name for site in model.sites}
    if getattr(config, "qk_norm", False):
        raise UnsupportedModelError(
            "this model norms queries and keys (qk_norm), so its scores are no product W_Q W_K^T"
        )
    positions = getattr(config, "positions", None)
    if positions is None and ("q_rot" in names or "pos_embed" not in names):
        raise UnsupportedModelError("this bridged model may rotate its queries and keys, and the angles are not known here; "
                                    "allowed: models with position embeddings, or an interp.Transformer")  # fmt: skip
    return positions == "rotary"


def _check_ends(ends: str) -> None:
    if ends not in ENDS:
        raise HeadCircuitError(f"ends={ends!r} is not allowed; allowed: {', '.join(map(repr, ENDS))}")
