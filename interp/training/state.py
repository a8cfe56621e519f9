"""What an unfinished training goes on from, in one safetensors file: tensors, and a JSON document about them."""

from __future__ import annotations

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from interp.record import write_atomic
from interp.training.folder import TrainingFolderError

Loaded = TypeVar("Loaded")


def write_state(path: Path, tensors: dict[str, Tensor], about: dict[str, Any]) -> None:
    """Both, whole or not at all. about: JSON with a `step`. TrainingFolderError on a full disk: the last state is whole."""
    kept = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    try:
        write_atomic(path, lambda temporary: save_file(kept, temporary, metadata={"about": json.dumps(about)}))
    except Exception as error:
        full = getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error)
        if not full:
            raise
        last = f"the last state in {path} is whole" if path.exists() else "no state has been written yet"
        raise TrainingFolderError(f"no space left on the disk of {path.parent} at step {about['step']}; {last}: make room and "
                                  "resume (resume=True, --resume)") from error  # fmt: skip


def read_state(path: Path, take: Callable[[dict[str, Tensor], dict[str, Any]], Loaded]) -> Loaded:
    """What `take(tensors, about)` makes of a state. TrainingFolderError where the file is damaged or `take` refuses it."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads(file.metadata()["about"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
        return take(tensors, about)
    except Exception as error:  # whatever a damaged file raises
        raise TrainingFolderError(f"{path} is truncated or foreign: {error}; train into a new folder") from error


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """One model's weights and its optimiser's moments by name."""
    tensors = {f"model.{name}": value for name, value in model.state_dict().items()}
    for index, moments in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{name}": value for name, value in moments.items()}
    return tensors


def load_state(tensors: dict[str, Tensor], model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put back what `state_of` gave."""
    model.load_state_dict({n.removeprefix("model."): t for n, t in tensors.items() if n.startswith("model.")})
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        if name.startswith("optimizer."):
            _, index, moment = name.split(".", 2)
            state.setdefault(int(index), {})[moment] = tensor
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
