"""What a rank-one edit is compared with: fine-tuning of one matrix, a random edit of the same size, many facts over several
layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from interp.analyses.editing import Edit, EditError, Module, Rewrite, find_values
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.sites import Site


def fine_tuned_edit(
    model: Transformer,
    rewrite: Rewrite,
    layer: int,
    module: Module = "ffn",
    steps: int = 25,
    learning_rate: float = 5e-4,
    limit: float | None = None,
    stop_at: float = 0.01,
) -> Edit:
    """The same matrix trained by Adam on the rewrite's prompts until −log P(target) is below `stop_at` nats (FT); limit: the
    largest change of any number of it (FT+L, Zhu et al. 2020)."""
    edit = Edit(layer, module, torch.zeros(()), "FT" if limit is None else "FT+L")
    old = model.get_parameter(edit.parameter).detach()
    change = torch.zeros_like(old, requires_grad=True)
    optimizer, losses = torch.optim.Adam([change], lr=learning_rate), []
    for step in range(steps + 1):
        with torch.enable_grad():
            logits = edited_logits(model, {edit.parameter: old + change}, rewrite.inputs)
            loss = -logits.log_softmax(-1)[:, rewrite.target].mean()
        losses.append(float(loss.detach()))
        if step == steps or losses[-1] < stop_at:
            break
        (change.grad,) = torch.autograd.grad(loss, change)
        optimizer.step()
        if limit is not None:
            with torch.no_grad():
                change.clamp_(-limit, limit)
    return Edit(layer, module, change.detach().T.clone(), edit.method, losses=tuple(losses))


def random_edit(edit: Edit, seed: int) -> Edit:
    """A rank-one update of random directions with the same Frobenius norm: what any change of that size does."""
    drawn = torch.Generator().manual_seed(seed)
    n, d = edit.update.shape
    update = torch.outer(*(torch.randn(size, generator=drawn, dtype=torch.float64) for size in (n, d))).to(edit.update)
    return Edit(edit.layer, edit.module, update * (edit.update.norm() / update.norm()), "random rank-one")


def random_key_edit(edit: Edit, seed: int) -> Edit:
    """The same value written for a key drawn at random, with the same size of update: does the key matter?"""
    if edit.value is None:
        raise EditError(f"{edit!r} has no value of its own; allowed: a rank-one edit")
    key = torch.randn(len(edit.update), generator=torch.Generator().manual_seed(seed)).to(edit.update)
    update = torch.outer(key, edit.value)
    return Edit(edit.layer, edit.module, update * (edit.update.norm() / update.norm()), "random key")


def spread_edit(
    model: Transformer,
    rewrites: Sequence[Rewrite],
    layers: Sequence[int],
    covariances: Mapping[int, Tensor],
    weight: float = 20000.0,
    position: Any = "subject_last",
    **search: Any,
) -> list[Edit]:
    """Many facts at once, spread over the FFNs of several layers (MEMIT): one edit per layer, to be applied together.

    What is wanted is a stream after the last of the layers; each layer, the lowest first and the earlier ones changed
    already, writes an equal part of what is still lacking: W += (λC + KᵀK)⁻¹ Kᵀ R / (layers left), K [rewrite n] its keys and
    R [rewrite d_model] the rest. weight: λ, in numbers of keys. Raises EditError."""
    ordered = sorted(layers)
    if not ordered or len(set(ordered)) != len(ordered) or any(layer not in covariances for layer in ordered):
        known = sorted(covariances)
        raise EditError(
            f"layers={list(layers)!r} are not allowed; allowed: different ones of {known}, which have a covariance"
        )
    top = Site("resid_post", ordered[-1])
    wanted = find_values(model, rewrites, ordered[-1], "ffn", position, site=top, **search)
    goal, current, edits = wanted.before + wanted.deltas, model, []
    for i, layer in enumerate(ordered):
        now = find_values(current, rewrites, layer, "ffn", position, site=top, steps=0, **_only(search))
        keys, lacking = now.keys.double(), (goal - now.before).double() / (len(ordered) - i)
        c = covariances[layer].to(keys)
        update = torch.linalg.solve(weight * c + keys.T @ keys, keys.T) @ lacking
        edits.append(Edit(layer, "ffn", update.to(goal), "MEMIT", losses=tuple(x[-1] for x in wanted.losses)))
        current = edits[-1].applied(current)
    return edits


def _only(search: Mapping[str, Any]) -> dict[str, Any]:
    """What a search of no steps may be told."""
    return {name: value for name, value in search.items() if name in ("decay", "kl_weight")}


def edited_logits(model: Transformer, weights: Mapping[str, Tensor], inputs: Inputs) -> Tensor:
    """Logits [batch vocab] at each prompt's last token, with some parameters replaced for this call."""
    logits = functional_call(model, dict(weights), (inputs,))
    return logits[torch.arange(inputs.batch, device=logits.device), inputs.last()]


def together(edits: Sequence[Edit], model: Transformer) -> dict[str, Tensor]:
    """The parameters that several edits change, all applied, by name."""
    found: dict[str, Tensor] = {}
    for edit in edits:
        old = found.get(edit.parameter, model.get_parameter(edit.parameter).detach())
        found[edit.parameter] = old + edit.update.T.to(old)
    return found
