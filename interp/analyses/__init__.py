"""One file per method: (model, inputs, choices) -> tidy table, one row per measurement."""

from interp.analyses.agreement import key_value_agreement
from interp.analyses.attention_mass import attention_mass, permuted_keys
from interp.analyses.ffn_memory import ffn_keys, ffn_subupdates, ffn_triggers, ffn_values
from interp.analyses.logit_lens import logit_lens
from interp.analyses.parameters import parameter_table, stream_identity

__all__ = [
    "attention_mass",
    "ffn_keys",
    "ffn_subupdates",
    "ffn_triggers",
    "ffn_values",
    "key_value_agreement",
    "logit_lens",
    "parameter_table",
    "permuted_keys",
    "stream_identity",
]
