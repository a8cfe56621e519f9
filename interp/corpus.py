"""Record a corpus: activations streamed to a folder of safetensors shards, and read back memory-mapped.

A folder holds `index.json` (what was recorded, of which model, and the list of shards) and `shard-00000.safetensors`, …:
one tensor [row …] per site, and the int tensors `example`, `position`, `token` that say what each row is. A shard ends
where a batch ends; the index names only shards that are whole, so whatever is interrupted is done again, never repaired.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from interp.at import SelectionError, side
from interp.at import positions as positions_of
from interp.hookable import Hookable, require_hookable
from interp.model.inputs import Inputs, InputsError
from interp.record import write_atomic, write_json
from interp.run import NotReachedError, check_weights, prepare, record_sites
from interp.sites import Site, named, suggest
from interp.tokens import TokenizerError

FORMAT = "interp-activations-1"
COLUMNS = ("example", "position", "token")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHARD_BYTES = 2**30  # a shard waits in memory until it is written; many wide sites must not make that tens of GB


class CorpusError(ValueError):
    """A recording that cannot be made, resumed or read as asked; the message names what was found and what is allowed."""


def record_corpus(
    model: Hookable,
    batches: Iterable[Any],
    sites: str | Site | Iterable[str | Site],
    folder: str | Path,
    *,
    positions: int | str | None = None,
    dtype: torch.dtype | None = None,
    shard_tokens: int = 65_536,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
    progress: bool = True,
) -> Activations:
    """Write the rows of `sites` at every real token of every batch into `folder`, one batch in memory at a time.

    batches: each anything `run` accepts; read once, in order. sites: as `record=` of `run`, all of one side (an
    encoder-decoder's source or its target), none whose axes are edges. positions: None = every real token, or one row an
    example: an int (-1: the last real token) or a role. dtype: None = as computed. shard_tokens: a shard is written with the
    batch that brings it to so many rows, or to 1 GB. Each pass ends at the last site asked for: later layers and the
    unembedding do not run. Called again with the same arguments and batches after an interruption, it runs only what no
    shard holds and leaves the same bytes as an uninterrupted call; a finished folder is opened, its batches not read.
    Raises CorpusError, and what `run` raises, with the number of the batch.
    """
    require_hookable(model)
    found = _row_sites(model, sites)
    _check_arguments(batches, positions, dtype, shard_tokens)
    recording = _Recording(Path(folder), _header(model, found, positions, dtype, shard_tokens, prefix))
    if recording.index["finished"]:
        return open_activations(folder)
    for number, batch in enumerate(tqdm(batches, desc="recording", unit="batch", disable=not progress)):
        try:
            inputs = prepare(model, batch, tokenizer, prefix)
            read = side(found[0], "position", inputs)
            example, position = _places(read, positions)
            if recording.is_new(inputs, position):
                places = example * read.length + position
                token = read.tokens[example, position]
                recording.add(_rows(model, inputs, found, places, dtype), example, position, token)
        except (InputsError, TokenizerError, SelectionError, NotReachedError, CorpusError) as error:
            raise type(error)(f"batch {number}: {error}") from error
    recording.finish()
    return open_activations(folder)


class _Enough(Exception):
    """Every site asked for has been reached: the rest of the pass is not needed."""


class _RowTap:
    """Keeps the rows of every site asked for on the CPU, and ends the pass once it has them all."""

    def __init__(self, sites: list[Site], places: Tensor, dtype: torch.dtype | None) -> None:
        self.sites, self.places, self.dtype = set(sites), places, dtype
        self.kept: dict[str, Tensor] = {}
        self.finite = True

    def wants(self, site: Site) -> bool:
        return site in self.sites

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        if site not in self.sites:
            return value
        rows = value.detach().flatten(0, 1).index_select(0, self.places)
        kept = self.kept[str(site)] = rows.to("cpu", self.dtype)
        if not bool(kept.isfinite().all()):
            if bool(rows.isfinite().all()):  # a number became infinite on the way to a smaller type
                raise CorpusError(f"'{site}' reaches {float(rows.abs().max()):.3g}, which {kept.dtype} cannot hold; allowed: "
                                  "dtype=torch.bfloat16 or torch.float32, or None to store what was computed")  # fmt: skip
            self.finite = False
        if len(self.kept) == len(self.sites):
            raise _Enough
        return value


def _rows(model, inputs: Inputs, sites: list[Site], places: Tensor, dtype: torch.dtype | None) -> dict[str, Tensor]:
    """Each site's rows at `places` (numbers into [batch pos] flattened), from one pass that ends at the last site."""
    tap = _RowTap(sites, places, dtype)
    with torch.no_grad(), contextlib.suppress(_Enough):
        model(inputs, tap)
    missing = [str(site) for site in sites if str(site) not in tap.kept]
    if missing:
        raise NotReachedError(f"asked for but never reached in this forward pass: {', '.join(missing)}")
    if not tap.finite:
        check_weights(model)
    return tap.kept


def _places(read: Inputs, position: int | str | None) -> tuple[Tensor, Tensor]:
    """Example and position of each row to keep: all real tokens in reading order, or one per example."""
    if position is not None:
        return torch.arange(read.batch, device=read.tokens.device), positions_of(read, position, "positions")
    real = torch.ones_like(read.tokens, dtype=torch.bool) if read.mask is None else read.mask
    example, place = real.nonzero(as_tuple=True)
    return example, place


class _Recording:
    """The folder being written: shards so far, the rows waiting for the next, and a running hash of the batches seen."""

    def __init__(self, folder: Path, header: dict[str, Any]) -> None:
        self.folder, self.index = folder, _begun(folder, header)
        self.ends = {
            shard["batches"]: shard for shard in self.index["shards"]
        }  # how many batches had come where it ends
        self.recorded = max(self.ends, default=0)
        self.batches = self.examples = self.rows = 0
        self.hash = ""
        self.waiting: dict[str, Tensor] = {}  # of which the first `rows` rows are taken

    def is_new(self, inputs: Inputs, position: Tensor) -> bool:
        """Count and hash a batch; whether no shard holds it. CorpusError where a shard's batches were others."""
        fields = {name: getattr(inputs, name) for name in Inputs.__dataclass_fields__}
        tensors = {name: value for name, value in fields.items() if isinstance(value, Tensor)}
        self.hash = _hash(self.hash, {**tensors, "positions": position})
        self.batches, self.examples = self.batches + 1, self.examples + inputs.batch
        if self.batches in self.ends and self.ends[self.batches]["hash"] != self.hash:
            file = self.folder / self.ends[self.batches]["file"]
            raise CorpusError(f"{file} was recorded from other batches than those up to this one: other tokens or masks, or cut "
                              "otherwise; allowed: the same, or a new folder")  # fmt: skip
        return self.batches > self.recorded

    def add(self, rows: dict[str, Tensor], example: Tensor, position: Tensor, token: Tensor) -> None:
        """Keep the rows of the batch just counted; write a shard when there are enough."""
        first = self.examples - 1 - int(example[-1])  # the batch's first: its last example too has a real token
        rows = {**rows, "example": first + example.cpu(), "position": position.cpu(), "token": token.cpu()}
        if not self.waiting:  # one buffer a tensor, used for every shard: many small pieces would scatter over the heap
            row_bytes = sum(value.nbytes for value in rows.values()) // len(token)
            self.full = min(self.index["shard_tokens"], max(SHARD_BYTES // row_bytes, 1))
            room = self.full + len(token)
            self.waiting = {name: value.new_empty(room, *value.shape[1:]) for name, value in rows.items()}
        end = self.rows + len(token)
        for name, value in rows.items():
            if end > len(self.waiting[name]):  # a longer batch than the first
                self.waiting[name] = torch.cat([self.waiting[name][: self.rows], value])
            else:
                self.waiting[name][self.rows : end] = value
        self.rows = end
        if self.rows >= self.full:
            self.write()

    def write(self) -> None:
        """A shard of what waits, then the index that names it: killed in between, the shard is written again."""
        if not self.index["shards"]:  # the folder says what it is before it holds anything
            write_json(self.folder / "index.json", self.index)
        path = self.folder / f"shard-{len(self.index['shards']):05d}.safetensors"
        tensors = {name: value[: self.rows] for name, value in self.waiting.items()}
        write_atomic(path, lambda temporary: save_file(tensors, temporary))
        about = {"file": path.name, "rows": self.rows, "bytes": path.stat().st_size}
        self.index["shards"].append({**about, "batches": self.batches, "examples": self.examples, "hash": self.hash})
        write_json(self.folder / "index.json", self.index)
        self.rows = 0

    def finish(self) -> None:
        """The last shard and the mark that there will be no more. CorpusError when batches were missing."""
        if self.batches < max(self.recorded, 1):
            needed = (
                f"{self.folder} was recorded from {self.recorded} or more" if self.recorded else "nothing to record"
            )
            raise CorpusError(f"batches ended after {self.batches}: {needed}")
        if self.rows:
            self.write()
        self.index["finished"] = True
        write_json(self.folder / "index.json", self.index)


def _begun(folder: Path, header: dict[str, Any]) -> dict[str, Any]:
    """The index to go on from: a new one, or the folder's, whose every argument must be the same. Raises CorpusError."""
    entries = set(folder.iterdir()) if folder.exists() else set()
    rests = {path for path in entries if path.name.startswith((".index.", ".shard-"))}  # of writes that were killed
    if entries == rests:
        index = {**header, "finished": False, "shards": []}
    elif (folder / "index.json").is_file():
        index = _read_index(folder)
    else:
        raise CorpusError(f"{folder} holds other files, such as {min(entries - rests).name}; allowed: a new folder, an empty "
                          "one, or a recording")  # fmt: skip
    for name, asked in header.items():
        held = index.get(name)
        if held == asked or (name == "versions" and index["finished"]):
            continue
        if isinstance(held, dict) and isinstance(asked, dict):  # only what differs
            names = [key for key in sorted({*held, *asked}) if held.get(key) != asked.get(key)]
            held, asked = ({key: one.get(key) for key in names} for one in (held, asked))
        raise CorpusError(f"{folder} was recorded with {name}={held!r}, this call asks for {asked!r}; allowed: the same, or a "
                          "new folder")  # fmt: skip
    for path in rests:
        path.unlink()
    return index


def _header(model: Any, sites: list[Site], position, dtype, shard_tokens: int, prefix) -> dict[str, Any]:
    """What two calls must share to write into one folder, as JSON gives it back."""
    config = model.config
    header = {
        "format": FORMAT,
        "model": type(model).__name__,
        "config": dataclasses.asdict(config) if dataclasses.is_dataclass(config) else vars(config),  # type: ignore[arg-type]
        "weights": _hash("", dict(getattr(model, "named_parameters", list)())),
        "sites": [str(site) for site in sites],
        "positions": position,
        "dtype": "as computed" if dtype is None else str(dtype),
        "shard_tokens": shard_tokens,
        "prefix": None if prefix is None else list(prefix),
        "versions": {name: version(name) for name in ("interp", "torch", "safetensors")},
    }
    return json.loads(
        json.dumps(header, default=lambda value: sorted(value) if isinstance(value, frozenset) else str(value))
    )


def _row_sites(model: Hookable, sites: Any) -> list[Site]:
    """The sites in the model's order. CorpusError unless each has a position axis, and all count the same positions."""
    asked = set(record_sites(model, sites))
    found = [site for site in model.sites if site in asked]
    if not found:
        raise CorpusError("sites is empty: nothing to record")
    for site in found:
        if "position" not in site.spec.axes:
            raise CorpusError(f"'{site}' has axes {', '.join(site.spec.axes)}: values of edges between tokens, none of them one "
                              "token's row; allowed: sites with a position axis, or interp.run on a batch")  # fmt: skip
    token = torch.zeros(1, 1, dtype=torch.long)
    target = Inputs(token, source=token)
    sides = {side(site, "position", target) is target: site for site in reversed(found)}
    if len(sides) > 1:
        raise CorpusError(f"'{sides[False]}' has rows for the source's tokens, '{sides[True]}' for the target's; allowed: sites "
                          "of one of them, such as 'encoder.resid_post', the others in a second folder")  # fmt: skip
    return found


def _check_arguments(batches: Any, position: Any, dtype: Any, shard_tokens: Any) -> None:
    single = isinstance(batches, str | Inputs) or (isinstance(batches, Tensor) and batches.ndim < 3)
    if single or not isinstance(batches, Iterable):
        raise CorpusError(f"batches is one {type(batches).__name__}; allowed: an iterable of batches, such as [batch] or "
                          "tokens.split(8)")  # fmt: skip
    if isinstance(position, bool) or not isinstance(position, int | str | None):
        raise CorpusError(
            f"positions={position!r} is not allowed; allowed: None (every real token), an int or a role name"
        )
    if dtype is not None and dtype not in DTYPES:
        raise CorpusError(f"dtype={dtype!r} is not allowed; allowed: None, {', '.join(map(str, DTYPES))}")
    if not isinstance(shard_tokens, int) or shard_tokens < 1:
        raise CorpusError(f"shard_tokens={shard_tokens!r} is not allowed; allowed: an int from 1")


def _hash(before: str, tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of `before` and each tensor's name, type, shape and bytes (1.4 GB/s: 0.4 s for GPT-2's weights)."""
    hashed = hashlib.sha256(before.encode())
    for name, value in tensors.items():
        hashed.update(f"{name} {value.dtype} {tuple(value.shape)} ".encode())
        hashed.update(memoryview(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return hashed.hexdigest()


def open_activations(folder: str | Path) -> Activations:
    """The finished recording in `folder`, memory-mapped: nothing is read before it is indexed.

    Raises CorpusError for a folder that is no recording, is unfinished, or has a shard of another size than its index says.
    """
    index = _read_index(Path(folder))
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


def _read_index(folder: Path) -> dict[str, Any]:
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
