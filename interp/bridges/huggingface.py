"""transformers models into ours and back: every key and shape asserted, nothing folded, the given object untouched."""

from __future__ import annotations

import importlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interp.bridges.families import FAMILIES, BridgeError, Family, Name, refuse
from interp.bridges.misfits import misfit
from interp.hookable import Hookable
from interp.model.checkpoint import fill
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer, require_transformer


def optional(module: str, extra: str) -> Any:
    """Import a module of an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this needs {module}, which is not installed: pip install 'interp[{extra}]'") from error


def from_huggingface(
    model: Any,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """Our Transformer with the weights of a transformers model, in eval mode.

    model: a transformers model object (left bit-identical), a local folder or a hub name: a causal language model of Llama,
    Mistral, Qwen2, Qwen3 or GPT-2, or a BERT body (BertModel; its pooler is no part of it). dtype, device: the source's
    unless given. Outputs equal transformers' eager ones up to rounding. Costs one copy of the weights beside the source.
    Raises BridgeError naming the first feature that ours cannot express; `from_transformer_lens` wraps such a model instead.
    """
    if isinstance(model, str | Path):
        model = _load(str(model), revision, dtype)
    architecture = type(model).__name__
    if isinstance(model, Hookable):
        raise BridgeError(
            f"this {architecture} can already be read and changed here; allowed: a transformers model, folder or name"
        )
    if architecture not in FAMILIES:
        raise BridgeError(f"architecture {architecture} is not supported; allowed: {', '.join(FAMILIES)}. What does not fit: "
                          f"{misfit(architecture, model.config)}. interp.from_transformer_lens(model) wraps it as it is, "
                          "and every analysis runs on the wrapper.")  # fmt: skip
    family = FAMILIES[architecture]
    if family.head is not None:
        refuse(model.config, {"is_causal": True}, architecture)
    config = family.read(model.config)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items() if name not in family.ignored}
    _plain(weights, architecture)
    _untie(config, weights, family.head, model.get_input_embeddings().weight.detach())
    taken = {name.ours: _take(weights, name) for name in family.names(config)}
    if weights:
        raise BridgeError(f"{architecture} has weights that ours has no place for: {sorted(weights)[:5]}")
    target = next(iter(taken.values()))
    device, dtype = device or target.device, dtype or target.dtype
    ours = Transformer(config, seed=None)
    for name in list(taken):  # one at a time, so that a change of dtype never holds a third copy
        taken[name] = taken[name].to(device, dtype)
    fill(ours, taken, architecture)
    return ours.eval()


def to_huggingface(model: Transformer) -> Any:
    """A transformers model with copies of our weights, in eval mode, of the first family that expresses the config exactly.

    GPT-2, Llama, Mistral, Qwen2, Qwen3 or BertModel: whether one does is decided by reading its config back. Raises
    BridgeError naming the fields in which the nearest family differs.
    """
    require_transformer(model, "to_huggingface")
    transformers = optional("transformers", "hf")
    family, config = _fitting(transformers, model.config)
    with torch.random.fork_rng(devices=[]):  # their weights are drawn and thrown away; the caller's generator stays put
        theirs = getattr(transformers, family.architecture)(config, **dict(family.keywords))
    theirs = theirs.to(device=model.device, dtype=model.dtype)
    wanted, own = theirs.state_dict(), dict(model.named_parameters())
    given: dict[str, Tensor] = {}
    for name in family.names(model.config):
        whole = own.pop(name.ours).detach()
        whole = whole.T if name.turned else whole
        parts = whole.split([wanted[one].shape[0] for one in name.theirs])
        given |= {one: part.clone() for one, part in zip(name.theirs, parts, strict=True)}
    if own:
        raise BridgeError(f"{family.architecture} has no place for our weights {sorted(own)[:5]}")
    if model.config.tied_embeddings and family.head is not None:
        given[family.head] = given[family.embedding]
    theirs.load_state_dict(given, strict=True)
    return theirs.eval()


def _fitting(transformers: Any, config: ModelConfig) -> tuple[Family, Any]:
    """The family whose config, read back, is ours."""
    differing: dict[str, list[str]] = {}
    for family in FAMILIES.values():
        try:
            theirs = getattr(transformers, family.config_class)(**family.write(config))
            back = family.read(theirs)
        except Exception as error:  # transformers' configs refuse values with errors of many kinds; that family is out
            differing[family.architecture] = [f"{error}"] * 99
            continue
        names = [field.name for field in fields(ModelConfig)]
        found = [
            f"{n}={getattr(config, n)!r} (it has {getattr(back, n)!r})"
            for n in names
            if getattr(config, n) != getattr(back, n)
        ]
        if not found:
            return family, theirs
        differing[family.architecture] = found
    nearest = min(differing, key=lambda name: len(differing[name]))
    raise BridgeError(f"no family of transformers expresses this config; the nearest, {nearest}, differs in "
                      f"{', '.join(differing[nearest][:5])}; allowed: what one of {', '.join(FAMILIES)} can be")  # fmt: skip


def _load(name: str, revision: str | None, dtype: torch.dtype | None) -> Any:
    transformers = optional("transformers", "hf")
    config = transformers.AutoConfig.from_pretrained(name, revision=revision)
    auto = transformers.AutoModel if config.model_type == "bert" else transformers.AutoModelForCausalLM
    return auto.from_pretrained(name, revision=revision, dtype=dtype or "auto")


def _untie(config: ModelConfig, weights: dict[str, Tensor], head: str | None, embedding: Tensor) -> None:
    """A tied head is the embedding and is dropped; one that differs contradicts the config."""
    if config.tied_embeddings and head in weights and not torch.equal(weights.pop(head), embedding):
        raise BridgeError(f"tie_word_embeddings is set, but {head} differs from the token embedding")


def _plain(weights: dict[str, Tensor], architecture: str) -> None:
    """Raise for weights that are not numbers at hand: quantised, or left on the meta device by an offloading loader."""
    for name, tensor in weights.items():
        if tensor.is_meta or not tensor.is_floating_point():
            where = "on the meta device (offloaded)" if tensor.is_meta else f"of type {tensor.dtype} (quantised)"
            raise BridgeError(f"{architecture}: {name} is {where}; allowed: floating-point weights in memory")


def _take(source: dict[str, Tensor], name: Name) -> Tensor:
    """Remove the named tensors from `source`, their rows joined; `fill` makes the copy."""
    missing = [one for one in name.theirs if one not in source]
    if missing:
        raise BridgeError(f"the source lacks the weight {missing[0]!r} that its config asks for")
    found = [source.pop(one) for one in name.theirs]
    joined = torch.cat(found) if len(found) > 1 else found[0]
    return joined.T.contiguous() if name.turned else joined
