"""A textbook transformer you can open, and an analysis library that tests what the textbook says."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from interp.activations import Activations, open_activations
from interp.analyses import (
    DAS,
    ModelInfo,
    TunedLens,
    attention_knock_out,
    attention_mass,
    attribute_rate,
    attribution_patch,
    causal_trace,
    composition_scores,
    corpus_triggers,
    decompose,
    direct_logit_attribution,
    extraction,
    ffn_keys,
    ffn_triggers,
    ffn_values,
    head_scores,
    interchange,
    knowledge_neurons,
    logit_lens,
    memory_agreement,
    memory_pairs,
    model_info,
    neuron_attribution,
    neuron_card,
    probe,
    rank_one_edit,
    values_promoting,
)
from interp.circuits import acdc, edge_attribution, edge_patch
from interp.corpus import record_corpus
from interp.generate import Generated, generate
from interp.hookable import Hookable
from interp.interventions import Add, AddNoise, Freeze, KnockOut, Mean, Project, Replace, Resample, Scale, Zero
from interp.metrics import Metric, kl_divergence, log_probability, logit_difference, loss, probability
from interp.model import (
    Inputs,
    KVCache,
    ModelConfig,
    Transformer,
    center,
    fold_norm,
    load,
    save,
    teacher_forced,
)
from interp.run import Cache, Run, run
from interp.sites import SITES, Site
from interp.sweep import SweepResult, ablation_sweep, knock_out_sweep, patch_sweep, path_patch, plan_sweep, run_many
from interp.tokens import Vocabulary, tokenize
from interp.training import TrainConfig, train

if TYPE_CHECKING:
    from interp.bridges import (
        from_huggingface,
        from_transformer_lens,
        minilm,
        smollm2,
        to_huggingface,
        to_transformer_lens,
    )
    from interp.plots.attention import attention_widget
    from interp.tasks.shipped import shipped

# Loaded on first use: they import transformers or matplotlib, or read files.
_LAZY = {
    "attention_widget": "interp.plots",
    "from_huggingface": "interp.bridges",
    "from_transformer_lens": "interp.bridges",
    "minilm": "interp.bridges",
    "smollm2": "interp.bridges",
    "to_huggingface": "interp.bridges",
    "to_transformer_lens": "interp.bridges",
    "bridges": None,
    "claims": None,
    "plots": None,
    "tasks": None,
    "analyses": None,
    "shipped": "interp.tasks.shipped",
}

__all__ = [
    "DAS",
    "SITES",
    "Activations",
    "Add",
    "AddNoise",
    "Cache",
    "Freeze",
    "Generated",
    "Hookable",
    "Inputs",
    "KVCache",
    "KnockOut",
    "Mean",
    "Metric",
    "ModelConfig",
    "ModelInfo",
    "Project",
    "Replace",
    "Resample",
    "Run",
    "Scale",
    "Site",
    "SweepResult",
    "TrainConfig",
    "Transformer",
    "TunedLens",
    "Vocabulary",
    "Zero",
    "ablation_sweep",
    "acdc",
    "attention_knock_out",
    "attention_mass",
    "attention_widget",
    "attribute_rate",
    "attribution_patch",
    "causal_trace",
    "center",
    "composition_scores",
    "corpus_triggers",
    "decompose",
    "direct_logit_attribution",
    "edge_attribution",
    "edge_patch",
    "extraction",
    "ffn_keys",
    "ffn_triggers",
    "ffn_values",
    "fold_norm",
    "from_huggingface",
    "from_transformer_lens",
    "generate",
    "head_scores",
    "interchange",
    "kl_divergence",
    "knock_out_sweep",
    "knowledge_neurons",
    "load",
    "log_probability",
    "logit_difference",
    "logit_lens",
    "loss",
    "memory_agreement",
    "memory_pairs",
    "minilm",
    "model_info",
    "neuron_attribution",
    "neuron_card",
    "open_activations",
    "patch_sweep",
    "path_patch",
    "plan_sweep",
    "probability",
    "probe",
    "rank_one_edit",
    "record_corpus",
    "run",
    "run_many",
    "save",
    "shipped",
    "smollm2",
    "teacher_forced",
    "to_huggingface",
    "to_transformer_lens",
    "tokenize",
    "train",
    "values_promoting",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'interp' has no attribute {name!r}")
    module = _LAZY[name]
    found = importlib.import_module(f"interp.{name}" if module is None else module)
    return found if module is None else getattr(found, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_LAZY})
