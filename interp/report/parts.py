"""Measured pieces of the report, each a result folder that is reused when its settings are identical."""

from __future__ import annotations

import hashlib
import json
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from interp import record

Tables = Mapping[str, pd.DataFrame]


@dataclass(frozen=True)
class Part:
    """A part's tables and where they are."""

    folder: Path
    tables: Tables
    seconds: float

    def __getitem__(self, name: str) -> pd.DataFrame:
        return self.tables[name]


def part(parent: Path, name: str, settings: dict[str, Any], measure: Callable[[], Tables]) -> Part:
    """The tables of `measure()`, from `parent/name-<hash of settings>` if a finished folder with the same settings is there."""
    text = json.dumps({"name": name, **settings}, sort_keys=True, default=str)
    folder = parent / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"
    about = folder / "provenance.json"
    if about.is_file():
        found = json.loads(about.read_text())
        tables = {path.stem: pd.read_parquet(path) for path in sorted(folder.glob("*.parquet"))}
        return Part(folder, tables, found["seconds"])
    shutil.rmtree(folder, ignore_errors=True)  # provenance is written last: without it the folder is unfinished
    started = time.time()
    tables = measure()
    record.save(folder, tables, config=json.loads(text), started=started)
    return Part(folder, tables, round(time.time() - started, 1))


def fingerprint(model: torch.nn.Module) -> str:
    """A short hash of every weight."""
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]
