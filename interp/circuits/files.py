"""A circuit as JSON in the format of the MIB circuit track (that of EAP-IG's graphs)."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interp.circuits.graph import CircuitError, Graph
from interp.record import write_text


def circuit_document(graph: Graph, kept: Tensor, scores: Tensor | None = None) -> dict[str, Any]:
    """cfg, nodes (in_graph) and edges (score, in_graph), for kept [receiver sender] bool and scores (None: 1 for kept, 0 else).

    That format knows query heads only: an edge into a shared key or value stands once for every query head that reads it.
    """
    values = kept.to(torch.float64) if scores is None else scores
    edges = {}
    for r, s in graph.admitted.nonzero().tolist():
        score = float(values[r, s])
        one = {"score": 0.0 if math.isnan(score) else score, "in_graph": bool(kept[r, s])}
        edges |= {f"{graph.senders[s]}->{name}": one for name in _read_by(graph, graph.receivers[r])}
    inside = {name for edge, one in edges.items() if one["in_graph"] for name in edge.split("<")[0].split("->")}
    nodes = {name: {"in_graph": name in inside} for name in (*graph.senders, "logits")}
    cfg = {"n_layers": graph.n_layers, "n_heads": graph.n_heads, "parallel_attn_mlp": False, "d_model": graph.d_model}
    return {"cfg": cfg, "nodes": nodes, "edges": edges}


def save_circuit(path: str | Path, graph: Graph, kept: Tensor, scores: Tensor | None = None) -> Path:
    """`circuit_document` as a file, whole or absent; never overwrites."""
    if Path(path).exists():
        raise FileExistsError(f"{path} exists; circuits are never overwritten, choose a new file")
    return write_text(path, json.dumps(circuit_document(graph, kept, scores)))


def load_circuit(path: str | Path, graph: Graph) -> tuple[Tensor, Tensor]:
    """(kept bool, scores) [receiver sender] of such a file for this graph. CircuitError when it is another model's, or none."""
    try:
        document = json.loads(Path(path).read_text())
        cfg, edges = document["cfg"], document["edges"]
        found = {name: (bool(one["in_graph"]), float(one["score"])) for name, one in edges.items()}
        sizes = {name: cfg[name] for name in ("n_layers", "n_heads", "d_model")}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CircuitError(
            f"{path} is not a circuit ({error!r}); allowed: a file of save_circuit or of EAP-IG"
        ) from error
    wanted = {name: getattr(graph, name) for name in sizes}
    if sizes != wanted:
        raise CircuitError(f"{path} is a circuit of a model with {sizes}; allowed: {wanted}")
    kept, scores = torch.zeros_like(graph.admitted), torch.zeros(graph.admitted.shape, dtype=torch.float64)
    for r, s in graph.admitted.nonzero().tolist():
        names = [f"{graph.senders[s]}->{name}" for name in _read_by(graph, graph.receivers[r])]
        lacking = [name for name in names if name not in found]
        if lacking:
            raise CircuitError(f"{path} lacks the edge {lacking[0]}; allowed: every edge of the model")
        kept[r, s] = any(found[name][0] for name in names)
        scores[r, s] = sum(found[name][1] for name in names) / len(names)
    return kept, scores


def _read_by(graph: Graph, receiver: str) -> list[str]:
    """The receiver's name for every query head that it serves."""
    if not receiver.endswith(("<k>", "<v>")) or graph.kv_heads == graph.n_heads:
        return [receiver]
    place, part = receiver[:-3], receiver[-3:]
    layer, head = place.split(".h")
    group = graph.n_heads // graph.kv_heads
    return [f"{layer}.h{int(head) * group + i}{part}" for i in range(group)]
