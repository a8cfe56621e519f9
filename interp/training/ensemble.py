"""K models of one config as one batched model: every weight has a leading axis [member …], every step is one program.

Small models leave a processor waiting for instructions; K of them in one batched matrix product do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, vmap

from interp.model.attention import Attention, softmax_or_zero
from interp.model.inputs import Edges, Inputs
from interp.model.transformer import Transformer
from interp.tasks.task import NOT_ASKED, Batch
from interp.tasks.train_config import TrainConfig
from interp.training.optimizer import decayed
from interp.training.train import Loss


class EnsembleError(ValueError):
    """Models or training configs that cannot be trained as one batched model."""


_SHARED = (
    "batch_size",
    "steps",
    "betas",
    "decay",
    "evaluate_every",
    "checkpoint_every",
    "precision",
    "compile",
    "keep",
)


class Ensemble:
    """Models of one config with AdamW each, stepped together. configs: one per member; they may differ in seed, data order,
    learning rate, schedule, warm-up, weight decay, clipping and when they stop. Raises EnsembleError.

    parameters: name -> [member …]. A member's part of each is a view, so `member(k)` changes with the ensemble.
    """

    def __init__(self, models: Sequence[Transformer], configs: Sequence[TrainConfig]) -> None:
        _check(models, configs)
        self.configs, first = list(configs), models[0]
        linear = {f"{name}.weight" for name, module in first.named_modules() if isinstance(module, nn.Linear)}
        # Linear maps lie transposed, [member in out]: so their gradients come out of the matrix product.
        self._turns = {name: _transposed if name in linear else _as_it_is for name in _named(first)}
        named = [_named(model) for model in models]
        self.parameters = {name: torch.stack([turn(one[name].detach()) for one in named]).requires_grad_()
                           for name, turn in self._turns.items()}  # fmt: skip
        self.shrinks = [self.parameters[name] for name in sorted(decayed(first, configs[0]))]
        with torch.device("meta"):
            self.loss = Loss(_for_mapping(Transformer(first.config, seed=None)))
        # Adam is element by element, so one step serves all members; their own rates and decays are in `step`.
        self.optimizer = torch.optim.AdamW(
            self.parameters.values(), betas=configs[0].betas, weight_decay=0.0, fused=True
        )
        self._losses = torch.compile(self._mapped) if configs[0].compile else self._mapped

    def __len__(self) -> int:
        return len(self.configs)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return next(iter(self.parameters.values())).device

    def step(self, batches: Sequence[Batch], step: int) -> tuple[Tensor, Tensor]:
        """One update of every member on its own batch; losses in nats per asked token and gradient norms, both [member]."""
        if len(batches) != len(self):
            raise EnsembleError(f"{len(batches)} batches are not allowed; allowed: one for each of {len(self)} members")
        data, leaves = stacked(batches), list(self.parameters.values())
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.configs[0].precision == "bfloat16"):
            losses = self._losses(self.parameters, data)
        # No member's loss knows another's weights.
        gradients = [gradient.contiguous() for gradient in torch.autograd.grad(losses.sum(), leaves)]
        norms = torch.stack([gradient.view(len(self), -1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        self._clip(gradients, norms)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient  # laid out as the weights are, which the fused AdamW takes for granted
        self._update(leaves, [config.rate(step) for config in self.configs])
        return losses.detach(), norms

    def _clip(self, gradients: Sequence[Tensor], norms: Tensor) -> None:
        """Scale each member's gradients to its largest norm (as `clip_grad_norm_`)."""
        scale = (self._each([config.clip for config in self.configs], norms) / (norms + 1e-6)).clamp(max=1.0)
        if norms.device.type == "cpu" and bool((scale == 1.0).all()):
            return  # a factor of one
        for gradient in gradients:
            gradient.mul_(_beside(scale, gradient))

    @torch.no_grad()
    def _update(self, leaves: Sequence[Tensor], rates: Sequence[float]) -> None:
        """AdamW with each member's rate η and decay λ: p ← p − ηλp, then p ← p − η·(Adam's step)."""
        decay = self._each(
            [1 - rate * config.weight_decay for rate, config in zip(rates, self.configs, strict=True)], leaves[0]
        )
        for leaf in self.shrinks:
            leaf.mul_(_beside(decay, leaf))
        most = max(rates)
        self.optimizer.param_groups[0]["lr"] = most
        if all(rate == most for rate in rates):
            self.optimizer.step()
            return
        before = [leaf.clone() for leaf in leaves]
        self.optimizer.step()
        share = self._each([rate / most if most else 0.0 for rate in rates], leaves[0])
        for leaf, old in zip(leaves, before, strict=True):  # a step of a smaller rate is a share of the way
            leaf.copy_(torch.lerp(old, leaf, _beside(share, leaf)))

    @staticmethod
    def _each(values: Sequence[float], like: Tensor) -> Tensor:
        return torch.tensor(values, dtype=like.dtype, device=like.device)

    def _mapped(self, parameters: dict[str, Tensor], data: dict[str, Tensor]) -> Tensor:
        return vmap(self._one)(parameters, data)

    def _one(self, parameters: dict[str, Tensor], data: dict[str, Tensor]) -> Tensor:
        """One member's loss."""
        given = {name: value for name, value in data.items() if name not in ("positions", "targets")}
        asked = (data["targets"] != NOT_ASKED).sum()
        inputs = Inputs(**given)  # type: ignore[arg-type]  # roles are left out
        named = {f"model.{name}": turn(parameters[name]) for name, turn in self._turns.items()}
        return functional_call(self.loss, named, (inputs, data["positions"], data["targets"], asked))

    def member(self, k: int) -> Transformer:
        """An ordinary model whose weights are this member's part of the ensemble's: it changes with them."""
        with torch.device("meta"):
            model = Transformer(self.loss.model.config, seed=None)
        weights = {name: turn(self.parameters[name][k].detach()) for name, turn in self._turns.items()}
        model.load_state_dict(weights, assign=True)
        return model.eval()

    def gradients(self, k: int) -> dict[str, Tensor]:
        """This member's gradients of the last step by name (clipped); empty before the first."""
        grads = {name: value.grad for name, value in self.parameters.items()}
        return {name: self._turns[name](grad[k]) for name, grad in grads.items() if grad is not None}

    def alone(self, k: int) -> Transformer:
        """An ordinary model with weights of its own."""
        model = self.member(k)
        for parameter in model.parameters():
            parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
        return model

    def unstack(self) -> list[Transformer]:
        """Every member, alone."""
        return [self.alone(k) for k in range(len(self))]

    def pick(self, rows: Sequence[int]) -> Ensemble:
        """An ensemble of some members, the optimiser's moments with them."""
        part = Ensemble([self.member(k) for k in rows], [self.configs[k] for k in rows])
        rows = list(rows)
        part.load_state(
            {name: value if name.endswith(".step") else value[rows] for name, value in self.state().items()}
        )
        return part

    def state(self) -> dict[str, Tensor]:
        """Weights and the optimiser's moments [member …] by name, and the count of its steps."""
        state = {f"model.{name}": value.detach() for name, value in self.parameters.items()}
        for name, value in self.parameters.items():
            state |= {f"optimizer.{name}.{moment}": kept for moment, kept in self.optimizer.state[value].items()}
        return state

    @torch.no_grad()
    def load_state(self, state: dict[str, Tensor]) -> None:
        """Put back what `state` gave."""
        for name, value in self.parameters.items():
            value.copy_(state[f"model.{name}"])
            prefix = f"optimizer.{name}."
            kept = {key.removeprefix(prefix): moment for key, moment in state.items() if key.startswith(prefix)}
            if kept:
                self.optimizer.state[value] = {key: moment.to(value.device, copy=True) for key, moment in kept.items()}


