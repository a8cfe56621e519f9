"""Finished cells of a sweep, in memory or in a file, so that a stopped sweep goes on where it was."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from interp.interventions import HasCache, Intervention
from interp.metrics import Metric
from interp.record import write_atomic
from interp.sites import Site
from interp.sweep.errors import SweepError

_EVERY = 10.0  # seconds between writes


class Checkpoint:
    """Per part of a sweep its values [cell batch] and which cells are done [cell]; path=None keeps them in memory.

    A file is written to a temporary name and renamed. Raises SweepError for a file of another sweep, or one that is none.
    """

    def __init__(self, path: str | Path | None = None) -> None:
        if path is not None and not isinstance(path, str | Path):
            raise SweepError(f"checkpoint={path!r} is not allowed; allowed: a path, a Checkpoint, or None")
        self.path = None if path is None else Path(path)
        self.parts: dict[str, tuple[Tensor, Tensor]] = {}
        self.marks: dict[str, str] = {}
        self._written = time.monotonic()
        if self.path is not None and self.path.exists():
            self._read(self.path)

    def __repr__(self) -> str:
        done = ", ".join(f"{name} {int(done.sum())} of {len(done)}" for name, (_, done) in self.parts.items())
        return f"Checkpoint({'in memory' if self.path is None else self.path}: {done or 'nothing yet'})"

    def part(self, name: str, mark: str, empty: Tensor) -> tuple[Tensor, Tensor]:
        """The values and the done cells of one part; `mark` identifies everything that its values depend on."""
        if name in self.parts and self.marks[name] != mark:
            raise SweepError(f"{self!r} holds another sweep of {name!r}: model, inputs, metric, changes or cells differ; "
                             "allowed: the same call again, or another path")  # fmt: skip
        if name not in self.parts:
            self.parts[name], self.marks[name] = (empty, torch.zeros(len(empty), dtype=torch.bool)), mark
        return self.parts[name]

    def save(self, now: bool = False) -> None:
        """Write the file, at most every ten seconds unless `now`."""
        if self.path is None or (not now and time.monotonic() - self._written < _EVERY):
            return
        tensors = {f"values.{name}": values for name, (values, _) in self.parts.items()}
        tensors |= {f"done.{name}": done for name, (_, done) in self.parts.items()}
        marks = {"interp_sweep": json.dumps(self.marks)}
        write_atomic(self.path, lambda temporary: save_file(tensors, temporary, metadata=marks))
        self._written = time.monotonic()

    def _read(self, path: Path) -> None:
        try:
            with safe_open(path, "pt") as file:
                self.marks = json.loads((file.metadata() or {})["interp_sweep"])
                self.parts = {
                    name: (file.get_tensor(f"values.{name}"), file.get_tensor(f"done.{name}")) for name in self.marks
                }
        except (SafetensorError, KeyError, ValueError, OSError) as error:
            raise SweepError(f"{path} is no checkpoint of a sweep, or a truncated one ({error})") from None


def mark_of(*things: Any) -> str:
    """A hash of values that decide a sweep's numbers: tensors, interventions, runs, configs, plain values."""
    digest = hashlib.blake2b(digest_size=16)
    _feed(digest, things, {})
    return digest.hexdigest()


def _feed(digest: Any, thing: Any, seen: dict[int, tuple[Tensor, bytes]]) -> None:
    """Adds one value to the digest; a tensor that many changes share is read once."""
    digest.update(type(thing).__name__.encode())
    if isinstance(thing, Tensor):
        if id(thing) not in seen:
            raw = thing.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
            own = hashlib.blake2b(f"{thing.dtype}{tuple(thing.shape)}".encode() + raw, digest_size=16)
            seen[id(thing)] = thing, own.digest()  # held, so that no other tensor takes its id
        digest.update(seen[id(thing)][1])
    elif isinstance(thing, Intervention):
        site = thing.place
        for field in dataclasses.fields(thing):
            value = getattr(thing, field.name)
            _feed(digest, value.cache[site] if isinstance(value, HasCache) else value, seen)
    elif isinstance(thing, Mapping):
        for key in sorted(thing, key=str):
            _feed(digest, (str(key), thing[key]), seen)
    elif isinstance(thing, list | tuple) and not isinstance(thing, Site):
        for one in thing:
            _feed(digest, one, seen)
    elif isinstance(thing, Metric):
        _feed(digest, (thing.name, thing.positions, thing.entries, thing.unit, thing.function), seen)
    elif isinstance(thing, CodeType):
        _feed(digest, (thing.co_code, thing.co_consts, thing.co_names), seen)
    elif isinstance(thing, FunctionType):  # what it does, and what it holds on to
        closure = [cell.cell_contents for cell in thing.__closure__ or ()]
        _feed(digest, (thing.__qualname__, thing.__code__, thing.__defaults__, closure), seen)
    elif isinstance(thing, partial):
        _feed(digest, (thing.func, thing.args, thing.keywords), seen)
    elif isinstance(thing, set | frozenset):
        _feed(digest, sorted(map(repr, thing)), seen)
    elif type(thing).__repr__ is object.__repr__ and hasattr(thing, "__dict__"):  # whose repr is an address
        _feed(digest, (type(thing).__qualname__, vars(thing)), seen)
    elif isinstance(thing, np.ndarray):
        digest.update(thing.tobytes())
    else:
        digest.update(repr(thing).encode())
