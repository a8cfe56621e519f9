"""TransformerLens's bridges in: any of them, or any transformers model it knows, as our `Hookable`."""

from interp.bridges.lens_in.model import BridgedConfig, BridgedModel, from_transformer_lens

__all__ = ["BridgedConfig", "BridgedModel", "from_transformer_lens"]
