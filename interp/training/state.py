"""A training run's state between steps, in one safetensors file: weights, optimiser moments, curves so far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from interp.record import write_atomic


def write_state(
    path: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    step: int,
    rows: list[dict],
    seconds: float,
    run: str = "",
) -> None:
    """Everything `read_state` needs, whole or not at all. run: whose state it is."""
    tensors = {f"model.{name}": value.detach().cpu().contiguous() for name, value in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value.detach().cpu().clone() for name, value in moments.items()}
    about = {"step": step, "rows": rows, "seconds": seconds, "run": run}
    write_atomic(path, lambda temporary: save_file(tensors, temporary, metadata={"about": json.dumps(about)}))


def read_state(
    path: Path, model: nn.Module, optimizer: torch.optim.Optimizer, run: str = ""
) -> tuple[int, list[dict], float]:
    """Load weights and moments in place; returns (next step, curve rows, seconds spent). ValueError for another run's."""
    with safe_open(path, framework="pt") as file:
        about = json.loads(file.metadata()["about"])
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    if about.get("run", "") != run:
        raise ValueError("it is the state of a run with other settings")
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, moment = name.split(".", 2)
            state.setdefault(int(index), {})[moment] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return about["step"], about["rows"], about["seconds"]
