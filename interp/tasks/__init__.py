"""Toy tasks and fact sets: vocabulary, sampler, contrast pairs, ground truth. One file per task."""

import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from interp.tasks.dyck import Dyck
from interp.tasks.fact_checks import KnownFacts, attribute_sets, known_facts, neighbours, paraphrases
from interp.tasks.facts import FactSet, Prompts, real_facts, replacement_pairs
from interp.tasks.facts_in_context import FactsInContext
from interp.tasks.induction import Induction
from interp.tasks.language import Language
from interp.tasks.lookahead import Lookahead
from interp.tasks.modular_addition import ModularAddition
from interp.tasks.rewriting import Rewriting
from interp.tasks.task import Batch, Goal, Pairs, Task, TaskError
from interp.tasks.toy_facts import ToyFacts

TASKS: dict[str, Callable[[], Task]] = {
    "facts": ToyFacts,
    "induction": Induction,
    "copy": partial(Rewriting, "copy"),
    "reverse": partial(Rewriting, "reverse"),
    "sort": partial(Rewriting, "sort"),
    "dyck": Dyck,
    "lookahead": Lookahead,
    "lookahead-causal": partial(Lookahead, causal=True),
    "modular-addition": ModularAddition,
    "facts-in-context": FactsInContext,
    "language": Language,
    "facts-4096": partial(ToyFacts, n_subjects=4096),
    "modular-addition-113": partial(ModularAddition, 113, 0.3),
    "language-small": partial(Language, "small"),
    "language-large": partial(Language, "large"),
}
"""Every task by the name that `interp train` takes, with its default options; the last four are other sizes."""


def as_task(task: Task | str) -> Task:
    """A task, or the one of that name with its default options. TaskError for an unknown name."""
    if not isinstance(task, str):
        return task
    if task not in TASKS:
        raise TaskError(f"task {task!r} is not allowed; allowed: {', '.join(map(repr, TASKS))}")
    return TASKS[task]()


def restore(about: Mapping[str, Any]) -> Task:
    """The task that a training folder describes: its name and its options. TaskError for one that is none of ours."""
    try:
        task = as_task(str(about["name"]))
        return dataclasses.replace(task, **about)  # type: ignore[type-var]
    except (KeyError, TypeError) as error:
        raise TaskError(f"{dict(about)!r} describes no task of ours ({error!r}); allowed: a name of {', '.join(TASKS)} with its "
                        "options") from None  # fmt: skip


__all__ = [
    "TASKS",
    "Batch",
    "Dyck",
    "FactSet",
    "FactsInContext",
    "Goal",
    "Induction",
    "KnownFacts",
    "Language",
    "Lookahead",
    "ModularAddition",
    "Pairs",
    "Prompts",
    "Rewriting",
    "Task",
    "TaskError",
    "ToyFacts",
    "as_task",
    "attribute_sets",
    "known_facts",
    "neighbours",
    "paraphrases",
    "real_facts",
    "replacement_pairs",
    "restore",
]
