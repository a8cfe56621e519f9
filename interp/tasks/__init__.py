"""Toy tasks and fact sets: vocabulary, sampler, contrast pairs, ground truth."""

from interp.tasks.facts import FactSet, Pairs, Prompts, real_facts, replacement_pairs
from interp.tasks.toy_facts import ToyFacts

__all__ = ["FactSet", "Pairs", "Prompts", "ToyFacts", "real_facts", "replacement_pairs"]
