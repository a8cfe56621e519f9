"""The page of one sweep: what was run, the largest effects in numbers and pictures, how it was computed and checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from interp.report.build import provenance_section
from interp.report.page import Section, render
from interp.report.sweep_figures import figures
from interp.sweep import SweepResult

if TYPE_CHECKING:
    from interp.report.sweep import Ready

SPLIT = 8  # prompts from which on a peak is chosen on one half and estimated on the other
TOP = {False: 20, True: 50}  # rows of the table of largest effects; True: with neurons
LEAD = {
    "patched": "Activations of one run were written into another, one place at a time, and the logit difference between the "
    "clean and the corrupted answer was read each time. Every number is in the files beside this page.",
    "ablated": "Activations were ablated, one place at a time, and the logit difference between the right and the wrong answer "
    "was read each time. Every number is in the files beside this page.",
}
WORK = {
    "token_layers": "tokens × blocks, in full",
    "key_value_token_layers": "tokens × blocks, keys and values only",
    "ffn_token_layers": "tokens × blocks, second half only",
    "memory_token_layers": "source tokens × blocks, keys and values only",
    "unembedded rows": "tokens unembedded",
    "forwards": "full forward passes",
}
UNITS = (
    "One model: n = 1 for every statement about models in general. The prompts are the units that were averaged over."
)
PATCHED = (
    UNITS,
    "An effect is a ratio of means over prompts, not a mean of ratios; it can be below 0 or above 1. Effects of different places "
    "overlap and do not add up to 1.",
    "Patching measures which values the answer passes through, not which weights store it. The last layer's stream at the "
    "position that is read restores or breaks everything by construction.",
)
ABLATED = (
    UNITS,
    "An effect is the mean over prompts of ablated − unchanged. Zero, mean and resampled values answer different questions and "
    "need not agree; an ablated value may be one that the model never sees.",
    "Effects of different places overlap and do not add up.",
)
FILES = (
    ("effect.csv", "one row per direction × site × cell: the effect, and n, the prompts behind it"),
    ("sweep.parquet", "one row per direction × site × cell × prompt: clean, corrupted, patched (up to 2 million rows)"),
    (
        "values.safetensors",
        "the metric of every cell and prompt as tensors “direction.site”, clean and corrupted; axes in the metadata",
    ),
    ("prompts.csv", "the prompts and answers behind the column “example”"),
    ("settings.json, provenance.json", "what decided the numbers, and where they were made"),
)


def write_page(ready: Ready, results: Mapping[str, SweepResult], effects: pd.DataFrame) -> Path:
    """Figures and `index.html` in the sweep's folder; returns the page's path."""
    folder, kind = ready.asked.folder, "ablated" if ready.asked.ablates else "patched"
    sections = [_run_section(ready, results)]
    for name, result in results.items():
        sections.append(_effects_section(ready, name, result, effects[effects["direction"] == name]))
    sections += [
        _work_section(ready, results),
        _list("What these numbers are not", ABLATED if ready.asked.ablates else PATCHED),
    ]
    sections.append(provenance_section(folder, ready.started, config=ready.settings, seed=0))
    there = [f"{name}: {what}." for name, what in FILES if (folder / name.split(",")[0]).exists()]
    sections.append(_list("Files", there))
    title = f"{'Ablation' if ready.asked.ablates else 'Patching'} sweep: {ready.opened.title}"
    return render(folder / "index.html", title, LEAD[kind], sections)


def peak(result: SweepResult, site: str) -> tuple[str, float, int]:
    """The place of a site's largest effect, the effect, and the prompts that it is estimated on.

    From SPLIT prompts on the place is chosen on every second one and the effect estimated on the others, so that picking the
    largest does not inflate it.
    """
    n = len(result.clean)
    choose, estimate = (slice(0, None, 2), slice(1, None, 2)) if n >= SPLIT else (slice(None), slice(None))
    found = _of(result, site, choose).abs().nan_to_num()
    index = tuple(int(i) for i in torch.unravel_index(found.argmax(), found.shape))
    place = ", ".join(
        f"{_axis(axis)} {str(values[i]).replace('_', ' ')}"
        for axis, values, i in zip(result.axes[site], result.coordinates[site], index, strict=True)
    )
    return place, float(_of(result, site, estimate)[index]), len(result.clean[estimate])


def count(n: int, what: str) -> str:
    """'1 prompt', '64 prompts'."""
    return f"{n} {what}{'s' * (n != 1)}"


def _of(result: SweepResult, site: str, rows: slice) -> torch.Tensor:
    """One site's effect on some of the prompts."""
    corrupted = None if result.corrupted is None else result.corrupted[rows]
    values = {site: result.values[site][..., rows]}
    return replace(result, values=values, clean=result.clean[rows], corrupted=corrupted).effect()[site]


def _axis(name: str) -> str:
    return "window around layer" if name == "window" else name


