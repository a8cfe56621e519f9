"""Rank-one editing of a linear associative memory (ROME, Meng et al. 2022; MEMIT, Meng et al. 2023), on an FFN's or
attention's last matrix by the same algebra.

A row k times the matrix W is what it writes: y = k W. To make a key k* write v* and other keys write nearly what they did, with
C = E[kᵀ k] over text:   W' = W + (C⁻¹ k*)ᵀ Λ,   Λ = (v* − k* W) / (k* C⁻¹ k*ᵀ),   so k* W' = v* exactly.
That an edit works shows control, not where a fact is stored: success and localisation are nearly unrelated (Hase et al. 2023)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, overload

import torch
from torch import Tensor

from interp.at import positions
from interp.interventions import Add
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer, require_transformer
from interp.run import prepare, run
from interp.sites import Site

Module = Literal["ffn", "attention"]
Key = Literal["mean", "first", "rome"]


class EditError(ValueError):
    """A layer, module, prompt or choice that cannot be edited with; the message says what is allowed."""


@dataclass(frozen=True, eq=False)
class Rewrite:
    """One fact to change: `inputs` are prompts that ask for it (templates, or one prompt behind several prefixes), `target`
    the token id that they are to predict at their final position, `true` the one that they predict now. essence: prompts
    about the subject whose prediction is to stay (the paper's "{subject} is a"), with the same role for the edited position.
    name: for tables."""

    inputs: Inputs
    target: int
    true: int
    essence: Inputs | None = None
    name: str = ""


@dataclass(frozen=True, eq=False)
class Edit:
    """A change of one matrix: `update` [n d_model], to be added to W_out [d_ff d_model] of a layer's FFN or W_O [head·d_head
    d_model] of its attention. key [n], value [d_model] (v* − k* W) for a rank-one edit; losses: of the search for v*."""

    layer: int
    module: Module
    update: Tensor
    method: str
    key: Tensor | None = None
    value: Tensor | None = None
    losses: tuple[float, ...] = field(default=())

    def __repr__(self) -> str:
        return f"Edit({self.method}: {self.module} of layer {self.layer}, size {float(self.update.norm()):.3g})"

    @property
    def parameter(self) -> str:
        """The name of the parameter that it changes, which is stored [d_model n]."""
        return f"blocks.{self.layer}." + ("ffn.down.weight" if self.module == "ffn" else "attention.out.weight")

    def weights(self, model: Transformer) -> dict[str, Tensor]:
        """The changed parameter by name, for `torch.func.functional_call`: nothing else is copied and the model is not
        touched."""
        old = model.get_parameter(self.parameter).detach()
        return {self.parameter: old + self.update.T.to(old)}

    @torch.no_grad()
    def applied(self, model: Transformer) -> Transformer:
        """A new model with this change. The given one stays as it is."""
        new = copy.deepcopy(model)
        for name, value in self.weights(model).items():
            new.get_parameter(name).copy_(value)
        return new


@torch.no_grad()
def key_covariance(
    model: Transformer, inputs: Any, layer: int, module: Module = "ffn", batch_size: int = 64
) -> tuple[Tensor, int]:
    """C = E[kᵀ k], uncentred, of what the matrix reads (`ffn_act`, or `z` of all heads), over all real tokens: ([n n] float64,
    number of tokens). inputs: tokens or Inputs, or an iterable of them, which is read once. Raises EditError."""
    _check(model, layer, module)
    many = inputs if isinstance(inputs, Iterable) and not isinstance(inputs, Tensor) else [inputs]
    total, n = torch.zeros(()), 0
    for one in many:
        given = prepare(model, one)
        for begin in range(0, given.batch, batch_size):
            part = given.select(slice(begin, begin + batch_size))
            keys = _keys(run(model, part, record=_key_site(layer, module)).cache[_key_site(layer, module)])
            real = keys.reshape(-1, keys.shape[-1]) if part.mask is None else keys[part.mask]
            total, n = total + (real.double().T @ real.double()), n + len(real)
    if n == 0:
        raise EditError("no tokens to take the covariance of keys from; allowed: one batch or more")
    return total / n, n


@overload
def rank_one_edit(model: Transformer, rewrite: Rewrite, layer: int, *rest: Any, **more: Any) -> Edit: ...
@overload
def rank_one_edit(
    model: Transformer, rewrite: Sequence[Rewrite], layer: int, *rest: Any, **more: Any
) -> list[Edit]: ...
def rank_one_edit(
    model: Transformer,
    rewrite: Rewrite | Sequence[Rewrite],
    layer: int,
    module: Module = "ffn",
    position: Any = "subject_last",
    covariance: Tensor | None = None,
    key: Key = "mean",
    **search: Any,
) -> Any:
    """The edit that makes one fact's key write the value that predicts its target; of several rewrites a list, each alone (their
    searches run as one batch).

    position: where the key is read and the value written, of `rewrite.inputs` and `.essence` (the paper: the subject's last
    token). covariance: of `key_covariance` (None: the identity, the smallest update). key: "mean" of the prompts' keys, whose
    constraint k* W' = v* then holds exactly for that mean; the "first" prompt's; "rome": the published program's mixture, update
    along C⁻¹·mean with the constraint at the first prompt's key only (Gupta et al. 2024 trace collapses of sequential edits to
    it). search: `find_values`' steps, learning_rate, decay, kl_weight, clamp, stop_at. Raises EditError.
    """
    if key not in get_args(Key):
        raise EditError(f"key={key!r} is not allowed; allowed: {', '.join(map(repr, get_args(Key)))}")
    rewrites = [rewrite] if isinstance(rewrite, Rewrite) else list(rewrite)
    found = find_values(model, rewrites, layer, module, position, **search)
    edits = []
    for mean, first, delta, losses in zip(found.keys, found.first, found.deltas, found.losses, strict=True):
        along = mean if key != "first" else first
        constrained = mean if key == "mean" else first
        direction = whitened(along, covariance)
        update = torch.outer(direction, delta.double()) / (constrained.double() @ direction)
        edits.append(Edit(layer, module, update.to(delta), f"rank-one {module}", constrained, delta, tuple(losses)))
    return edits[0] if isinstance(rewrite, Rewrite) else edits


def whitened(key: Tensor, covariance: Tensor | None, ridge: float = 1e-6) -> Tensor:
    """C⁻¹ k in float64, with `ridge` times C's mean diagonal on its diagonal: neurons that text never sets off have no
    inverse."""
    k = key.double()
    if covariance is None:
        return k
    if tuple(covariance.shape) != (len(k), len(k)):
        raise EditError(f"covariance of shape {tuple(covariance.shape)} is not allowed; allowed: {(len(k), len(k))}")
    c = covariance.double().to(k.device)
    return torch.linalg.solve(c + ridge * c.diagonal().mean() * torch.eye(len(k), dtype=c.dtype, device=c.device), k)


@dataclass(frozen=True, eq=False)
class Values:
    """Per rewrite: the mean and the first prompt's key [rewrite n], the mean output there [rewrite d_model] (mean key · W,
    and the bias), what is to be added to it [rewrite d_model], and the search's losses (nats)."""

    keys: Tensor
    first: Tensor
    before: Tensor
    deltas: Tensor
    losses: list[list[float]]


