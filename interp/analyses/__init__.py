"""One file per method: (model, inputs, choices) -> tidy table, one row per measurement."""

from interp.analyses.ffn_memory import ffn_keys, ffn_triggers, ffn_values
from interp.analyses.logit_lens import logit_lens

__all__ = ["ffn_keys", "ffn_triggers", "ffn_values", "logit_lens"]
