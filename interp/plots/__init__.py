"""Tidy table -> matplotlib figure. Nothing is computed here but means for display; nothing here imports torch."""

from interp.plots.curves import lens_curves, training_curves
from interp.plots.heatmap import effect_heatmaps, head_heatmap
from interp.plots.parity import parity_map

__all__ = ["effect_heatmaps", "head_heatmap", "lens_curves", "parity_map", "training_curves"]
