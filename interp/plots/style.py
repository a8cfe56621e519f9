"""One look for every figure."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLOURS = ("#1b6ca8", "#d1495b", "#3a7d44", "#b8860b", "#6b4c9a")
STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.dpi": 120,
    "legend.frameon": False,
    "font.family": "sans-serif",
}


class PlotError(ValueError):
    """A table that lacks what the figure shows."""


class NotebookFigure(Figure):
    """A matplotlib figure that shows itself as the last value of a notebook cell, without pyplot's global state."""

    def _repr_png_(self) -> bytes:
        buffer = io.BytesIO()
        self.savefig(buffer, format="png")
        return buffer.getvalue()


def new_figure(columns: int, width: float, height: float, **options) -> tuple[Figure, list[Axes]]:
    """A figure of `columns` panels, each width × height inches, that no pyplot state knows of."""
    with matplotlib.rc_context(STYLE):  # never the caller's global settings
        figure = NotebookFigure(figsize=(columns * width, height), layout="constrained")
        axes = figure.subplots(1, columns, squeeze=False, **options)[0]
    return figure, list(axes)


def need(table, names: Sequence[str]) -> None:
    """Raise PlotError unless the table has the columns and at least one row."""
    missing = [name for name in names if name not in table.columns]
    if missing:
        raise PlotError(f"the table lacks column(s) {missing}; it has {list(table.columns)}")
    if len(table) == 0:
        raise PlotError("the table has no rows")


def printable(text: str) -> str:
    """A token as an axis label: spaces and newlines visible, dollar signs harmless, long ones cut."""
    shown = text.replace("\n", "⏎").replace("\t", "⇥")
    shown = "·" + shown[1:] if shown.startswith(" ") and len(shown) > 1 else shown.replace(" ", "·")
    shown = "".join(c if c.isprintable() else "�" for c in shown)
    shown = shown if len(shown) <= 16 else shown[:15] + "…"
    return shown.replace("$", r"\$") or "∅"


def layers_of(table: pd.DataFrame) -> str:
    """What counts layers in a table: "window" where it has windows of layers, else "layer"."""
    return "window" if "window" in table.columns and table["window"].notna().any() else "layer"


def clipped(table: pd.DataFrame, name: str) -> set[int]:
    """The centres of windows that are cut off at an end of the model; empty for any other axis."""
    if name != "window" or "clipped" not in table.columns:
        return set()
    return {int(centre) for centre in table.loc[table["clipped"].astype(bool), "window"]}


def axis_label(table: pd.DataFrame, name: str) -> str:
    """The label of the axis that shows a table's column."""
    if name == "position":
        return "token position"
    if name != "window":
        return name.replace("_", " ")
    if not {"first_layer", "last_layer"} <= set(table.columns):
        return "centre of a window of layers"
    half = max(int((table["window"] - table["first_layer"]).max()), int((table["last_layer"] - table["window"]).max()))
    return f"centre of {2 * half + 1} layer{'s' * (half > 0)}" + (
        "\n(hatched: cut off at an end)" if clipped(table, name) else ""
    )


def x_ticks(ax: Axes, labels: Sequence[str]) -> None:
    """One tick per label, slanted unless all are short."""
    slanted = any(len(label) > 2 for label in labels)
    turn: dict[str, Any] = {"rotation": 60, "ha": "right", "rotation_mode": "anchor"} if slanted else {}
    ax.set_xticks(range(len(labels)), labels, **turn)
