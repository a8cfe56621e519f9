"""Our models out: behind TransformerLens 4's protocols and the 3.x surface that people's notebooks use."""

from interp.bridges.lens_out.model import LensModel, to_transformer_lens

__all__ = ["LensModel", "to_transformer_lens"]
