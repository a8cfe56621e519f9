"""Toy tasks and fact sets: vocabulary, sampler, contrast pairs, ground truth. One file per task."""

from collections.abc import Callable
from functools import partial

from interp.tasks.dyck import Dyck
from interp.tasks.facts import FactSet, Prompts, real_facts, replacement_pairs
from interp.tasks.induction import Induction
from interp.tasks.lookahead import Lookahead
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
}
"""Every task by the name that `interp train` takes, with its default options."""


def as_task(task: Task | str) -> Task:
    """A task, or the one of that name with its default options. TaskError for an unknown name."""
    if not isinstance(task, str):
        return task
    if task not in TASKS:
        raise TaskError(f"task {task!r} is not allowed; allowed: {', '.join(map(repr, TASKS))}")
    return TASKS[task]()


__all__ = [
    "TASKS",
    "Batch",
    "Dyck",
    "FactSet",
    "Goal",
    "Induction",
    "Lookahead",
    "Pairs",
    "Prompts",
    "Rewriting",
    "Task",
    "TaskError",
    "ToyFacts",
    "as_task",
    "real_facts",
    "replacement_pairs",
]
