"""A recorded corpus read back from its shards, memory-mapped: nothing is read before it is indexed."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from interp.sites import Site, named, suggest

FORMAT = "interp-activations-1"
COLUMNS = ("example", "position", "token")


class CorpusError(ValueError):
    """A recording that cannot be made, resumed or read as asked; the message names what was found and what is allowed."""


def open_activations(folder: str | Path) -> Activations:
    """The finished recording in `folder`, memory-mapped: nothing is read before it is indexed.

    Raises CorpusError for a folder that is no recording, is unfinished, or has a shard of another size than its index says.
    """
    index = read_index(Path(folder))
    if not index["finished"]:
        rows = sum(shard["rows"] for shard in index["shards"])
        raise CorpusError(f"{folder} is unfinished ({rows} rows in {len(index['shards'])} shards); allowed: the same call of "
                          "record_corpus again, which goes on from there")  # fmt: skip
    return Activations(Path(folder), index)


class Activations:
    """A recorded corpus: `activations["3.resid_post"][10:20]`, `.table()`, `.batches("3.resid_post", 64, shuffle_seed=0)`.

    `sites` in the model's order; `index` is index.json (model config, hash of the weights, positions, dtype, shards, versions).
    """

    def __init__(self, folder: Path, index: Mapping[str, Any]) -> None:
        self.folder, self.index = folder, index
        self.sites = tuple(Site.parse(site) for site in index["sites"])
        self._starts = list(accumulate((shard["rows"] for shard in index["shards"]), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __repr__(self) -> str:
        shards, names = self.index["shards"], self.index["sites"]
        sites = f"'{names[0]}'" if len(names) == 1 else f"{len(names)} sites '{names[0]}' … '{names[-1]}'"
        size = sum(shard["bytes"] for shard in shards) / 1e6
        rows = f"{len(self):,} rows of {shards[-1]['examples']:,} examples"
        return f"Activations({self.folder}: {rows}, {sites}, {self.index['dtype']}, {size:,.1f} MB in {len(shards)} shard(s))"

    def __getitem__(self, site: Site | str) -> SiteRows:
        found = named(Site.parse(site), self.sites)
        if len(found) != 1:
            names = self.index["sites"]
            said = (
                f"can mean {' or '.join(map(str, found))}" if found else f"was not recorded{suggest(str(site), names)}"
            )
            raise KeyError(f"'{site}' {said}; recorded: {', '.join(names)}")
        return SiteRows(self, found[0])

    def table(self, rows: Any = None) -> pd.DataFrame:
        """Columns example (counted over the whole corpus), position, token; the index is the row's number."""
        rows = _row_numbers(slice(None) if rows is None else rows, len(self))
        return pd.DataFrame({name: self.read(name, rows).numpy() for name in COLUMNS}, index=rows.numpy())

    def batches(self, site: Site | str, size: int, shuffle_seed: int | None = None) -> Iterator[Tensor]:
        """One site's rows, `size` at a time, in the order of `row_batches`: the same for every site."""
        return map(self[site].__getitem__, self.row_batches(size, shuffle_seed))

    def row_batches(self, size: int, shuffle_seed: int | None = None) -> Iterator[Tensor]:
        """Row numbers, `size` at a time (the last may be fewer), each row once.

        shuffle_seed: shards in random order, and the rows within each, so the rows of one batch come from few shards.
        """
        if not isinstance(size, int) or size < 1:
            raise CorpusError(f"size={size!r} is not allowed; allowed: an int from 1")
        generator = None if shuffle_seed is None else torch.Generator().manual_seed(shuffle_seed)

        def order(count: int) -> Tensor:
            return torch.arange(count) if generator is None else torch.randperm(count, generator=generator)

        left = torch.empty(0, dtype=torch.long)
        for shard in order(len(self._starts) - 1).tolist():
            start, end = self._starts[shard : shard + 2]
            *full, left = torch.cat([left, start + order(end - start)]).split(size)
            yield from full
        yield left

    def read(self, name: str, rows: Tensor) -> Tensor:
        """Copies of the rows of one stored tensor [row …], whichever shards they lie in."""
        shard_of = torch.bucketize(rows, torch.tensor(self._starts[1:]), right=True)
        needed = shard_of.unique().tolist() or [0]
        if len(needed) == 1:
            return self.mapped(name, needed[0])[rows - self._starts[needed[0]]]
        first = self.mapped(name, needed[0])
        out = first.new_empty((len(rows), *first.shape[1:]))
        for shard in needed:
            inside = shard_of == shard
            out[inside] = self.mapped(name, shard)[rows[inside] - self._starts[shard]]
        return out

    def mapped(self, name: str, shard: int) -> Tensor:
        """One tensor of one shard as it lies on disk. Raises CorpusError."""
        path = self.folder / self.index["shards"][shard]["file"]
        try:
            with safe_open(path, "pt") as opened:  # 0.2 ms, and no limit on open files to run into
                return opened.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CorpusError(f"{path} cannot be read: {error}; record the corpus again into a new folder") from error


class SiteRows:
    """One site's rows [row …] on disk: index by an int, a slice, or ints [row]; what comes back is a copy in memory."""

    def __init__(self, activations: Activations, site: Site) -> None:
        self.activations, self.site = activations, site
        first = activations.mapped(str(site), 0)
        self.shape, self.dtype = (len(activations), *first.shape[1:]), first.dtype

    def __len__(self) -> int:
        return len(self.activations)

    def __repr__(self) -> str:
        return f"SiteRows('{self.site}' {self.shape}, {self.dtype}, on disk)"

    def __getitem__(self, rows: Any) -> Tensor:
        one = isinstance(rows, int | np.integer) and not isinstance(rows, bool)
        got = self.activations.read(str(self.site), _row_numbers([rows] if one else rows, len(self)))
        return got[0] if one else got


def read_index(folder: Path) -> dict[str, Any]:
    """index.json, its shards' sizes checked. CorpusError when it is not ours or a shard is not whole."""
    path = folder / "index.json"
    if not path.is_file():
        raise CorpusError(
            f"{folder} is no recording: index.json is missing; allowed: a folder written by record_corpus"
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorpusError(f"{path} is not JSON: {error}") from error
    found = index.get("format") if isinstance(index, dict) else type(index).__name__
    if found != FORMAT:
        raise CorpusError(f"{path} has format {found!r}; allowed: {FORMAT!r}")
    for shard in index["shards"]:
        file = folder / shard["file"]
        size = file.stat().st_size if file.is_file() else None
        if size != shard["bytes"]:
            held = "is missing" if size is None else f"has {size} bytes, its index says {shard['bytes']}"
            raise CorpusError(f"{file} {held}; record the corpus again into a new folder")
    return index


def _row_numbers(rows: Any, count: int) -> Tensor:
    """Row numbers [row] from 0. IndexError naming what is out of range, CorpusError for anything but ints."""
    if isinstance(rows, slice):
        wanted = range(*rows.indices(count))
        return torch.arange(wanted.start, wanted.start + len(wanted) * wanted.step, wanted.step)
    array = np.array(rows.numpy(force=True) if isinstance(rows, Tensor) else rows)
    if array.ndim != 1 or (array.dtype.kind not in "iu" and array.size):
        raise CorpusError(f"rows must be an int, a slice, or ints [row], got {array.dtype} {array.shape}")
    numbers = torch.from_numpy(array.astype(np.int64))
    outside = numbers[(numbers < -count) | (numbers >= count)]
    if len(outside):
        raise IndexError(f"row {int(outside[0])} is out of range; allowed: 0 … {count - 1}, or negative from the end")
    return torch.where(numbers < 0, numbers + count, numbers)
