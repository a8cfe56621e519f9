"""Saving and loading: safetensors for the weights, JSON for the rest, never pickle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from interp.model.config import ConfigError, ModelConfig
from interp.model.transformer import Transformer, require_transformer
from interp.record import new_folder

FORMAT = "interp-1"


class CheckpointError(ValueError):
    """A folder that does not hold a whole checkpoint of ours; the message says what is wrong with it."""


def save(model: Transformer, folder: str | Path, extra: dict[str, Any] | None = None) -> Path:
    """Write `config.json` and `weights.safetensors` into a new `folder`, whole or not at all.

    extra: JSON values to keep beside the config (task, tokenizer's words, provenance). FileExistsError if `folder`
    exists.
    """
    require_transformer(model, "save")
    folder = Path(folder)
    for name, tensor in model.state_dict().items():
        if not bool(torch.isfinite(tensor).all()):
            raise CheckpointError(f"{name} has NaN or infinite entries; only finite weights are saved")
    if folder.exists():
        raise FileExistsError(f"{folder} exists; checkpoints are never overwritten, choose a new folder")
    document = {"format": FORMAT, "dtype": str(model.dtype).removeprefix("torch."), "config": model.config.to_dict()}
    weights = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}

    def fill(new: Path) -> None:
        (new / "config.json").write_text(json.dumps({**document, "extra": extra or {}}, indent=1) + "\n")
        save_file(weights, new / "weights.safetensors")
        (new / "weights.safetensors").chmod(0o644)

    return new_folder(folder, fill)


def read_document(folder: str | Path) -> dict[str, Any]:
    """The JSON beside a checkpoint's weights: format, dtype, config, extra. CheckpointError when it is not ours."""
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise CheckpointError(
            f"{folder} is not a checkpoint: {path.name} is missing; allowed: a folder written by save()"
        )
    try:
        document = json.loads(path.read_text())
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    found = document.get("format") if isinstance(document, dict) else type(document).__name__
    if found != FORMAT and (path.parent / "model" / path.name).is_file():
        raise CheckpointError(f"{folder} is a training folder; allowed: its model, {path.parent / 'model'}")
    if found != FORMAT:
        raise CheckpointError(
            f"{path} has format {found!r}; allowed: {FORMAT!r} (for a transformers folder use interp.from_huggingface)"
        )
    return document


def load(folder: str | Path, device: torch.device | str = "cpu") -> Transformer:
    """The model that `save` wrote; every key, shape and value is checked. Raises CheckpointError."""
    document = read_document(folder)
    path = Path(folder) / "weights.safetensors"
    if not path.is_file():
        raise CheckpointError(f"{folder} is not a checkpoint: {path.name} is missing")
    try:
        config = ModelConfig.from_dict(document["config"])
        dtype = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32,
                 "float64": torch.float64}[document["dtype"]]  # fmt: skip
        weights = load_file(path, device=str(device))
    except (ConfigError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{folder}/config.json cannot be read: {error}") from error
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is truncated or not safetensors: {error}") from error
    model = Transformer(config, seed=None).to(device=device, dtype=dtype)
    fill(model, weights, str(path))
    return model.eval()


def fill(model: Transformer, weights: dict[str, torch.Tensor], source: str) -> None:
    """Give `weights` to `model` after checking every key, shape and value; empties the dict. CheckpointError names them."""
    wanted = model.state_dict()
    missing, foreign = sorted(set(wanted) - set(weights)), sorted(set(weights) - set(wanted))
    if missing or foreign:
        raise CheckpointError(f"{source}: missing weights {missing[:5]}, unknown weights {foreign[:5]}; "
                              f"the config asks for {len(wanted)} and {len(weights)} were found")  # fmt: skip
    for name, tensor in weights.items():
        if tensor.shape != wanted[name].shape:
            raise CheckpointError(f"{source}: {name} has shape {tuple(tensor.shape)}, the config asks for "
                                  f"{tuple(wanted[name].shape)}")  # fmt: skip
        if not bool(torch.isfinite(tensor).all()):
            count = int((~torch.isfinite(tensor)).sum())
            raise CheckpointError(f"{source}: {name} has {count} NaN or infinite entries; weights must be finite")
    # Fresh copies, one at a time: aligned as in a new model (so the same numbers bit for bit), sharing nothing with the
    # source (a mapped file, another library's model), and never two whole models in memory on our account.
    fresh = {name: weights.pop(name).clone(memory_format=torch.contiguous_format) for name in list(weights)}
    model.load_state_dict(fresh, assign=True)
