"""Tidy table -> matplotlib figure. Nothing is computed here but means for display; nothing here imports torch."""

from interp.plots.allocation import allocation_curve, twin_curves
from interp.plots.attention import Widget, attention_widget
from interp.plots.attribution import attribution_bars, attribution_heatmap, composition_heatmap, head_score_heatmaps
from interp.plots.bars import effect_bars, effect_histogram
from interp.plots.calibration import calibration_curves
from interp.plots.claims import gradient_slopes, parameter_shares, reached_grid
from interp.plots.curves import lens_curves, run_curves, training_curves
from interp.plots.heatmap import effect_heatmaps, head_heatmap
from interp.plots.lens import estimate_scatter, lens_comparison
from interp.plots.memory import agreement_curves, probe_curves, subupdate_curves
from interp.plots.parity import parity_map
from interp.plots.progress import fourier_power, progress_curves
from interp.plots.stream import alignment_bars, composition_ranks, variance_curves
from interp.plots.trace import knock_out_curves, rate_curves, trace_heatmap, trace_lines

__all__ = [
    "Widget",
    "agreement_curves",
    "alignment_bars",
    "allocation_curve",
    "attention_widget",
    "attribution_bars",
    "attribution_heatmap",
    "calibration_curves",
    "composition_heatmap",
    "composition_ranks",
    "effect_bars",
    "effect_heatmaps",
    "effect_histogram",
    "estimate_scatter",
    "fourier_power",
    "gradient_slopes",
    "head_heatmap",
    "head_score_heatmaps",
    "knock_out_curves",
    "lens_comparison",
    "lens_curves",
    "parameter_shares",
    "parity_map",
    "probe_curves",
    "progress_curves",
    "rate_curves",
    "reached_grid",
    "run_curves",
    "subupdate_curves",
    "trace_heatmap",
    "trace_lines",
    "training_curves",
    "twin_curves",
    "variance_curves",
]
