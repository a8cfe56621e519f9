"""Changes of a forward pass as frozen values: each says where (`site`, `at`) and what; each clones, then writes.

`at` indexes the site's axes after batch in the dictionary's order (z: position, head, d_head), missing trailing axes
mean all. An entry is an int, slice, list, int tensor [batch] (one index per example) or a role name of the inputs.
A negative position counts back from each example's last real token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from interp.at import POSITION_AXES, select, side
from interp.model.inputs import Inputs
from interp.sites import Site

if TYPE_CHECKING:
    from collections.abc import Mapping


class InterventionError(ValueError):
    """A value that does not fit where it is to be written, or a change that cannot be what was meant."""


@runtime_checkable
class HasCache(Protocol):
    """A recorded run: what `run` returns."""

    @property
    def cache(self) -> Mapping[Any, Tensor]:
        """Recorded values by site."""
        ...


@dataclass(frozen=True, eq=False)
class Intervention:
    """Base: a place and a pure `apply(value, inputs) -> new value`."""

    site: Site | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", Site.parse(self.site))

    @property
    def place(self) -> Site:
        """The parsed site."""
        return Site.parse(self.site)

    def apply(self, value: Tensor, inputs: Inputs) -> Tensor:
        """A new tensor in which the selection holds `edited(selection)`."""
        _refuse_other_padding(self, inputs)
        index = select(self.place, value.shape, getattr(self, "at", ()), inputs)
        chosen = value[index]
        new = self.edited(chosen, value, index)
        changed = value.clone()
        changed[index] = _fit(new, chosen, self.place)
        return changed

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        """What replaces `chosen` = value[index]."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Replace(Intervention):
    """Write `value`: a number or tensor that broadcasts to the selection, or a Run (same site, same index)."""

    value: Any
    at: Any = ()

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        return _from(self.value, self.place, value)[index] if isinstance(self.value, HasCache) else self.value


@dataclass(frozen=True, eq=False)
class Freeze(Intervention):
    """Hold the selection at its value in `run`, whatever else is changed (path patching, severed tracing)."""

    run: HasCache
    at: Any = ()

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        return _from(self.run, self.place, value)[index]


@dataclass(frozen=True, eq=False)
class Add(Intervention):
    """Add `value`, a number or tensor that broadcasts to the selection."""

    value: Any
    at: Any = ()

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        return chosen + _fit(self.value, chosen, self.place)


@dataclass(frozen=True, eq=False)
class Scale(Intervention):
    """Multiply by `factor`, a number or tensor that broadcasts to the selection."""

    factor: Any
    at: Any = ()

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        return chosen * _fit(self.factor, chosen, self.place)


@dataclass(frozen=True, eq=False)
class Zero(Intervention):
    """Zero ablation."""

    at: Any = ()

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        return torch.zeros_like(chosen)


@dataclass(frozen=True, eq=False)
class Mean(Intervention):
    """Mean ablation: the mean over the examples of `reference` (a Run, or a tensor of the site's shape)."""

    reference: Any
    at: Any = ()

    def apply(self, value: Tensor, inputs: Inputs) -> Tensor:
        _refuse_padding(self, self.at, inputs)
        return super().apply(value, inputs)

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        return _from(self.reference, self.place, value)[index].mean(0, keepdim=True)


@dataclass(frozen=True, eq=False)
class Resample(Intervention):
    """Resample ablation: every example gets another example's value, never its own (a derangement drawn from `seed`).

    reference: take the values from this Run instead of from the run that is changed.
    """

    seed: int = 0
    reference: HasCache | None = None
    at: Any = ()

    def apply(self, value: Tensor, inputs: Inputs) -> Tensor:
        _refuse_padding(self, self.at, inputs)
        return super().apply(value, inputs)

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        source = chosen if self.reference is None else _from(self.reference, self.place, value)[index]
        return source[derangement(chosen.shape[0], self.seed).to(source.device)]


@dataclass(frozen=True, eq=False)
class AddNoise(Intervention):
    """Add Gaussian noise of standard deviation `std`, drawn from `seed` (the same on every device)."""

    std: float
    seed: int = 0
    at: Any = ()

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        generator = torch.Generator().manual_seed(self.seed)
        # Drawn position by position, so that a longer sequence begins with the same noise.
        turned = chosen.movedim(1, 0) if chosen.ndim > 1 else chosen
        noise = torch.randn(turned.shape, generator=generator, dtype=torch.float64)
        noise = noise.movedim(0, 1) if chosen.ndim > 1 else noise
        return chosen + (noise * self.std).to(chosen)


