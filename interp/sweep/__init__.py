"""Many interventions on one base run: patching sweeps."""

from interp.sweep.checkpoint import Checkpoint
from interp.sweep.errors import SweepCheckError, SweepError, SweepInterrupted
from interp.sweep.many import ablation_sweep, knock_out_sweep, plan_ablation, run_many
from interp.sweep.patch import SweepPlan, patch_sweep, plan_sweep
from interp.sweep.paths import path_patch
from interp.sweep.result import SweepResult

__all__ = [
    "Checkpoint",
    "SweepCheckError",
    "SweepError",
    "SweepInterrupted",
    "SweepPlan",
    "SweepResult",
    "ablation_sweep",
    "knock_out_sweep",
    "patch_sweep",
    "path_patch",
    "plan_ablation",
    "plan_sweep",
    "run_many",
]
