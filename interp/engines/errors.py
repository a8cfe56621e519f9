"""What can be wrong with a call, and what a run that could not finish says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

_SHOWN = 10  # failed units named in the message


class EngineError(ValueError):
    """A call, a unit or a folder that is not allowed; says which value and what is."""


class UnitsFailedError(RuntimeError):
    """Some units failed, the others are finished; `failures` maps each failed unit to its last error line."""

    def __init__(self, folder: Path, failures: Mapping[str, str], total: int) -> None:
        self.folder, self.failures, self.total = folder, dict(failures), total
        named = [f"{name!r} ({line})" for name, line in list(failures.items())[:_SHOWN]]
        more = f" and {len(failures) - _SHOWN} more" if len(failures) > _SHOWN else ""
        super().__init__(
            f"{len(failures)} of {total} units failed: {', '.join(named)}{more}; tracebacks in {folder}/<unit>.error.txt; "
            "the others are finished, and the same call runs only the failed ones again"
        )

    def __reduce__(self):
        return type(self), (self.folder, self.failures, self.total)