@dataclass(frozen=True, eq=False)
class KnockOut(Intervention):
    """Cut attention edges: scores at (head, query, key) become −∞; a query left without an edge gets z = 0.

    site: "L.scores" or "L.cross_scores" (whose keys are source positions). at=(2, "final", [0, 3]): of head 2, from the role
    "final" to positions 0 and 3; missing trailing entries mean all, () every edge.
    """

    at: Any = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.place.name not in ("scores", "cross_scores"):
            raise InterventionError(
                f"KnockOut cuts attention edges: site must be 'L.scores' or 'L.cross_scores', got '{self.site}'"
            )

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        return torch.full_like(chosen, float("-inf"))


@dataclass(frozen=True, eq=False)
class Project(Intervention):
    """Remove what lies in the span of the rows of `basis` [k d], or with keep=True everything else."""

    basis: Tensor
    at: Any = ()
    keep: bool = False

    def edited(self, chosen: Tensor, value: Tensor, index: tuple[Any, ...]) -> Any:
        basis = self.basis[None] if self.basis.ndim == 1 else self.basis
        if basis.ndim != 2 or basis.shape[1] != chosen.shape[-1]:
            raise InterventionError(f"basis for '{self.site}' must be [k {chosen.shape[-1]}], got {tuple(basis.shape)}")
        rank = int(torch.linalg.matrix_rank(basis.double()))
        if rank < basis.shape[0]:
            raise InterventionError(f"the {basis.shape[0]} rows of basis for '{self.site}' span only {rank} dimensions")
        q = torch.linalg.qr(basis.double().T).Q.to(chosen)
        inside = chosen @ q @ q.T
        return inside if self.keep else chosen - inside


def _refuse_other_padding(change: Intervention, inputs: Inputs) -> None:
    """A run to take values from must have its real tokens where this one has them: indices are this one's."""
    for name in ("value", "run", "reference"):
        held = getattr(getattr(change, name, None), "inputs", None)
        if not isinstance(held, Inputs):
            continue
        for field in ("mask", "source_mask"):
            own, other = getattr(inputs, field), getattr(held, field)
            same = own is other or _as_mask(own, other).equal(_as_mask(other, own))
            if not same:
                raise InterventionError(f"the run that {type(change).__name__} at '{change.site}' takes its values from has its "
                                        f"padding elsewhere ({field}); allowed: runs padded alike")  # fmt: skip


def _as_mask(mask: Tensor | None, like: Tensor | None) -> Tensor:
    if mask is not None:
        return mask.cpu()
    assert like is not None
    return torch.ones_like(like).cpu()


def _refuse_padding(change: Intervention, at: Any, inputs: Inputs) -> None:
    """Averages and exchanges over examples would take padding for values; positions or roles pick real tokens."""
    entries = at if isinstance(at, tuple) else (at,)
    for i, axis in enumerate(change.place.spec.axes):
        mask = side(change.place, axis, inputs).mask if axis in POSITION_AXES else None
        whole = i >= len(entries) or isinstance(entries[i], slice)
        if mask is not None and whole and not bool(mask.all()):
            raise InterventionError(f"{type(change).__name__} at '{change.site}' with at={at!r} would read padding; choose "
                                    "positions or roles that are real tokens in every example")  # fmt: skip


def derangement(n: int, seed: int) -> Tensor:
    """A random permutation of n without a fixed point [n]; uniform over derangements. Needs n >= 2."""
    if n < 2:
        raise InterventionError(f"resampling needs at least 2 examples in the batch, got {n}")
    generator = torch.Generator().manual_seed(seed)
    while True:  # about e tries on average
        order = torch.randperm(n, generator=generator)
        if not bool((order == torch.arange(n)).any()):
            return order


def _from(source: Any, site: Site, value: Tensor) -> Tensor:
    """The site's tensor in a Run (or the tensor itself), of the same shape as the live value."""
    found = source.cache[site] if isinstance(source, HasCache) else torch.as_tensor(source)
    if found.shape != value.shape:
        raise InterventionError(
            f"'{site}' is {tuple(found.shape)} in the given run and {tuple(value.shape)} in this one; "
            "both must have the same batch and length"
        )
    return found.to(value)


def _fit(new: Any, chosen: Tensor, site: Site) -> Tensor:
    """`new` broadcast to the selection."""
    new = torch.as_tensor(new).to(chosen)
    try:
        return new.expand(chosen.shape)
    except RuntimeError:
        raise InterventionError(
            f"a value of shape {tuple(new.shape)} does not broadcast to the selection of '{site}', "
            f"shape {tuple(chosen.shape)} (batch first)"
        ) from None