def find_values(
    model: Transformer,
    rewrites: Sequence[Rewrite],
    layer: int,
    module: Module = "ffn",
    position: Any = "subject_last",
    steps: int = 20,
    learning_rate: float = 0.5,
    decay: float = 0.5,
    kl_weight: float = 0.0625,
    clamp: float | None = 4.0,
    stop_at: float = 0.05,
    site: Site | None = None,
) -> Values:
    """What to add to a module's output at `position` so that each rewrite's prompts predict its target, by Adam (ROME).

    loss = mean −log P(target) + kl_weight · KL(new ‖ old at the position of `essence`) + decay · ‖δ‖²/‖v₀‖², with ‖δ‖ ≤ clamp
    · ‖v₀‖ and v₀ the mean output there. A rewrite below `stop_at` stays. The published program divides ‖δ‖, unsquared, by
    ‖v₀‖². site: add elsewhere than the module's output (MEMIT: the stream). Raises EditError, SelectionError."""
    _check(model, layer, module)
    if not rewrites:
        raise EditError("no rewrites; allowed: one or more")
    out = site or Site("ffn_out" if module == "ffn" else "attn_out", layer)
    prompts, owner, at = _joined([one.inputs for one in rewrites], position)
    finals = prompts.last()
    wanted = torch.tensor([one.target for one in rewrites], device=model.device)[owner]
    kept = [one.essence for one in rewrites]
    stays = None if any(one is None for one in kept) else _joined(kept, position)  # type: ignore[arg-type]
    with torch.no_grad():
        base = run(model, prompts, record=[_key_site(layer, module), out])
        rows = torch.arange(prompts.batch, device=model.device)
        keys, outputs = _keys(base.cache[_key_site(layer, module)])[rows, at], base.cache[out][rows, at]
        old = None if stays is None else _log_probabilities(model, stays[0], stays[2])
    mean = lambda x: torch.stack([x[owner == i].mean(0) for i in range(len(rewrites))])  # noqa: E731
    before = mean(outputs)
    delta = torch.zeros_like(before, requires_grad=True)
    optimizer, losses = torch.optim.Adam([delta], lr=learning_rate), [[] for _ in rewrites]
    size = before.norm(dim=-1)
    for step in range(steps + 1):
        with torch.enable_grad():
            logits = _changed(model, prompts, Add(out, delta[owner], at=(at,)), finals)
            each = -logits.log_softmax(-1).gather(-1, wanted[:, None])[:, 0]
            loss = mean(each) + decay * delta.square().sum(-1) / size.square()
            if stays is not None and old is not None and kl_weight:
                new = _changed(model, stays[0], Add(out, delta[stays[1]], at=(stays[2],)), stays[2]).log_softmax(-1)
                kl = (new.exp() * (new - old)).sum(-1)
                loss = loss + kl_weight * torch.stack([kl[stays[1] == i].mean() for i in range(len(rewrites))])
        for row, value in zip(losses, loss.tolist(), strict=True):
            row.append(value)
        going = (loss.detach() >= stop_at)[:, None]
        if step == steps or not bool(going.any()):
            break
        held = delta.detach().clone()
        (delta.grad,) = torch.autograd.grad(loss.sum(), delta)
        optimizer.step()
        with torch.no_grad():
            delta.copy_(torch.where(going, delta, held))  # one that is done stays, whatever Adam's momentum says
            if clamp is not None:
                delta.mul_((clamp * size / delta.norm(dim=-1).clamp(min=1e-12)).clamp(max=1.0)[:, None])
    first = torch.stack([keys[int((owner == i).nonzero()[0])] for i in range(len(rewrites))])
    return Values(mean(keys), first, before, delta.detach(), losses)


