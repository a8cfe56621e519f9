"""Where a tuned lens is kept: safetensors for its maps, JSON for the rest, never pickle; bound to the model it was trained on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from interp.analyses.logit_lens import LensError
from interp.hookable import Hookable
from interp.record import new_folder
from interp.sites import Site

FORMAT = "interp-tuned-lens-1"


def write_lens(folder: str | Path, about: Mapping[str, Any], weights: Mapping[str, Tensor]) -> Path:
    """Write a new folder, whole or not at all; about: JSON values sites, settings, model, trained_on.

    Raises FileExistsError, and LensError for weights that are not finite.
    """
    folder = Path(folder)
    _finite(weights, "this lens")
    if folder.exists():
        raise FileExistsError(f"{folder} exists; a lens is never overwritten, choose a new folder")
    kept = {name: one.cpu().contiguous() for name, one in weights.items()}

    def fill(new: Path) -> None:
        (new / "lens.json").write_text(json.dumps({"format": FORMAT, **about}, indent=1) + "\n")
        save_file(kept, new / "weights.safetensors")
        (new / "weights.safetensors").chmod(0o644)

    return new_folder(folder, fill)


def read_lens(folder: str | Path, model: Hookable) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What `write_lens` was given, the weights on the model's device, every name, shape and value checked. Raises LensError."""
    about = _document(Path(folder))
    refuse_other(about["model"], model)
    path = Path(folder) / "weights.safetensors"
    try:
        weights = load_file(path)
    except (SafetensorError, OSError) as error:
        raise LensError(f"{path} is missing, truncated or not safetensors: {error}") from error
    d = model.config.d_model
    wanted = {f"{site}.{name}": shape for site in about["sites"] for name, shape in (("A", (d, d)), ("b", (d,)))}
    for name in sorted({*wanted, *weights}):
        found = tuple(weights[name].shape) if name in weights else "missing"
        if found != wanted.get(name):
            raise LensError(f"{path}: {name} is {found}; allowed: {wanted.get(name, 'no such name')}")
    _finite(weights, str(path))
    device = getattr(model, "device", "cpu")
    return about, {name: one.to(device) for name, one in weights.items()}


def _document(folder: Path) -> dict[str, Any]:
    try:
        document = json.loads((folder / "lens.json").read_text())
        made = document["format"]
        if made == FORMAT:
            for site in document["sites"]:
                Site.parse(site)
            return {name: document[name] for name in ("sites", "settings", "model", "trained_on")}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise LensError(f"{folder} is not a tuned lens: lens.json is missing or broken ({error!r})") from error
    raise LensError(f"{folder} has format {made!r}; allowed: {FORMAT!r}")


def fingerprint(model: Hookable) -> dict[str, Any]:
    """What tells one model from another: its config, and a hash of its weights where it names them."""
    config = model.config
    values = config.to_dict() if hasattr(config, "to_dict") else dataclasses.asdict(config)
    hashed = hashlib.blake2b(digest_size=16)
    for name, one in getattr(model, "named_parameters", list)():
        hashed.update(f"{name} {one.dtype} {tuple(one.shape)} ".encode())
        hashed.update(memoryview(one.detach().cpu().contiguous().flatten().view(torch.uint8).numpy()))  # type: ignore[arg-type]
    return {"config": json.loads(json.dumps(values, default=_plain, sort_keys=True)), "weights": hashed.hexdigest()}


def refuse_other(made: Any, model: Hookable) -> None:
    """LensError unless `made`, a fingerprint, is this model's."""
    here, made = fingerprint(model), made if isinstance(made, dict) else {}
    theirs = made.get("config") or {}
    differ = [f"{k} {theirs.get(k)!r}, not {v!r}" for k, v in here["config"].items() if theirs.get(k) != v]
    if differ or made.get("weights") != here["weights"]:
        what = "; ".join(differ[:4]) or "the config is the same and the weights differ"
        raise LensError(f"this lens was trained on another model ({what}); allowed: the model that it was trained on")


def _plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def _finite(weights: Mapping[str, Tensor], source: str) -> None:
    for name, one in weights.items():
        if not bool(torch.isfinite(one).all()):
            raise LensError(f"{source}: {name} has NaN or infinite entries; weights must be finite")
