"""Any analysis along a training: the same table at every kept step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pandas as pd
from tqdm.auto import tqdm


class OverTrainingError(ValueError):
    """A run without kept models, steps that were not kept, or an analysis that gives no table."""


class Kept(Protocol):
    """A training that kept models along the way: `interp.training.Trained`, or anything else with these two."""

    @property
    def kept(self) -> Sequence[int]:
        """The steps at which a model was kept, in order; 0 is before training."""
        ...

    def at(self, step: int) -> Any:
        """The model after `step` steps."""
        ...


def over_training(
    run: Kept, analysis: Callable[[Any], pd.DataFrame], steps: Sequence[int] | None = None, progress: bool = False
) -> pd.DataFrame:
    """The tables of `analysis(model)` at kept steps of a training, below one another, with `step` as the first column.

    run: what `train` returned or `open_run(folder)` gives, trained with `TrainConfig(keep=n)`. analysis: a function of a model
    alone (`lambda model: head_scores(model, …)`), given each step's model in turn, so that one is in memory at a time. steps:
    those asked for, in any order; None is all that were kept. The tables' own index is dropped. Raises OverTrainingError.
    """
    tables = []
    for step in tqdm(_wanted(run, steps), disable=not progress, desc="over training"):
        table = analysis(run.at(step))
        if not isinstance(table, pd.DataFrame):
            raise OverTrainingError(
                f"analysis must return a pandas DataFrame, got {type(table).__name__} at step {step}"
            )
        if "step" in table.columns:
            raise OverTrainingError(f"analysis gave a column 'step' of its own at step {step}; allowed: any other name")
        table = table.copy()
        table.insert(0, "step", step)
        tables.append(table)
    return pd.concat(tables, ignore_index=True)


def _wanted(run: Any, steps: Sequence[int] | None) -> list[int]:
    """The steps asked for, in order. Raises OverTrainingError."""
    if not (hasattr(run, "kept") and hasattr(run, "at")):
        raise OverTrainingError(f"run must be a finished training with .kept and .at(step), got {type(run).__name__}; for a "
                                "folder: interp.training.open_run(folder)")  # fmt: skip
    kept = [int(step) for step in run.kept]
    if not kept:
        raise OverTrainingError(
            "the run kept no models along the way; train it into a folder with TrainConfig(keep=n), n of 2 or more"
        )
    if steps is None:
        return kept
    missing = [step for step in steps if step not in kept]
    if missing or not len(steps):
        raise OverTrainingError(
            f"steps={list(steps)} are not allowed; allowed: one or more of the kept {', '.join(map(str, kept))}"
        )
    return sorted({int(step) for step in steps})
