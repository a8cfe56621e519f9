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
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from tqdm.auto import tqdm

from interp.activations import FORMAT, Activations, CorpusError, open_activations
from interp.activations import read_index as _read_index
from interp.at import SelectionError, side
from interp.at import positions as positions_of
from interp.hookable import Hookable, require_hookable
from interp.model.inputs import Inputs, InputsError
from interp.record import write_atomic, write_json
from interp.run import NotReachedError, check_weights, prepare, record_sites
from interp.sites import Site
from interp.tokens import TokenizerError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
SHARD_BYTES = 2**30  # a shard waits in memory until it is written; many wide sites must not make that tens of GB


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
