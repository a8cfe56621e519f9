"""Many interventions on one base run: patching sweeps."""

from interp.sweep.result import SweepResult
from interp.sweep.sweep import SweepError, patch_sweep

__all__ = ["SweepError", "SweepResult", "patch_sweep"]