def _named(model: Transformer) -> dict[str, Tensor]:
    """A model's parameters by name; what is shared, once."""
    return dict(model.named_parameters())


def _transposed(value: Tensor) -> Tensor:
    return value.mT


def _as_it_is(value: Tensor) -> Tensor:
    return value


def _beside(each: Tensor, value: Tensor) -> Tensor:
    """One number per member [member] in a shape that multiplies [member …]."""
    return each.view(-1, *(1 for _ in value.shape[1:]))


def stacked(batches: Sequence[Batch]) -> dict[str, Tensor]:
    """The batches of all members as tensors [member batch …]. EnsembleError when their shapes differ."""
    parts: list[dict[str, Any]] = []
    for batch in batches:
        given = {field.name: getattr(batch.inputs, field.name) for field in fields(Inputs)}
        tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
        parts.append({**tensors, "positions": batch.positions, "targets": batch.targets})
    shapes = [{name: tuple(value.shape) for name, value in part.items()} for part in parts]
    other = next((shape for shape in shapes if shape != shapes[0]), None)
    if other is not None:
        raise EnsembleError(f"the members' batches have different shapes: {shapes[0]} and {other}; allowed: a task whose batches "
                            "have one shape, or how='sequence'")  # fmt: skip
    return {name: torch.stack([part[name] for part in parts]) for name in parts[0]}


