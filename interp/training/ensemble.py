"""K models of one config as one batched model: every weight has a leading axis [member …], every step is one program.

Small models leave a processor waiting for instructions; K of them in one batched matrix product do not. All weights lie in
one tensor [member, number], those that decay first, so that a member is a row: its gradient norm, its AdamW step and its
ordinary `Transformer` are views of it.
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
    """

    def __init__(self, models: Sequence[Transformer], configs: Sequence[TrainConfig]) -> None:
        _check(models, configs)
        self.configs, first = list(configs), models[0]
        shrinks = decayed(first, configs[0])
        named = dict(first.named_parameters())
        self.names = sorted(named, key=lambda name: name not in shrinks)  # stable: decayed first
        self.shapes = [named[name].shape for name in self.names]
        sizes = [named[name].numel() for name in self.names]
        self.ends = torch.tensor(sizes).cumsum(0).tolist()
        self.border = sum(size for name, size in zip(self.names, sizes, strict=True) if name in shrinks)
        with torch.device("meta"):
            self.loss = Loss(_for_mapping(Transformer(first.config, seed=None)))
        rows = [
            torch.cat([dict(model.named_parameters())[name].detach().flatten() for name in self.names])
            for model in models
        ]
        self.weights = torch.stack(rows)
        self.gradients = torch.zeros_like(self.weights)
        self.parameters = {f"model.{name}": self._leaf(i) for i, name in enumerate(self.names)}
        self.optimizer = self._optimizer()
        self._losses = torch.compile(self._mapped) if configs[0].compile else self._mapped

    def __len__(self) -> int:
        return len(self.weights)

    def _view(self, tensor: Tensor, i: int) -> Tensor:
        """One parameter of every member, [member …], in a tensor laid out as the weights are."""
        return tensor[:, self.ends[i] - self.shapes[i].numel() : self.ends[i]].unflatten(1, self.shapes[i] or (1,))

    def _leaf(self, i: int) -> Tensor:
        return self._view(self.weights, i).detach().requires_grad_()

    def _optimizer(self) -> torch.optim.AdamW:
        """One AdamW, two groups per member: the part of its row that decays and the part that does not."""
        groups = []
        for row, gradient, config in zip(self.weights, self.gradients, self.configs, strict=True):
            for part, decay in ((slice(0, self.border), config.weight_decay), (slice(self.border, None), 0.0)):
                parameter = row[part].detach().requires_grad_()
                parameter.grad = gradient[part]
                groups.append({"params": [parameter], "weight_decay": decay})
        return torch.optim.AdamW(groups, lr=0.0, betas=self.configs[0].betas, fused=True)

    def step(self, batches: Sequence[Batch], step: int) -> tuple[Tensor, Tensor]:
        """One update of every member on its own batch; losses in nats per asked token and gradient norms, both [member]."""
        data = stacked(batches)
        config = self.configs[0]
        with torch.autocast(self.weights.device.type, torch.bfloat16, enabled=config.precision == "bfloat16"):
            losses = self._losses(self.parameters, data)
        # No member's loss knows another's weights.
        found = torch.autograd.grad(losses.sum(), list(self.parameters.values()))
        torch.cat([gradient.flatten(1) for gradient in found], 1, out=self.gradients)
        norms = self.gradients.norm(dim=1)
        most = torch.tensor([config.clip for config in self.configs]).to(norms)
        self.gradients.mul_((most / (norms + 1e-6)).clamp(max=1.0)[:, None])
        for i, group in enumerate(self.optimizer.param_groups):
            group["lr"] = self.configs[i // 2].rate(step)
        self.optimizer.step()
        return losses.detach(), norms

    def _mapped(self, parameters: dict[str, Tensor], data: dict[str, Tensor]) -> Tensor:
        return vmap(self._one)(parameters, data)

    def _one(self, parameters: dict[str, Tensor], data: dict[str, Tensor]) -> Tensor:
        """One member's loss."""
        given = {name: value for name, value in data.items() if name not in ("positions", "targets")}
        asked = (data["targets"] != NOT_ASKED).sum()
        inputs = Inputs(**given)  # type: ignore[arg-type]  # roles are left out
        return functional_call(self.loss, parameters, (inputs, data["positions"], data["targets"], asked))

    def member(self, k: int) -> Transformer:
        """An ordinary model whose weights are this member's row: it changes with the ensemble."""
        with torch.device("meta"):
            model = Transformer(self.loss.model.config, seed=None)
        views = {name: self._view(self.weights, i)[k].detach() for i, name in enumerate(self.names)}
        model.load_state_dict({name: view.view(shape) for (name, view), shape in zip(views.items(), self.shapes, strict=True)},
                              assign=True)  # fmt: skip
        return model.eval()

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
        part.load_moments({name: value[list(rows)] for name, value in self.moments().items()})
        return part

    def moments(self) -> dict[str, Tensor]:
        """The optimiser's state as tensors [member …]: step, exp_avg, exp_avg_sq; empty before the first step."""
        states = [self.optimizer.state[group["params"][0]] for group in self.optimizer.param_groups]
        if not states[0]:
            return {}
        both = list(zip(states[::2], states[1::2], strict=True))  # of each member what decays, and what does not
        averages = {
            name: torch.stack([torch.cat([a[name], b[name]]) for a, b in both]) for name in ("exp_avg", "exp_avg_sq")
        }
        return {"step": torch.stack([a["step"] for a, _ in both]), **averages}

    def load_moments(self, moments: dict[str, Tensor]) -> None:
        """Put back what `moments` gave."""
        if not moments:
            return
        for i, group in enumerate(self.optimizer.param_groups):
            k, part = i // 2, slice(self.border, None) if i % 2 else slice(0, self.border)
            average = {
                name: moments[name][k, part].to(self.weights.device).clone() for name in ("exp_avg", "exp_avg_sq")
            }
            self.optimizer.state[group["params"][0]] = {"step": moments["step"][k].clone(), **average}


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
    """softmax(q kᵀ · scale) v under the mask, in its own lines: a CPU's fused kernel has no batched form."""
    scale = attention.config.attention_scale
    assert scale is not None  # the config resolves it
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    if k.shape[1] != q.shape[1]:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores, mask = (q * scale) @ k.transpose(-1, -2), edges.mask
    if edges.causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    pattern = softmax_or_zero(scores) if edges.empty_rows else scores.softmax(-1)
    return (pattern @ v).transpose(1, 2)


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
