"""What a causal trace returns, and which role each position of a prompt plays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.analyses.joint_metric import TraceError
from interp.model.inputs import Inputs

POSITION_ROLES = ("earlier", "subject_first", "subject_middle", "subject_last", "first_subsequent", "further", "last")
"""In reading order. `earlier` stands before the subject, where a causal model's clean and corrupted runs are equal."""


@dataclass(frozen=True, eq=False)
class TracePart:
    """One corruption × site of some prompts of one length.

    examples, seeds [row]: which prompt and which noise draw (−1: none). positions [coordinate row]. values [layer coordinate
    metric row]; clean, corrupted [metric row]. checked: the largest difference of the cells that were run again in full.
    """

    corruption: str
    site: str
    severed: str
    examples: np.ndarray
    seeds: np.ndarray
    positions: np.ndarray
    values: Tensor
    clean: Tensor
    corrupted: Tensor
    checked: float = 0.0


@dataclass(frozen=True, eq=False)
class TraceResult:
    """The metrics of every restoration.

    spans: per site and centre layer the first and last layer restored and whether the window is cut off at an end. facts, right
    [example]: the fact's id; whether the model's most likely token is the given answer. roles: columns example, position, role.
    nu: the noise's standard deviation, None without noise.
    """

    parts: tuple[TracePart, ...]
    metrics: tuple[str, ...]
    spans: Mapping[str, list[tuple[int, int, bool]]]
    facts: np.ndarray
    right: np.ndarray
    roles: pd.DataFrame
    nu: float | None = None

    def __repr__(self) -> str:
        about = ", ".join(dict.fromkeys(f"{part.site} ({part.corruption})" for part in self.parts))
        return f"TraceResult({len(self.facts)} prompts, {' and '.join(self.metrics)}: {about})"

    @property
    def checked(self) -> float:
        """The largest difference between cells of the sweeps and full runs of them."""
        return max(part.checked for part in self.parts)

    def table(self, max_rows: int | None = 5_000_000, roles: pd.DataFrame | None = None) -> pd.DataFrame:
        """One row per restoration × metric.

        Columns: fact, example, right, corruption, noise_seed (missing for replacement), direction, metric, site, severed
        ("none"), layer (centre), first_layer, last_layer, clipped (window cut off at an end), position, role, clean, corrupted,
        value (restored). roles: another table of roles, such as `position_roles(inputs, shared=True)`, where a position may have
        several. ValueError above max_rows (None: no limit).
        """
        rows = sum(part.values.numel() for part in self.parts)
        if max_rows is not None and rows > max_rows:
            raise ValueError(f"this table would have {rows:,} rows, more than max_rows={max_rows:,}; allowed: fewer prompts "
                             "at a time, or .table(max_rows=None)")  # fmt: skip
        table = pd.concat([self._one(part) for part in self.parts], ignore_index=True)
        table = table.merge(self.roles if roles is None else roles, on=["example", "position"], how="left")
        table["noise_seed"] = table["noise_seed"].astype("Int64").mask(table["noise_seed"] < 0)
        ends = ["clean", "corrupted", "value"]
        return table[[name for name in table.columns if name not in ends] + ends]

    def _one(self, part: TracePart) -> pd.DataFrame:
        layer, place, metric, row = (axis.reshape(-1) for axis in np.indices(tuple(part.values.shape)))
        span = np.array(self.spans[part.site])
        example = part.examples[row]
        return pd.DataFrame({
            "fact": self.facts[example], "example": example, "right": self.right[example], "corruption": part.corruption,
            "noise_seed": part.seeds[row], "direction": "denoising", "metric": np.array(self.metrics, dtype=object)[metric],
            "site": part.site, "severed": part.severed, "layer": layer, "first_layer": span[layer, 0].astype(int),
            "last_layer": span[layer, 1].astype(int), "clipped": span[layer, 2].astype(bool),
            "position": part.positions[place, row], "clean": part.clean.numpy()[metric, row],
            "corrupted": part.corrupted.numpy()[metric, row], "value": part.values.numpy().reshape(-1),
        })  # fmt: skip


def position_roles(inputs: Inputs, shared: bool = False) -> pd.DataFrame:
    """The role of every real position: columns example, position, role (of POSITION_ROLES; Meng et al. 2022, figure 2).

    Roles do not overlap: the last token is `last`, whatever else it is, and a subject of one token is `subject_last`. shared: as
    the official code counts, a position stands in every bucket it belongs to (a subject of one token is its own first).
    """
    rows: list[tuple[int, int, str]] = []
    first, end, last = (one.tolist() for one in (*_subject(inputs), inputs.last()))
    start = torch.zeros(inputs.batch) if inputs.mask is None else inputs.mask.long().argmax(1)
    for i, (a, b, z) in enumerate(zip(first, end, last, strict=True)):
        for at in range(int(start[i]), z + 1):
            found = [name for name, here in (
                ("last", at == z), ("subject_last", at == b), ("subject_first", at == a), ("subject_middle", a < at < b),
                ("first_subsequent", at == b + 1), ("further", b + 1 < at < z), ("earlier", at < a),
            ) if here]  # fmt: skip
            rows += [(i, at, name) for name in (found if shared else found[:1])]
    return pd.DataFrame(rows, columns=["example", "position", "role"])


def _subject(inputs: Inputs) -> Sequence[Tensor]:
    missing = [name for name in ("subject", "subject_last") if name not in inputs.roles]
    if missing:
        raise TraceError(f"the prompts have no role {missing[0]!r}; they have {', '.join(inputs.roles) or 'none'}")
    return inputs.roles["subject"], inputs.roles["subject_last"]


def real_positions(inputs: Inputs, rows: np.ndarray, places: np.ndarray | None, draws: int) -> np.ndarray:
    """Positions among the real tokens [coordinate, copies of rows × draws] as positions of the given inputs [coordinate, row]."""
    assert places is not None
    places = places[:, : len(rows) * draws]
    if inputs.mask is None:
        return places
    real = np.stack([np.flatnonzero(inputs.mask[int(row)].cpu().numpy()) for row in rows])
    return np.take_along_axis(np.repeat(real, draws, 0), places.T, 1).T