def _run_section(ready: Ready, results: Mapping[str, SweepResult]) -> Section:
    section, settings = Section("What was run"), ready.settings
    first = next(iter(results.values()))
    prefix = " ".join(ready.opened.labels(torch.tensor(ready.opened.prefix)))
    rows: dict[str, Any] = {
        "model": f"{ready.opened.title} (weights {settings['weights']})",
        "prompts": count(len(ready.pairs), "prompt" if ready.asked.ablates else "pair"),
        "put before each prompt": prefix or "nothing",
        "sites": ", ".join(settings["sites"]),
        "axes": " × ".join(settings["by"]),
        "direction": " and ".join(results),
        "metric": "logit(correct) − logit(wrong) at "
        + ("the last token" if ready.pairs.position == -1 else f"“{ready.pairs.position}”"),
        **({"window": f"{settings['window']} layers"} if "window" in settings["by"] else {}),
    }  # fmt: skip
    section.table(pd.DataFrame({"setting": list(rows), "value": [str(value) for value in rows.values()]}))
    shown = ready.opened.table(ready.pairs).head(5)
    tokens = [str(name) for name in shown if name != "example"]
    if first.corrupted is None:  # an ablation runs the clean prompts only
        tokens = [name for name in tokens if not name.startswith("corrupted")]
        shown = shown[["example", *tokens]]
    section.table(shown, f"The first {len(shown)} of {len(ready.pairs)}, in the order of prompts.csv.", tokens=tokens)
    said = f"Unchanged, the mean {first.metric.replace('_', ' ')} is {first.clean.mean():+.2f} {first.unit} on clean prompts"
    other = "" if first.corrupted is None else f" and {first.corrupted.mean():+.2f} {first.unit} on corrupted ones"
    section.finding(f"{said}{other} (n = {len(first.clean)}).")
    return section


def _effects_section(ready: Ready, name: str, result: SweepResult, effects: pd.DataFrame) -> Section:
    section = Section(name[0].upper() + name[1:])
    unit = f" {result.unit}" if result.corrupted is None else ""
    for site, values in result.values.items():
        place, effect, n = peak(result, site)
        cells = values[..., 0].numel()
        how = f"chosen on the other {len(result.clean) - n}, estimated on {count(n, 'prompt')}" if n < len(result.clean) else \
            f"chosen and estimated on the same {count(n, 'prompt')}, so somewhat too large"  # fmt: skip
        many = int((effects.loc[effects["site"] == site, "effect"].abs() >= abs(effect) / 2).sum())
        section.finding(f"{site}: the largest effect of {cells:,} cells is {effect:+.2f}{unit} at {place} ({how}); "
                        f"{many:,} cell{'s have' if many != 1 else ' has'} at least half of it.")  # fmt: skip
    folder = ready.asked.folder / "figures"
    table = effects.drop(columns=["direction", "n"])
    for file, figure, caption, wide in figures(result, table, ready.opened, ready.pairs):
        section.figure(figure, folder / f"{name.split()[0]}_{file}.png".replace("+", "_"), caption, wide)
    top = TOP["neuron" in effects.columns]
    best = table.loc[table["effect"].abs().nlargest(top).index].dropna(axis=1, how="all").query("effect != 0")
    section.table(best.rename(columns={"effect": f"effect (in {result.unit})" if unit else "effect"}),
                  f"The {len(best)} largest effects of {len(table):,}, on all prompts.")  # fmt: skip
    return section


def _work_section(ready: Ready, results: Mapping[str, SweepResult]) -> Section:
    section = Section("How it was computed, and checked")
    for name, result in results.items():
        section.text(
            f"{name}: engine “{result.engine}”, exact “{result.exact}”. Estimated before: {ready.estimates[name]}."
        )
        section.finding(f"{name}: {_checked(result)}")
    config, inputs = ready.opened.model.config, ready.pairs.clean
    length = inputs.tokens.numel() * config.n_layers
    if inputs.source is not None:
        length += inputs.source.numel() * (config.n_encoder_layers or config.n_layers)
    rows = []
    for name, result in results.items():
        cells = sum(values[..., 0].numel() for values in result.values.values())
        rows += [
            {"direction": name, "work": WORK.get(key, key), "count": count}
            for key, count in result.work.items()
            if count
        ]
        rows.append(
            {"direction": name, "work": "tokens × blocks, if every cell were a full run", "count": cells * length}
        )
    section.table(
        pd.DataFrame(rows),
        "Work, counted while it was done; cells that an earlier, stopped run had finished do not count.",
    )
    return section


def _checked(result: SweepResult) -> str:
    if result.engine == "reference":
        return "every cell is a full run of the model, so there is nothing to check."
    if not result.checks:
        return "no cell was run again in full (--check 0)."
    return f"largest difference of {result.checks} checked cells from a full run: {result.checked:.1e} {result.unit}."


def _list(title: str, lines: Sequence[str]) -> Section:
    section = Section(title)
    section.bullets(lines)
    return section