class _Linear(nn.Linear):
    """One matrix product of all tokens: mapped over members it stays one per member, where it would be one per sequence."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.flatten(0, -2), self.weight, self.bias).unflatten(0, x.shape[:-1])


def _attend(attention: Attention, q: Tensor, k: Tensor, v: Tensor, edges: Edges) -> Tensor:
    """softmax(q kᵀ · scale) v under the mask. A CPU's fused kernel, which no map can batch, is given all members as one batch."""
    scale = attention.config.attention_scale
    assert scale is not None  # the config resolves it
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    if q.device.type == "cpu" and not edges.empty_rows and not torch.compiler.is_compiling():
        return _Fused.apply(q, k, v, edges.mask, edges.causal, scale).transpose(1, 2)  # type: ignore[union-attr]
    scores, mask = (q * scale) @ k.transpose(-1, -2), edges.mask
    if edges.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    pattern = softmax_or_zero(scores) if edges.empty_rows else scores.softmax(-1)
    return (pattern @ v).transpose(1, 2)


class _Fused(torch.autograd.Function):
    """`scaled_dot_product_attention` with a rule for `vmap`: members join the batch. Only ever called inside a map."""

    @staticmethod
    def forward(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        pass

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float
    ) -> Any:
        q, k, v = (x.movedim(dim, 0).flatten(0, 1) for x, dim in zip((q, k, v), in_dims, strict=False))
        if mask is not None and in_dims[3] is not None:
            mask = mask.movedim(in_dims[3], 0)
            if mask.shape[1] == 1 and len(q) != len(mask):  # one mask for a member's whole batch
                mask = mask.expand(-1, len(q) // len(mask), *mask.shape[2:])
            mask = mask.flatten(0, 1)
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, scale=scale)
        return z.unflatten(0, (info.batch_size, -1)), 0


def _for_mapping(model: Transformer) -> Transformer:
    """The same function, written with calls that map well over members."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.__class__ = _Linear
        elif isinstance(module, Attention):
            module._fused = partial(_attend, module)  # type: ignore[method-assign]
            module._project = partial(_project, module)  # type: ignore[method-assign]
    return model


def _project(attention: Attention, x: Tensor, first: int, last: int) -> Tensor:
    """`Attention._project` as one matrix product."""
    return Attention._project(attention, x.flatten(0, -2), first, last).unflatten(0, x.shape[:-1])


def _check(models: Sequence[Transformer], configs: Sequence[TrainConfig]) -> None:
    if not models or len(models) != len(configs):
        raise EnsembleError(
            f"{len(models)} models and {len(configs)} configs are not allowed; allowed: as many of both, 1 or more"
        )
    for model in models[1:]:
        if model.config != models[0].config or (model.dtype, model.device) != (models[0].dtype, models[0].device):
            raise EnsembleError(
                "the models' configs, dtypes or devices differ; allowed: models of one config, on one device"
            )
    check_configs(configs)


def check_configs(configs: Sequence[TrainConfig]) -> None:
    """EnsembleError unless the configs can be those of one ensemble."""
    for name in _SHARED:
        values = {getattr(config, name) for config in configs}
        if len(values) > 1:
            raise EnsembleError(
                f"the configs differ in {name}: {sorted(values, key=str)}; allowed: one value for all members"
            )
