"""The main job: train a toy model, open it and a real model up with the same tools, write one page."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interp import record
from interp.report import real as real_model
from interp.report import toy as toy_model
from interp.report.page import Section, render

TITLE = "Where does a transformer look a fact up?"
LEAD = (
    "A small transformer was trained on made-up facts and opened up with activation patching, the logit lens and the "
    "FFN key-value probe; the same three tools then opened a pretrained language model on true facts. Everything on "
    "this page was measured by the command at its end; the tables behind it lie next to it as parquet files."
)


def build(folder: str | Path, real: bool = True, n_pairs: int = 8, progress: bool = True) -> Path:
    """Measure what is missing, reuse what is there, and write `folder`/index.html; returns its path."""
    folder, started = Path(folder), time.time()
    sections = [toy_model.section(folder, progress)]
    if real:
        sections.append(real_model.section(folder, n_pairs, progress))
    sections += [_limits(real), provenance_section(folder, started), _parts()]
    return render(folder / "index.html", TITLE, LEAD, sections)


def _limits(real: bool) -> Section:
    section = Section("What this page does not show")
    lines = [
        "One trained seed and one pretrained model: n = 1 for every statement about transformers in general. The "
        "textbook's claim that FFNs encode most facts is therefore undecided here, whatever the maps look like.",
        "Patching an activation measures mediation, that is, which values the answer passes through, not which weights "
        "store it. Attention has to carry the subject to the last position even in a model whose FFNs store everything.",
        "Effects of different sites overlap and do not add up to 1. The last layer's stream at the final position "
        "restores everything by construction.",
        "Token replacement keeps prompts natural; Gaussian noise, other metrics (probability, KL) and other templates "
        "can order attention and FFN differently.",
        "The logit lens reads every layer through the last layer's norm and unembedding: a low rank there can mean "
        "that the answer is absent or that it is written in other directions.",
        "A neuron's promoted tokens and triggers describe what it writes and when it fires, not that the fact needs it.",
    ]
    if real:
        lines.append(
            "The real model's weights are 4-bit (Q4_1), dequantised; its facts were chosen because it knows them."
        )
    section.bullets(lines)
    return section


def provenance_section(folder: Path, started: float, **about_run: Any) -> Section:
    """How a page was made, on the page and in provenance.json."""
    about = record.provenance(started=started, **about_run)
    record.write_json(folder / "provenance.json", about)
    return made_section("How this page was made", about)


def made_section(title: str, about: Mapping[str, Any]) -> Section:
    """Where results came from, from `record.provenance`."""
    section = Section(title)
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    state = " with uncommitted changes" if about["uncommitted"] else ""
    section.code(
        f"command   {about['command']}\ncommit    {about['commit'] or 'not a git checkout'}{state}\n"
        f"versions  python {about['machine']['python']}, {versions}\n"
        f"machine   {about['machine']['cpus']} CPUs, {about['machine'].get('threads')} threads, {about['machine']['platform']}\n"
        f"finished  {about['finished']}" + (f" after {about['seconds']:.0f} s" if about["seconds"] is not None else "")
    )
    return section


def _parts() -> Section:
    section = Section("Where the tables are")
    section.text(
        "Every part is a folder with its tables (parquet) and its settings, seeds and versions (provenance.json); a part "
        "whose settings are unchanged is reused, so a second run only draws the page."
    )
    return section
