"""Interchange interventions in a subspace (Geiger et al. 2023): a source's value in some directions, the base's in the others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interp.at import select
from interp.hookable import Hookable
from interp.interventions import Intervention
from interp.model.inputs import Inputs
from interp.run import Run, prepare, run
from interp.sites import Site, resolve


class DASError(ValueError):
    """A basis, pairs or choices that an interchange cannot be made with."""


@dataclass(frozen=True, eq=False)
class Interchange(Intervention):
    """The selection's component in span(basis) replaced by that of `value`, which broadcasts to the selection.

    basis [d dim]: orthonormal columns; d is the selection's last axis.
    """

    value: Tensor
    basis: Tensor
    at: Any = ()

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        B = self.basis.to(chosen)
        if B.ndim != 2 or B.shape[0] != chosen.shape[-1]:
            raise DASError(f"basis for '{self.site}' must be [{chosen.shape[-1]} dim], got {tuple(B.shape)}")
        return chosen + (self.value.to(chosen) - chosen) @ B @ B.T


def interchange(
    model: Hookable,
    base: Any,
    source: Any,
    site: str | Site,
    at: Any,
    basis: Tensor,
    source_at: Any = None,
    record: Any = (),
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> Run:
    """The base run with the component of `site` at `at` in span(basis) replaced by the source run's; row i of both is a pair.

    basis [d dim]: orthonormal columns. at: as for `Replace`, the last axis whole; source_at: where the source is read, default
    the same (a role is looked up in each). record: sites of the changed run. Raises DASError, SelectionError, InputsError.
    """
    base, source = (prepare(model, one, tokenizer, prefix) for one in (base, source))
    same_size(base, source)
    _orthonormal(basis)
    place = resolve(site, model.sites)
    given = vectors(model, source, place, at if source_at is None else source_at)
    return run(model, base, record=record, change=Interchange(place, given, basis, at))


def vectors(model: Hookable, inputs: Inputs, place: Site, at: Any) -> Tensor:
    """What a run has at the site's selection [pair … d]."""
    value = run(model, inputs, record=place).cache[place]
    found = value[select(place, value.shape, at, inputs)]
    if found.ndim < 2 or found.shape[-1] != value.shape[-1]:
        raise DASError(
            f"at={at!r} of '{place}' selects {tuple(found.shape)}; allowed: selections that keep the last axis whole"
        )
    return found


def same_size(base: Inputs, source: Inputs) -> None:
    """DASError unless the two have as many sequences."""
    if base.batch != source.batch:
        raise DASError(
            f"base holds {base.batch} sequences and source {source.batch}; allowed: as many, row i of both is a pair"
        )


def _orthonormal(basis: Tensor) -> None:
    if basis.ndim != 2:
        raise DASError(f"basis must be [d dim], got {tuple(basis.shape)}")
    gram = basis.detach().double().T @ basis.detach().double()
    off = float((gram - torch.eye(len(gram), dtype=gram.dtype, device=gram.device)).abs().max())
    if not off < 1e-3:
        raise DASError(
            f"the columns of basis are not orthonormal (BᵀB is off by {off:.2g}); allowed: such as torch.linalg.qr(basis).Q"
        )
