"""Models of other libraries in and out; the only place that imports them."""

from interp.bridges.huggingface import BridgeError, from_huggingface
from interp.bridges.smollm2 import SMOLLM2_PREFIX, smollm2

__all__ = ["SMOLLM2_PREFIX", "BridgeError", "from_huggingface", "smollm2"]
