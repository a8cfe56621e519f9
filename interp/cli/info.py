"""`interp info`: a model by name, described in aligned text."""

from __future__ import annotations

import json
import platform
import unicodedata
from pathlib import Path

import torch

from interp import record
from interp.analyses.describe import model_info
from interp.bridges.huggingface import BridgeError, from_huggingface
from interp.model.transformer import Transformer
from interp.report.sweep_inputs import SOURCES, open_model

NUMBERS = ("layers", "parameters", "share", "of attention + FFN", "cells", "FLOPs", "bytes")


class InfoError(ValueError):
    """A model that cannot be opened; the message names what was given and what is allowed."""


def lines(name: str, length: int = 0, batch: int = 1) -> list[str]:
    """What is printed. name: as `open_any` takes it, or "" for what is installed and the shipped model. length: 0 = default."""
    installed = [] if name else [*versions(), ""]
    model, title = open_any(name or "shipped")
    found = model_info(model, length or None, batch)
    text = [*installed, title, found.title, f"{found.config}", *(f"not known: {one}" for one in found.missing)]
    for heading, columns, rows in found.cards:
        text += ["", heading, *aligned(columns, rows)]
    return text


def versions() -> list[str]:
    """What is installed and what it runs on."""
    about = record.provenance()
    packages = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    return [f"python {platform.python_version()}, {packages}",
            f"threads {torch.get_num_threads()}, GPU {about['machine']['gpu'] or 'none'}"]  # fmt: skip


def open_any(name: str) -> tuple[Transformer, str]:
    """What `interp sweep` opens, or a transformers folder or hub name; and what it is called. Raises InfoError, BridgeError."""
    folder = Path(name)
    # A path that holds nothing is no hub name: asking the hub for it takes a minute and says less.
    here = folder.exists() or name.startswith((".", "/")) or ("/" in name and folder.parent.is_dir())
    if name in ("shipped", "smollm2") or (here and not _of_transformers(folder)):
        opened = open_model(name)
        return opened.model, opened.title
    try:
        return from_huggingface(name), name
    except BridgeError:
        raise
    except (OSError, ValueError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise InfoError(
            f"model {name!r} cannot be opened: {reason}; allowed: {SOURCES}, or a transformers folder or hub name"
        ) from None


def _of_transformers(folder: Path) -> bool:
    """Whether a folder's config.json is one of transformers'."""
    try:
        return "model_type" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def aligned(columns: list[str], rows: list[list[str]]) -> list[str]:
    """A table as lines of text: numbers to the right, words to the left, two spaces between columns."""
    table = [columns, *rows]
    widths = [max(_width(row[i]) for row in table) for i in range(len(columns))]

    def cell(row: list[str], i: int) -> str:
        gap = " " * (widths[i] - _width(row[i]))
        return gap + row[i] if columns[i] in NUMBERS else row[i] + gap

    return ["  " + "  ".join(cell(row, i) for i in range(len(columns))).rstrip() for row in table]


def _width(text: str) -> int:
    """Columns that a text takes: combining marks (x̂) take none."""
    return sum(not unicodedata.combining(letter) for letter in text)