def _changed(model: Transformer, inputs: Inputs, change: Add, where: Tensor) -> Tensor:
    """Logits [batch vocab] of a changed run at one position per example."""
    found = run(model, inputs, change=change, grad=True).logits
    return found[torch.arange(inputs.batch, device=found.device), where]


def _log_probabilities(model: Transformer, inputs: Inputs, where: Tensor) -> Tensor:
    logits = run(model, inputs).logits
    return logits[torch.arange(inputs.batch, device=logits.device), where].log_softmax(-1)


def _joined(parts: Sequence[Inputs], position: Any) -> tuple[Inputs, Tensor, Tensor]:
    """All prompts as one batch, which rewrite each belongs to, and the edited position of each."""
    width = max(one.length for one in parts)
    tokens, masks, owner, at = [], [], [], []
    for i, one in enumerate(parts):
        mask = torch.ones_like(one.tokens, dtype=torch.bool) if one.mask is None else one.mask
        if not bool(mask[:, 0].all()):
            raise EditError("prompts padded on the left are not allowed; allowed: padding on the right, or none")
        space = (0, width - one.length)
        tokens.append(torch.nn.functional.pad(one.tokens, space))
        masks.append(torch.nn.functional.pad(mask, space))
        owner += [i] * one.batch
        at.append(positions(one, position, "position of the edit"))
    return Inputs(torch.cat(tokens), mask=torch.cat(masks)), torch.tensor(owner, device=tokens[0].device), torch.cat(at)


def _key_site(layer: int, module: Module) -> Site:
    return Site("ffn_act" if module == "ffn" else "z", layer)


def _keys(value: Tensor) -> Tensor:
    """[batch pos n]: heads side by side."""
    return value.flatten(2)


def _check(model: Any, layer: int, module: str) -> None:
    require_transformer(model, "an edit of weights")
    if module not in get_args(Module):
        raise EditError(f"module={module!r} is not allowed; allowed: 'ffn', 'attention'")
    if model.config.kind == "encoder-decoder":
        raise EditError("kind='encoder-decoder' is not allowed; allowed: models of one stack")
    if module == "ffn" and model.config.ffn == "none":
        raise EditError("module='ffn' is not allowed: this model has no FFN; allowed: 'attention'")
    if not 0 <= layer < model.config.n_layers:
        raise EditError(f"layer={layer!r} is not allowed; allowed: 0 … {model.config.n_layers - 1}")
