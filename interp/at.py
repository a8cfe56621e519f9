"""Which entries of a site an intervention or a metric means: ints, slices, lists, per-example positions, roles."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from interp.model.inputs import Inputs
from interp.sites import Site

POSITION_AXES = ("position", "query", "key")
_SOURCE_AXES = {("cross_k", "position"), ("cross_v", "position"), ("cross_scores", "key"), ("cross_pattern", "key")}


class SelectionError(ValueError):
    """An index that selects nothing, is out of range, or names what is not there."""


def positions(inputs: Inputs, position: Any, what: str = "position") -> Tensor:
    """Per-example positions [batch] from an int (negative: counted back from the last real token), an int tensor
    [batch], or a role name. Raises SelectionError when out of range or on padding."""
    device = inputs.tokens.device
    if isinstance(position, str):
        if position not in inputs.roles:
            known = ", ".join(map(repr, inputs.roles)) or "none: these inputs carry no roles"
            raise SelectionError(f"unknown role {position!r} for {what}; allowed: {known}")
        position = inputs.roles[position]
    if isinstance(position, Tensor):
        if position.dtype.is_floating_point or position.dtype == torch.bool or position.shape != (inputs.batch,):
            raise SelectionError(
                f"per-example {what} must be an int tensor [{inputs.batch}] (one per example), "
                f"got {position.dtype} {tuple(position.shape)}"
            )
        index = position.to(device)
    elif isinstance(position, int) and not isinstance(position, bool):
        index = torch.full((inputs.batch,), position, device=device)
        if position < 0:
            index = inputs.last() + 1 + position
    else:
        raise SelectionError(f"{what} must be an int, an int tensor [batch] or a role name, got {position!r}")
    if bool(((index < 0) | (index >= inputs.length)).any()):
        raise SelectionError(f"{what} {_show(position)} is out of range; allowed: 0 … {inputs.length - 1}, "
                             "or negative from each example's last real token")  # fmt: skip
    if inputs.mask is not None:
        real = inputs.mask.gather(1, index[:, None])[:, 0]
        if not bool(real.all()):
            rows = (~real).nonzero()[:, 0].tolist()
            raise SelectionError(f"{what} {_show(position)} is padding in example(s) {rows[:5]}")
    return index


def side(site: Site, axis: str, inputs: Inputs) -> Inputs:
    """Whose positions an axis counts: the source's in an encoder and where cross-attention reads it, else the target's."""
    return inputs.encoder if site.stack == "encoder" or (site.name, axis) in _SOURCE_AXES else inputs


def select(site: Site, shape: torch.Size | tuple[int, ...], at: Any, inputs: Inputs) -> tuple[Any, ...]:
    """An index for a value of `site` with axes [batch, *site axes]; missing trailing axes mean all.

    A kept axis (slice, list) stays in the selection; an int, a per-example tensor or a role is dropped from it.
    """
    axes = site.spec.axes
    at = at if isinstance(at, tuple) else (at,)
    if len(at) > len(axes):
        raise SelectionError(f"at={at!r} has {len(at)} entries, but '{site}' has {len(axes)} axes after batch: "
                             f"{', '.join(axes)}")  # fmt: skip
    entries = [
        _entry(site, axis, size, entry, side(site, axis, inputs))
        for axis, size, entry in zip(axes, shape[1:], at, strict=False)
    ]
    if all(isinstance(entry, int | slice) for entry in entries):
        return (slice(None), *entries)
    return _mesh(shape, entries, inputs)


def _entry(site: Site, axis: str, size: int, entry: Any, inputs: Inputs) -> Any:
    """One axis's index as int, slice, list of ints, or per-example tensor [batch]; checked against the axis's size."""
    what = f"{axis} of '{site}'"
    if isinstance(entry, slice) and entry.step is not None and entry.step < 1:
        raise SelectionError(
            f"{what}: {entry} steps backwards; allowed: steps of 1 or more, or a list in the order wanted"
        )
    if isinstance(entry, slice):
        if axis in POSITION_AXES and inputs.mask is not None and min(entry.start or 0, entry.stop or 0) < 0:
            raise SelectionError(f"{what}: {entry} counts from the end, which padding moves; give positions from the start, "
                                 "an int such as -1, an int tensor [batch] or a role")  # fmt: skip
        if len(range(*entry.indices(size))) == 0:
            raise SelectionError(f"{what}: {entry} selects nothing of 0 … {size - 1}")
        return entry
    if isinstance(entry, range):
        entry = list(entry)
    if isinstance(entry, list):
        if not entry:
            raise SelectionError(f"{what}: an empty list selects nothing; allowed: 0 … {size - 1}")
        if not all(isinstance(one, int) and not isinstance(one, bool) for one in entry):
            raise SelectionError(f"{what}: a list may hold ints only, got {entry!r}")
        padded = axis in POSITION_AXES and inputs.mask is not None
        if padded and min(entry) < 0:
            raise SelectionError(
                f"{what}: {entry!r} counts from the end, which padding moves; a list may hold ints from 0"
            )
        for one in entry if padded else ():
            positions(inputs, one, what)  # in range, and a real token of every example
        return entry if padded else [_entry(site, axis, size, one, inputs) for one in entry]
    if axis in POSITION_AXES and (
        isinstance(entry, str | Tensor) or _negative(entry) or _may_be_padding(entry, inputs)
    ):
        index = positions(inputs, entry, what)
        return index if isinstance(entry, str | Tensor) or inputs.mask is not None else int(index[0])
    if isinstance(entry, Tensor):
        if entry.dtype.is_floating_point or entry.dtype == torch.bool or entry.shape != (inputs.batch,):
            raise SelectionError(f"{what}: a tensor index must be ints [{inputs.batch}] (one per example), "
                                 f"got {entry.dtype} {tuple(entry.shape)}")  # fmt: skip
        if bool(((entry < 0) | (entry >= size)).any()):
            raise SelectionError(f"{what}: {_show(entry)} is out of range; allowed: 0 … {size - 1}")
        return entry
    if not isinstance(entry, int) or isinstance(entry, bool):
        raise SelectionError(f"{what} must be an int, slice, list, int tensor [batch] or role name, got {entry!r}")
    if not -size <= entry < size:
        raise SelectionError(f"{what}: {entry} is out of range; allowed: 0 … {size - 1}")
    return entry % size


def _negative(entry: Any) -> bool:
    return isinstance(entry, int) and not isinstance(entry, bool) and entry < 0


def _may_be_padding(entry: Any, inputs: Inputs) -> bool:
    return inputs.mask is not None and isinstance(entry, int) and not isinstance(entry, bool)


def _mesh(shape: torch.Size | tuple[int, ...], entries: list[Any], inputs: Inputs) -> tuple[Tensor, ...]:
    """The index as tensors that broadcast to [batch, *kept axes]."""
    device = inputs.tokens.device
    entries = [list(range(shape[i + 1]))[e] if isinstance(e, slice) else e for i, e in enumerate(entries)]
    kept = [i for i, entry in enumerate(entries) if isinstance(entry, list)]
    ones = [1] * len(kept)
    index = [torch.arange(shape[0], device=device).view(-1, *ones)]
    for i, entry in enumerate(entries):
        if isinstance(entry, list):
            axis = kept.index(i)
            view = [1, *ones[:axis], len(entry), *ones[axis + 1 :]]
            index.append(torch.tensor(entry, device=device).view(view))
        elif isinstance(entry, Tensor):
            index.append(entry.to(device).view(-1, *ones))
        else:
            index.append(torch.tensor(entry, device=device))
    return tuple(index)


def _show(position: Any) -> str:
    return str(position.tolist()) if isinstance(position, Tensor) else repr(position)
