"""How much later heads read of what earlier heads write, and how much their subspaces overlap, beside Haar nulls.

Composition (Elhage 2021): ‖A B‖ / (‖A‖ ‖B‖) with A the earlier head's OV circuit and B the later head's QK (Q), its transpose
(K) or OV (V). Chance is not 0 and depends on both spectra, so each score stands beside the same spectra randomly turned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.analyses.circuits import Factored, HeadCircuitError, HeadWeights, rotary
from interp.analyses.norm_reading import norm_readings
from interp.hookable import Hookable, require_hookable

KINDS = ("q", "k", "v")
_BATCH = 20_000_000  # numbers drawn at once


class Overlap(NamedTuple):
    """‖Q_a^T Q_b‖² over the smaller rank, and its exact mean when one of the subspaces is turned at random."""

    value: float
    expected: float


def subspace_overlap(a: Tensor, b: Tensor, dimension: int | None = None) -> Overlap:
    """How far the column spaces of a [d m] and b [d n] coincide: 0 orthogonal, 1 one holds the other.

    expected: r_a r_b / d over the smaller rank, exact for a Haar-random rotation. dimension: d, where both spaces are known to
    lie in a smaller one (LayerNorm's centred stream: d − 1). Raises HeadCircuitError for other shapes or a space of rank 0.
    """
    if a.ndim != 2 or b.ndim != 2 or a.shape[0] != b.shape[0]:
        raise HeadCircuitError(f"bases must be [d m] and [d n], got {tuple(a.shape)} and {tuple(b.shape)}")
    one, other = _basis(a), _basis(b)
    ranks = one.shape[1], other.shape[1]
    if 0 in ranks:
        raise HeadCircuitError(f"a basis of rank 0 spans nothing; the ranks are {ranks[0]} and {ranks[1]}")
    squared = float((one.T @ other).square().sum())
    return Overlap(squared / min(ranks), max(ranks) / (dimension or a.shape[0]))


@torch.no_grad()
def read_write_overlaps(model: Hookable) -> pd.DataFrame:
    """Overlap of what each head reads (column space of W_V) and writes (row space of W_O), and of writes within a layer (A3).

    Columns: layer, spaces ("read-write": one head, "write-write": two heads of a layer), head, other_head, overlap (of the
    smaller rank, 0 … 1), expected (the exact mean over Haar-random subspaces), excess (overlap − expected). W_V carries the
    norm's gain. With LayerNorm both spaces are centred and the null is that of d − 1 dimensions, so that `fold_norm` and
    `center` change nothing. Below expected means kept apart more than dimension counting does.
    """
    require_hookable(model)
    rows = []
    for layer, norm in enumerate(norm_readings(model, "norm1")):
        weights = HeadWeights(model, layer, norm)
        heads = range(weights.n_heads)
        reads = [weights.values(head).double() for head in heads]
        writes = [norm.centre(weights.output(head).double()).T for head in heads]
        dimension = writes[0].shape[0] - norm.centred
        pairs = [("read-write", head, head, reads[head], writes[head]) for head in heads]
        pairs += [("write-write", i, j, writes[i], writes[j]) for i in heads for j in heads if i < j]
        for spaces, head, other, a, b in pairs:
            found = subspace_overlap(a, b, dimension)
            rows.append({"layer": layer, "spaces": spaces, "head": head, "other_head": other, "overlap": found.value,
                         "expected": found.expected, "excess": found.value - found.expected})  # fmt: skip
    return pd.DataFrame(rows)


@torch.no_grad()
def composition_scores(
    model: Hookable, kinds: Sequence[str] = KINDS, null: int = 0, seed: int = 0, offsets: Sequence[int] = (0,)
) -> pd.DataFrame:
    """One row per kind × earlier head × later head: ‖A B‖_F / (‖A‖_F ‖B‖_F) (Elhage 2021), 0 … 1.

    kinds: of "q" (what the later head's queries read of the earlier one's output), "k" (keys), "v" (values). null: how many
    Haar-random rotations between the two spectra are drawn (10,000 for a percentile of 99.9); every pair is compared with the
    same draws, so each null is exact and they are not independent of one another. offsets: rotary models only, how far before
    the query the key stands; q and k have one row per offset.
    Columns: kind, layer, head (the later), earlier_layer, earlier_head, offset (missing where there is none), score and, with a
    null, null_mean, null_999 (its 99.9th percentile), percentile (share of draws below the score, in percent), draws. Norm
    gains are folded in; with LayerNorm what heads write is centred as its readers do, and the null is that of d − 1
    dimensions, so that `fold_norm` and `center` change nothing. Computed in float64 on the CPU. Raises HeadCircuitError.
    """
    _check(model, kinds, null, offsets)
    norms = norm_readings(model, "norm1")
    layers = [HeadWeights(model, layer, norm) for layer, norm in enumerate(norms)]
    drawn: dict[tuple[int, int, int], Tensor] = {}
    frames = []
    for later in layers[1:]:
        earlier = [(one, head) for one in layers[: later.layer] for head in range(one.n_heads)]
        writers = [_float(Factored(one.values(head), later.norm.centre(one.output(head)))) for one, head in earlier]
        dimension = writers[0].shape[0] - later.norm.centred
        spectra = [_spectrum(writer, dimension) for writer in writers]
        for kind, head, offset, reader in _readers(later, kinds, offsets):
            scores = [float((writer @ reader).norm() / (writer.norm() * reader.norm())) for writer in writers]
            table = pd.DataFrame({
                "kind": kind, "layer": later.layer, "head": head, "earlier_layer": [one.layer for one, _ in earlier],
                "earlier_head": [one for _, one in earlier], "offset": offset, "score": scores,
            })  # fmt: skip
            if null:
                turned = _spectrum(reader, dimension)
                table = table.assign(**_against_null(scores, spectra, turned, dimension, null, seed, drawn))
            frames.append(table)
    if not frames:
        raise HeadCircuitError(f"composition needs an earlier and a later head; this model has {len(layers)} layer")
    return pd.concat(frames, ignore_index=True).astype({"offset": "Int64"})


def _check(model: Hookable, kinds: Sequence[str], null: int, offsets: Sequence[int]) -> None:
    require_hookable(model)
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong or not kinds:
        raise HeadCircuitError(f"kinds={kinds!r} is not allowed; allowed: one or more of {', '.join(map(repr, KINDS))}")
    if not isinstance(null, int) or null < 0:
        raise HeadCircuitError(f"null={null!r} is not allowed; allowed: a number of draws, 0 for none")
    if set(kinds) & {"q", "k"} and not rotary(model) and tuple(offsets) != (0,):
        raise HeadCircuitError(f"offsets={offsets!r} go with rotary positions only; this model's QK circuits have none")


def _readers(
    later: HeadWeights, kinds: Sequence[str], offsets: Sequence[int]
) -> Iterator[tuple[str, int, int | None, Factored]]:
    """(kind, head, offset, B) of one layer."""
    bilinear = set(kinds) & {"q", "k"}
    turns = list(offsets) if bilinear and rotary(later.model) else [None]
    for kind in kinds:
        for head in range(later.n_heads):
            if kind == "v":
                yield kind, head, None, _float(Factored(later.values(head), later.norm.centre(later.output(head))))
                continue
            for offset in turns:
                qk = _float(Factored(later.queries(head, offset), later.keys(head).T))
                yield kind, head, offset, qk if kind == "q" else qk.T


def _float(product: Factored) -> Factored:
    return Factored(product.A.cpu().double(), product.B.cpu().double())


def _spectrum(product: Factored, dimension: int) -> Tensor:
    """Squared singular values, which add up to 1; at most as many as the space has dimensions."""
    squared = product.singular_values().square()[:dimension]
    return squared / squared.sum()


def _against_null(scores, spectra, reader: Tensor, dimension: int, null: int, seed: int, drawn) -> dict[str, Any]:
    """Null statistics of each earlier head: ‖S_a W S_b‖ with W a corner of a Haar matrix, over the norms."""
    rank = max(len(each) for each in spectra)
    key = (dimension, rank, len(reader))
    if key not in drawn:
        drawn[key] = haar_corners(dimension, rank, len(reader), null, seed)
    weighted = drawn[key] @ reader  # Σ_j W_ij² b_j: [draw rank]
    found: dict[str, list[float]] = {"null_mean": [], "null_999": [], "percentile": []}
    for score, spectrum in zip(scores, spectra, strict=True):
        values = (weighted[:, : len(spectrum)] @ spectrum).sqrt().numpy()
        found["null_mean"].append(float(values.mean()))
        found["null_999"].append(float(np.percentile(values, 99.9)))
        found["percentile"].append(100 * float((values < score).mean()))
    return {**found, "draws": null}


def haar_corners(dimension: int, rows: int, columns: int, draws: int, seed: int) -> Tensor:
    """Squared entries of a rows × columns corner of a Haar-random orthogonal matrix of `dimension`: [draw rows columns].

    For A = U_a S_a V_a^T, B = U_b S_b V_b^T and a Haar rotation Q, ‖A Q B‖ = ‖S_a (V_a^T Q U_b) S_b‖, and V_a^T Q U_b has the law
    of this corner. The first columns of Q are G (G^T G)^(−1/2) in law for normal G [d columns]; G^T G = R^T R gives G R^(−1).
    """
    if max(rows, columns) > dimension:
        raise HeadCircuitError(
            f"a corner of {rows} × {columns} does not fit into {dimension} dimensions; allowed: ranks up to d"
        )
    generator = torch.Generator().manual_seed(seed)
    size = max(1, _BATCH // (dimension * columns))
    parts = []
    for start in range(0, draws, size):
        normal = torch.randn(min(size, draws - start), dimension, columns, generator=generator, dtype=torch.float64)
        root = torch.linalg.cholesky(normal.mT @ normal)  # lower: R^T
        corner = torch.linalg.solve_triangular(root, normal[:, :rows].mT, upper=False)
        parts.append(corner.mT.square())
    return torch.cat(parts)


def _basis(vectors: Tensor) -> Tensor:
    """An orthonormal basis [d r] of the columns, rank by singular value."""
    u, s, _ = torch.linalg.svd(vectors, full_matrices=False)
    kept = s > s.amax() * max(vectors.shape) * torch.finfo(vectors.dtype).eps
    return u[:, kept]
