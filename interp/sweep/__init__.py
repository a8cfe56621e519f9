"""Many interventions on one base run: patching sweeps."""

from interp.sweep.checkpoint import Checkpoint
from interp.sweep.errors import SweepCheckError, SweepError, SweepInterrupted
from interp.sweep.patch import SweepPlan, patch_sweep, plan_sweep
from interp.sweep.result import SweepResult

__all__ = [
    "Checkpoint",
    "SweepCheckError",
    "SweepError",
    "SweepInterrupted",
    "SweepPlan",
    "SweepResult",
    "patch_sweep",
    "plan_sweep",
]
