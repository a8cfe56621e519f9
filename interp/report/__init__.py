"""One page from tables and figures."""

from interp.report.build import build

__all__ = ["build"]
