"""One file per method: (model, inputs, choices) -> tidy table, one row per measurement."""

from interp.analyses.agreement import key_value_agreement
from interp.analyses.attention_mass import attention_mass, permuted_keys
from interp.analyses.attribution_patching import attribution_patch
from interp.analyses.attribution_result import AttributionResult
from interp.analyses.circuits import Factored, ov_circuit, qk_circuit
from interp.analyses.composition import composition_scores, read_write_overlaps, subspace_overlap
from interp.analyses.das import DAS
from interp.analyses.decompose import Decomposition, decompose
from interp.analyses.ffn_memory import ffn_keys, ffn_subupdates, ffn_triggers, ffn_values
from interp.analyses.heads import head_scores, repeated_tokens
from interp.analyses.interchange import Interchange, interchange
from interp.analyses.logit_attribution import direct_logit_attribution
from interp.analyses.logit_lens import lens_bias, logit_lens
from interp.analyses.over_training import over_training
from interp.analyses.parameters import parameter_table, stream_identity
from interp.analyses.progress import key_frequencies, logit_measures, progress_measures
from interp.analyses.tuned_lens import TunedLens

__all__ = [
    "DAS",
    "AttributionResult",
    "Decomposition",
    "Factored",
    "Interchange",
    "TunedLens",
    "attention_mass",
    "attribution_patch",
    "composition_scores",
    "decompose",
    "direct_logit_attribution",
    "ffn_keys",
    "ffn_subupdates",
    "ffn_triggers",
    "ffn_values",
    "head_scores",
    "interchange",
    "key_frequencies",
    "key_value_agreement",
    "lens_bias",
    "logit_lens",
    "logit_measures",
    "ov_circuit",
    "over_training",
    "parameter_table",
    "permuted_keys",
    "progress_measures",
    "qk_circuit",
    "read_write_overlaps",
    "repeated_tokens",
    "stream_identity",
    "subspace_overlap",
]
