"""Blocks of a page, and the page: one HTML file that needs no network; every string is escaped."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jinja2
import pandas as pd

from interp import record

TEMPLATE = Path(__file__).parent / "page.html.jinja"


@dataclass
class Section:
    """A titled run of blocks, built top to bottom. short: its name in the list at the top, where the title is long."""

    title: str
    blocks: list[dict[str, Any]] = field(default_factory=list)
    short: str = ""

    def heading(self, text: str) -> None:
        """A sub-heading."""
        self.blocks.append({"kind": "heading", "text": text})

    def text(self, text: str) -> None:
        """A paragraph."""
        self.blocks.append({"kind": "text", "text": text})

    def finding(self, text: str) -> None:
        """A sentence that states a measured result."""
        self.blocks.append({"kind": "finding", "text": text})

    def code(self, text: str) -> None:
        """Preformatted text."""
        self.blocks.append({"kind": "code", "text": text})

    def bullets(self, lines: Sequence[str]) -> None:
        """A list of sentences."""
        self.blocks.append({"kind": "list", "lines": list(lines)})

    def figure(self, figure: Any, path: Path, caption: str, wide: bool = True) -> None:
        """Save the figure as PNG at `path` and put it on the page; wide ones scroll sideways on a phone."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=150)
        record.write_atomic(path, lambda temporary: temporary.write_bytes(buffer.getvalue()))
        data = base64.b64encode(buffer.getvalue()).decode()
        self.blocks.append({"kind": "figure", "data": data, "alt": caption, "caption": caption, "wide": wide})

    def table(self, table: pd.DataFrame, caption: str = "", tokens: Sequence[str] = ()) -> None:
        """A table; `tokens` names the columns that hold token strings, whose spaces are made visible."""
        columns = [
            {"name": str(name).replace("_", " "), "style": _style(table[name], name in tokens)} for name in table
        ]
        rows = [
            [show_token(value) if name in tokens else show(value) for name, value in zip(table, row, strict=True)]
            for row in table.itertuples(index=False)
        ]
        self.blocks.append({"kind": "table", "columns": columns, "rows": rows, "caption": caption})


def _style(column: pd.Series, token: bool) -> str:
    if token:
        return "text token"
    return "" if pd.api.types.is_numeric_dtype(column) else "text"


def show(value: Any) -> str:
    """A number with three significant digits, a whole number with thousands separated, text as it is."""
    if value is None or value is pd.NA or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    if float(value).is_integer() and abs(value) < 1e12:
        return f"{int(value):,}"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def show_token(value: Any) -> str:
    """A token, or several joined by " | ", with spaces and line ends visible."""
    text = str(value).replace("\n", "⏎").replace("\t", "⇥")
    return " | ".join(one.replace(" ", "·") for one in text.split(" | "))


def render(path: Path, title: str, lead: str, sections: Sequence[Section]) -> Path:
    """Write the page."""
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined)
    template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
    return record.write_text(path, template.render(title=title, lead=lead, sections=list(sections)))
