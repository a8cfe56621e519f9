"""Circuits: which edges between the components of a model carry a behaviour."""

from interp.circuits.acdc import Circuit, acdc
from interp.circuits.attribution import EdgeScores, edge_attribution
from interp.circuits.faithfulness import FRACTIONS, curve_areas, faithfulness, faithfulness_curve
from interp.circuits.files import circuit_document, load_circuit, save_circuit
from interp.circuits.graph import CircuitError, Graph
from interp.circuits.patching import edge_patch
from interp.circuits.scrubbing import causal_scrub, scrubbing_loss

__all__ = [
    "FRACTIONS",
    "Circuit",
    "CircuitError",
    "EdgeScores",
    "Graph",
    "acdc",
    "causal_scrub",
    "circuit_document",
    "curve_areas",
    "edge_attribution",
    "edge_patch",
    "faithfulness",
    "faithfulness_curve",
    "load_circuit",
    "save_circuit",
    "scrubbing_loss",
]
