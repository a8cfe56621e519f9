"""The transformer written to be read beside the textbook: config, norms, positions, attention, feedforward, block."""

from interp.model.checkpoint import CheckpointError, load, save
from interp.model.config import ConfigError, ModelConfig
from interp.model.folding import center, fold_norm
from interp.model.inputs import Inputs, InputsError, KVCache, as_inputs, teacher_forced
from interp.model.transformer import Transformer

__all__ = [
    "CheckpointError",
    "ConfigError",
    "Inputs",
    "InputsError",
    "KVCache",
    "ModelConfig",
    "Transformer",
    "as_inputs",
    "center",
    "fold_norm",
    "load",
    "save",
    "teacher_forced",
]
