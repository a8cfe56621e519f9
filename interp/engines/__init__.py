"""Where many independent units of work run: this process, this machine's processes, or a Ray cluster."""

from interp.engines.errors import EngineError, UnitsFailedError
from interp.engines.run import ENGINES, run_units

__all__ = ["ENGINES", "EngineError", "UnitsFailedError", "run_units"]
