"""Toy tasks and fact sets: vocabulary, sampler, contrast pairs, ground truth. One file per task."""

from collections.abc import Callable

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
    "copy": lambda: Rewriting("copy"),
    "reverse": lambda: Rewriting("reverse"),
    "sort": lambda: Rewriting("sort"),
    "dyck": Dyck,
    "lookahead": Lookahead,
    "lookahead-causal": lambda: Lookahead(causal=True),
}
"""Every task by the name that `interp train` takes, with its default options."""

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
    "real_facts",
    "replacement_pairs",
]
