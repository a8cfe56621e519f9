"""Attention patterns to point at: every head small, one large, each weight under the pointer, in one piece of HTML."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from interp.plots.style import PlotError, printable

TEMPLATE = Path(__file__).parent / "attention.html"
SHAPES = "[layer head query key], [head query key] or [query key]"
SLACK = 5e-4  # a value's rounding; what lies within it of 0 or 1 is shown as 0 or 1
LARGEST = 4_000_000  # weights in one widget, about 12 MB
ROW_SLACK = 1e-2  # rows of half-precision softmax miss 1 by this much


@dataclass(frozen=True)
class Widget:
    """One piece of HTML that needs nothing else: shows itself in a notebook, `.html` for a page, `.save(path)` for a file."""

    html: str = field(repr=False)
    title: str
    size: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", len(self.html.encode()))

    def _repr_html_(self) -> str:
        return self.html

    def save(self, path: str | Path) -> Path:
        """Write a whole page and return its path; its address with `#select=1.2&hover=3,4` opens head 1.2, query 3, key 4."""
        path = Path(path)
        path.write_text(
            '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self.title)}</title><style>body{{margin:8px;background:#f6f7f9}}</style></head>\n"
            f"<body>\n{self.html}</body></html>\n",
            encoding="utf-8",
        )
        return path


def attention_widget(
    pattern: Any,
    tokens: Sequence[Any],
    key_tokens: Sequence[Any] | None = None,
    title: str = "",
    layers: Sequence[int] | None = None,
) -> Widget:
    """Attention weights with every head small and one large: point at a cell or a token to read weights, tokens and positions.

    pattern: weights in 0 … 1, rows summing to at most 1, [layer head query key], [head query key] or [query key] (array or
    tensor; of one example: `cache.stack("pattern")[:, 0]`). tokens: one text per query. key_tokens: one per key, the same as
    tokens unless given. layers: the layers' numbers, 0 … unless given. Weights are rounded to 3 digits, so 0.000 is a closed
    edge or a tiny weight. Raises PlotError.
    """
    values = _weights(pattern)
    queries = _texts("tokens", tokens, values.shape[-2], "query")
    if key_tokens is None and values.shape[-1] != len(queries):
        raise PlotError(f"the pattern has {len(queries)} queries and {values.shape[-1]} keys {values.shape}; "
                        f"it needs key_tokens=, {values.shape[-1]} texts")  # fmt: skip
    keys = queries if key_tokens is None else _texts("key_tokens", key_tokens, values.shape[-1], "key")
    kind = {2: "one", 3: "heads", 4: "layers"}[values.ndim]
    grid = values.reshape((1,) * (4 - values.ndim) + values.shape)
    about = _about(kind, grid.shape, keys is queries)
    data = {
        "title": str(title),
        "about": about,
        "kind": kind,
        "layers": _layer_numbers(layers, kind, len(grid)),
        "heads": grid.shape[1],
        "same": queries == keys,
        "queries": [{"label": _label(text), "text": text} for text in queries],
        "keys": [{"label": _label(text), "text": text} for text in keys],
        "values": np.rint(grid * 1000).astype(int).ravel().tolist(),
    }
    return Widget(_fill(data, about), str(title) or "Attention pattern")


def _weights(pattern: Any) -> np.ndarray:
    """The pattern as float64, clipped to 0 … 1. PlotError for another shape, no number, or weights that no softmax gives."""
    if hasattr(pattern, "detach"):  # a tensor, perhaps on a GPU, with a graph or in bfloat16, which numpy has not
        pattern = pattern.detach().cpu().double()
    try:
        values = np.asarray(pattern, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise PlotError(f"pattern must be numbers {SHAPES}, got {type(pattern).__name__}: {error}") from error
    if values.ndim not in (2, 3, 4) or 0 in values.shape:
        one = "; choose one example, as in pattern[:, 0]" if values.ndim == 5 else ""
        raise PlotError(f"pattern has shape {values.shape}; allowed: {SHAPES}, no axis empty{one}")
    if values.size > LARGEST:
        raise PlotError(f"pattern has shape {values.shape}, {values.size:,} weights; allowed: at most {LARGEST:,} "
                        "(choose layers, heads or positions)")  # fmt: skip
    for what, wrong in (("NaN", np.isnan(values)), ("outside 0 … 1", (values < -SLACK) | (values > 1 + SLACK))):
        if wrong.any():
            place = tuple(map(int, np.argwhere(wrong)[0]))
            raise PlotError(f"pattern{list(place)} is {values[place]:.6g}; allowed: weights in 0 … 1 ({wrong.sum()} of "
                            f"{values.size} are {what}; scores before the softmax are no pattern)")  # fmt: skip
    sums = values.sum(-1)
    if (sums > 1 + ROW_SLACK).any():
        place = tuple(map(int, np.argwhere(sums > 1 + ROW_SLACK)[0]))
        raise PlotError(f"pattern{list(place)}, one query's weights on all keys, sums to {sums[place]:.6g}; allowed: at most 1 "
                        "(is query the last axis but one?)")  # fmt: skip
    return values.clip(0, 1)


def _texts(name: str, tokens: Sequence[Any], count: int, axis: str) -> list[str]:
    """One text per place of an axis. PlotError for another number of them."""
    if isinstance(tokens, str):
        raise PlotError(f"{name} is one text, {tokens[:40]!r}; allowed: {count} texts, one per {axis}")
    texts = [str(token) for token in tokens]
    if len(texts) != count:
        raise PlotError(f"{name} has {len(texts)} entries; allowed: {count}, one per {axis}")
    return texts


def _layer_numbers(layers: Sequence[int] | None, kind: str, count: int) -> list[int]:
    if layers is None:
        return list(range(count))
    if kind != "layers" or len(layers) != count:
        had = f"{count} layers" if kind == "layers" else "no layer axis"
        raise PlotError(f"layers={list(layers)} does not fit a pattern with {had}; allowed: one number per layer")
    return [int(layer) for layer in layers]


def _label(text: str) -> str:
    return printable(text).replace(r"\$", "$")  # a dollar sign means nothing here, only to matplotlib


def _about(kind: str, shape: tuple[int, ...], same: bool) -> str:
    layers, heads, queries, keys = shape
    counted = {
        "one": "",
        "heads": _count(heads, "head"),
        "layers": f"{_count(layers, 'layer')} × {_count(heads, 'head')}",
    }
    places = _count(keys, "token") if same else f"{_count(queries, 'query token')}, {_count(keys, 'key token')}"
    return " · ".join(part for part in (counted[kind], places) if part)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _fill(data: dict[str, Any], about: str) -> str:
    """The template with the data: text that could end the script element or open a comment is written as \\u escapes."""
    text = json.dumps(data, separators=(",", ":"))
    name = "attention-" + hashlib.sha256(text.encode()).hexdigest()[:12]
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    said = f"{data['title'] or 'Attention pattern'} ({about}): shown where scripts may run, as in a trusted notebook."
    values = {"ID": name, "DATA": text, "FALLBACK": escape(said)}
    # One pass: a token or title that spells a place holder is data like any other.
    return re.sub("__(ID|DATA|FALLBACK)__", lambda found: values[found[1]], TEMPLATE.read_text(encoding="utf-8"))
