"""One file per method: (model, inputs, choices) -> tidy table, one row per measurement."""

from interp.analyses.agreement import key_value_agreement
from interp.analyses.attention_mass import attention_mass, permuted_keys
from interp.analyses.attributes import attribute_rate, extraction, rates
from interp.analyses.attribution_patching import attribution_patch
from interp.analyses.attribution_result import AttributionResult
from interp.analyses.causal_trace import causal_trace
from interp.analyses.circuits import Factored, ov_circuit, qk_circuit
from interp.analyses.composition import composition_scores, read_write_overlaps, subspace_overlap
from interp.analyses.das import DAS
from interp.analyses.decompose import Decomposition, decompose
from interp.analyses.describe import DescribeError, ModelInfo, model_info
from interp.analyses.edit_controls import fine_tuned_edit, random_edit, random_key_edit, spread_edit
from interp.analyses.edit_scores import EditCase, edit_cases, edit_scores, edit_summary
from interp.analyses.editing import Edit, Rewrite, key_covariance, rank_one_edit
from interp.analyses.ffn_memory import ffn_keys, ffn_triggers, ffn_values
from interp.analyses.heads import head_scores, repeated_tokens
from interp.analyses.interchange import Interchange, interchange
from interp.analyses.knock_out import attention_knock_out, knock_out_effects
from interp.analyses.knowledge_neurons import knowledge_neurons, neuron_attribution, neuron_effects, relative_change
from interp.analyses.logit_attribution import direct_logit_attribution
from interp.analyses.logit_lens import lens_bias, logit_lens
from interp.analyses.memory_agreement import confident_values, memory_agreement, memory_pairs, values_promoting
from interp.analyses.neuron_cards import NeuronCard, cards_page, neuron_card
from interp.analyses.over_training import over_training
from interp.analyses.parameters import parameter_table, stream_identity
from interp.analyses.probes import probe
from interp.analyses.progress import key_frequencies, logit_measures, progress_measures
from interp.analyses.shares import site_shares, weight_shares
from interp.analyses.subject_noise import noise_scale
from interp.analyses.subupdates import ffn_subupdates, prediction_events, subupdate_shares
from interp.analyses.trace_effects import held_out_peaks, trace_agreement, trace_effects, trace_tests
from interp.analyses.trace_result import TraceResult, position_roles
from interp.analyses.triggers import Triggers, corpus_triggers
from interp.analyses.tuned_lens import TunedLens

__all__ = [
    "DAS",
    "AttributionResult",
    "Decomposition",
    "DescribeError",
    "Edit",
    "EditCase",
    "Factored",
    "Interchange",
    "ModelInfo",
    "NeuronCard",
    "Rewrite",
    "TraceResult",
    "Triggers",
    "TunedLens",
    "attention_knock_out",
    "attention_mass",
    "attribute_rate",
    "attribution_patch",
    "cards_page",
    "causal_trace",
    "composition_scores",
    "confident_values",
    "corpus_triggers",
    "decompose",
    "direct_logit_attribution",
    "edit_cases",
    "edit_scores",
    "edit_summary",
    "extraction",
    "ffn_keys",
    "ffn_subupdates",
    "ffn_triggers",
    "ffn_values",
    "fine_tuned_edit",
    "head_scores",
    "held_out_peaks",
    "interchange",
    "key_covariance",
    "key_frequencies",
    "key_value_agreement",
    "knock_out_effects",
    "knowledge_neurons",
    "lens_bias",
    "logit_lens",
    "logit_measures",
    "memory_agreement",
    "memory_pairs",
    "model_info",
    "neuron_attribution",
    "neuron_card",
    "neuron_effects",
    "noise_scale",
    "ov_circuit",
    "over_training",
    "parameter_table",
    "permuted_keys",
    "position_roles",
    "prediction_events",
    "probe",
    "progress_measures",
    "qk_circuit",
    "random_edit",
    "random_key_edit",
    "rank_one_edit",
    "rates",
    "read_write_overlaps",
    "relative_change",
    "repeated_tokens",
    "site_shares",
    "spread_edit",
    "stream_identity",
    "subspace_overlap",
    "subupdate_shares",
    "trace_agreement",
    "trace_effects",
    "trace_tests",
    "values_promoting",
    "weight_shares",
]
