"""Models of other libraries in and out; the only place that imports them."""

from interp.bridges.families import BridgeError
from interp.bridges.huggingface import from_huggingface, to_huggingface
from interp.bridges.lens_in import from_transformer_lens
from interp.bridges.lens_out import to_transformer_lens
from interp.bridges.minilm import MINILM_PREFIX, MINILM_SUFFIX, minilm
from interp.bridges.smollm2 import SMOLLM2_PREFIX, smollm2

__all__ = [
    "MINILM_PREFIX",
    "MINILM_SUFFIX",
    "SMOLLM2_PREFIX",
    "BridgeError",
    "from_huggingface",
    "from_transformer_lens",
    "minilm",
    "smollm2",
    "to_huggingface",
    "to_transformer_lens",
]
