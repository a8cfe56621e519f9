"""The trained checkpoint that ships with the package, so that a first notebook cell has something to open."""

from __future__ import annotations

from pathlib import Path

from interp.model.checkpoint import load, read_document
from interp.model.transformer import Transformer
from interp.tasks.toy_facts import ToyFacts

FOLDER = Path(__file__).parent.parent / "data" / "facts_512"


def shipped() -> tuple[Transformer, ToyFacts]:
    """A 2-layer model that knows 2,048 made-up facts, and its task (facts, vocabulary, prompts)."""
    about = read_document(FOLDER)["extra"]["task"]
    return load(FOLDER), ToyFacts(n_subjects=about["n_subjects"], seed=about["seed"])
