"""Statistics that the claims need and no library has."""

from interp.stats.shapley import Shapley, ShapleyError, coalitions, shapley

__all__ = ["Shapley", "ShapleyError", "coalitions", "shapley"]
