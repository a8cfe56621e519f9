"""TransformerLens's bridges in: any of them, or any transformers model it knows, as our `Hookable`."""

from interp.bridges.lens_in.model import LensConfig, LensModel, from_transformer_lens

__all__ = ["LensConfig", "LensModel", "from_transformer_lens"]
