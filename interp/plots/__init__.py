"""Tidy table -> matplotlib figure. Nothing is computed here but means for display; nothing here imports torch."""

from interp.plots.bars import effect_bars, effect_histogram
from interp.plots.curves import lens_curves, run_curves, training_curves
from interp.plots.heatmap import effect_heatmaps, head_heatmap
from interp.plots.parity import parity_map

__all__ = [
    "effect_bars",
    "effect_heatmaps",
    "effect_histogram",
    "head_heatmap",
    "lens_curves",
    "parity_map",
    "run_curves",
    "training_curves",
]
