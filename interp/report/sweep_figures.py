"""The figures of one sweep: which picture shows which axes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pandas as pd

from interp.at import side
from interp.plots import effect_bars, effect_heatmaps, effect_histogram, head_heatmap
from interp.plots.heatmap import UNIT
from interp.report.sweep_inputs import Opened
from interp.sites import expand
from interp.sweep import SweepResult
from interp.tasks.task import Pairs

Shown = tuple[str, Any, str, bool]  # file name, figure, caption, wide?
WORDS = {
    "denoising": "0 = still the corrupted run, 1 = the clean run restored",
    "noising": "0 = still the clean run, 1 = as broken as the corrupted run",
}


def figures(result: SweepResult, table: pd.DataFrame, opened: Opened, pairs: Pairs) -> Iterator[Shown]:
    """The pictures of a sweep; table: its `effect_table()`. Sites that count the source's positions get figures of their own."""
    axes = next(iter(result.axes.values()))
    unit = unit_of(result)
    said = WORDS.get(result.direction, "change of the logit difference; 0 = none")
    about = f"{said}; {len(result.clean)} prompt{'s' * (len(result.clean) > 1)}."
    for name, inputs, rows in _sides(table, opened, pairs):
        labels = tick_labels(rows, axes, opened, inputs)
        if "neuron" in axes:
            caption = f"How many neurons{_of(axes)} have which effect (logarithmic counts): {about}"
            yield f"{name}histogram", effect_histogram(rows, unit=unit), caption, True
        elif "head" in axes:
            yield from _heads(rows, axes, labels, unit, about, name)
        elif len(axes) == 1:
            yield f"{name}{axes[0]}", effect_bars(rows, axes[0], labels, unit=unit), f"By {axes[0]}: {about}", True
        else:
            x = "role" if "role" in axes else "position"
            whose = " Token labels are those of the first clean prompt." if x == "position" else ""
            figure = effect_heatmaps(rows, x, labels, unit=unit)
            yield f"{name}{x}", figure, f"By {' × '.join(axes)}: {about}{whose}", True


def unit_of(result: SweepResult) -> str:
    """What an effect is measured in."""
    return UNIT if result.corrupted is not None else f"mean change of\nthe logit difference ({result.unit})"


def tick_labels(rows: pd.DataFrame, axes: tuple[str, ...], opened: Opened, inputs: Any) -> list[str] | None:
    """Tokens of the first clean prompt at the swept positions; None for other axes, whose values say what they are."""
    if "position" not in axes:
        return None
    tokens = opened.labels(inputs.tokens[0])
    return [tokens[position] for position in sorted(set(rows["position"]))]


def _of(axes: tuple[str, ...]) -> str:
    others = [axis for axis in axes if axis != "neuron"]
    return f", one entry per {' × '.join([*others, 'neuron'])}," if others else ""


def _sides(table: pd.DataFrame, opened: Opened, pairs: Pairs) -> Iterator[tuple[str, Any, pd.DataFrame]]:
    """The rows of sites that count the target's (or the only) positions, then those of the source's, with these inputs."""
    of_source = {}
    for site in dict.fromkeys(table["site"]):
        place = expand(site.split("+")[0], opened.model.sites)[0]
        of_source[site] = pairs.clean.source is not None and side(place, "position", pairs.clean) is not pairs.clean
    source = table["site"].map(of_source).astype(bool)
    if not source.all():
        yield "", pairs.clean, table[~source]
    if source.any():
        yield "source_", pairs.clean.encoder, table[source]


def _heads(
    rows: pd.DataFrame, axes: tuple[str, ...], labels: list[str] | None, unit: str, about: str, name: str
) -> Iterator[Shown]:
    """One figure per site: layer × head, with a panel per role; of positions the one whose effect is largest."""
    along = [axis for axis in axes if axis != "head"]
    for site, found in rows.groupby("site", sort=False):
        file, caption = f"{name}{site}_heads", f"Heads of {site} by {' × '.join(axes)}: {about}"
        x = next((axis for axis in along if axis in ("position", "role")), None)
        if len(axes) == 1:
            yield file, effect_bars(found, "head", unit=unit), caption, True
        elif x is None:
            yield file, head_heatmap(found, unit=unit, title=str(site)), caption, False
        elif len(axes) == 2:
            yield file, effect_heatmaps(found, x, labels, unit=unit, y="head"), caption, True
        elif x == "role":
            yield file, effect_heatmaps(found, "head", unit=unit, title=str(site), panel="role"), caption, True
        else:
            layer = next(axis for axis in along if axis != x)
            best = found.groupby([layer, "head"])["effect"].apply(lambda effects: effects.abs().idxmax())
            title = f"{site}: at the position\nwhere |effect| is largest"
            yield file, head_heatmap(found.loc[best], unit=unit, title=title), f"{caption} Of a head's positions only the one "\
                "where |effect| is largest is shown; all of them are in effect.csv.", False  # fmt: skip
