"""How our cost grows with layers, positions, heads and prompts, next to how the floor grows over the same sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from interp.plots.style import COLOURS, new_figure
from sweeps import floor, peers
from sweeps.case import alternate, gpt2_case

BASE: dict[str, Any] = {"layers": 8, "width": 256, "heads": 4, "vocab": 1000, "prompts": 8, "length": 32}
CURVES: dict[
    str, tuple[str, tuple[int, ...], str]
] = {  # axis: (option, sizes, site); sizes at which arithmetic dominates
    "layers": ("layers", (8, 12, 16, 24), "resid_pre"),
    "positions": ("length", (32, 48, 64, 96), "resid_pre"),
    "heads": ("heads", (2, 4, 8, 16), "z"),
    "prompts": ("prompts", (8, 16, 32, 64), "resid_pre"),
}
SMALLER = {"heads": {"layers": 6, "length": 24}}  # its cells are as many again for every head
LABELS = {"layers": "layers", "positions": "positions (tokens per prompt)", "heads": "heads per layer (z swept)",
          "prompts": "prompts (pairs)"}  # fmt: skip
MEASURES = {  # column: (axis label, the column of what the definition predicts)
    "seconds": ("time of a sweep (s)", "floor_gflop"),
    "work_gflop": ("matrix products counted (GFLOP)", "floor_cells_gflop"),
}
COUNTERS = ("token_layers", "key_value_token_layers", "ffn_token_layers")
TOLERANCE = 0.1


def measure(engine: str, repeats: int, quick: bool) -> pd.DataFrame:
    """One row per axis × size: median seconds, the engine's work counters and their operations, the floor's operations and
    those of its cells alone (the counters know of no clean and corrupted run). Sizes of one axis alternate."""
    rows: list[dict[str, Any]] = []
    for axis, (option, sizes, site) in CURVES.items():
        base = BASE | SMALLER.get(axis, {}) | ({"width": 64, "layers": 3, "length": 8} if quick else {})
        cases = [gpt2_case(axis, site=site, **(base | {option: size})) for size in (sizes[:3] if quick else sizes)]
        turns = [peers.ours(case, engine) for case in cases]
        alternate(turns, repeats)
        rows += [
            {
                "axis": axis,
                "size": getattr(case.shape, {"layers": "n_layers", "positions": "length", "heads": "n_heads"}.get(axis, axis)),
                "seconds": turn.seconds,
                "floor_gflop": floor.floor(case.shape, site) / 1e9,
                "work_gflop": floor.counted(case.shape, turn.laps[0].work) / 1e9,
                "floor_cells_gflop": floor.cells(case.shape, site) / 1e9,
                **{name: turn.laps[0].work.get(name, 0) for name in COUNTERS},
            }
            for case, turn in zip(cases, turns, strict=True)
        ]  # fmt: skip
    return pd.DataFrame(rows)


def slopes(table: pd.DataFrame) -> pd.DataFrame:
    """One row per axis × measure: the fitted exponent, the floor's over the same sizes, and whether they agree."""
    rows = []
    for axis, part in table.groupby("axis", sort=False):
        for name, (_, floor_of) in MEASURES.items():
            fitted, predicted = slope(part, name), slope(part, floor_of)
            agrees = abs(fitted - predicted) <= TOLERANCE * predicted
            rows.append(
                {"axis": axis, "measure": name, "exponent": fitted, "predicted": predicted, "within_10%": agrees}
            )
    return pd.DataFrame(rows)


def slope(part: pd.DataFrame, column: str) -> float:
    """The exponent of a power law fitted by least squares on logarithms."""
    return float(np.polyfit(np.log(part["size"].to_numpy(float)), np.log(part[column].to_numpy(float)), 1)[0])


def figure(table: pd.DataFrame, measure: str) -> Figure:
    """One panel per axis, both scales logarithmic: measured sizes, their fit, and the floor's exponent through their middle."""
    found = slopes(table)
    drawn, panels = new_figure(len(CURVES), 3.0, 3.0)
    for ax, (axis, part) in zip(panels, table.groupby("axis", sort=False), strict=True):
        row = found[(found["axis"] == axis) & (found["measure"] == measure)].iloc[0]
        x, y = part["size"].to_numpy(float), part[measure].to_numpy(float)
        middle = np.exp(np.log(x).mean()), np.exp(np.log(y).mean())
        ax.plot(x, y, "o", color=COLOURS[0], label="measured")
        for name, colour, dashes in (("exponent", COLOURS[0], "-"), ("predicted", COLOURS[1], "--")):
            words = f"{'fitted' if name == 'exponent' else 'floor, predicted'} slope {row[name]:.2f}"
            ax.plot(x, middle[1] * (x / middle[0]) ** row[name], dashes, color=colour, label=words)
        ax.set(xscale="log", yscale="log", xlabel=LABELS[str(axis)])
        ax.set_xticks(x, [f"{size:.0f}" for size in x])
        ax.set_yticks(y, [f"{value:.3g}" for value in y])
        ax.minorticks_off()
        ax.legend(frameon=False, fontsize=8)
    panels[0].set_ylabel(MEASURES[measure][0])
    return drawn
