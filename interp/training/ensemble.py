"""K models of one config as one batched model: every weight has a leading axis [member …], every step is one program.

Small models leave a processor waiting for instructions; K of them in one batched matrix product do not.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.tasks.task import NOT_ASKED, Batch
from interp.tasks.train_config import TrainConfig
from interp.training.mapped import for_mapping
from interp.training.optimizer import decayed, trained_rows
from interp.training.train import Loss


class EnsembleError(ValueError):
    """Models or training configs that cannot be trained as one batched model."""


_SHARED = (
    "batch_size",
    "steps",
    "betas",
    "optimizer",
    "decay",
    "evaluate_every",
    "checkpoint_every",
    "precision",
    "compile",
    "keep",
    "trainable",
)


class Ensemble:
    """Models of one config with an optimiser each, stepped together. configs: one per member; they may differ in seed, data
    order, learning rate, schedule, warm-up, weight decay, clipping and when they stop. Raises EnsembleError.

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
        with torch.device("meta"):
            self.loss = Loss(for_mapping(Transformer(first.config, seed=None)))
        self._losses = torch.compile(self._mapped) if configs[0].compile else self._mapped
        self._prepare(first)

    def _prepare(self, model: Transformer) -> None:
        """The optimiser of what the configs train. model: any member, for the names of its weights."""
        config, rows = self.configs[0], trained_rows(model, self.configs[0])
        self.trained = [name for name in self.parameters if name in rows]
        self.shrinks = [self.parameters[name] for name in sorted(decayed(model, config)) if name in rows]
        # Both optimisers go element by element, so one step serves all members; their own rates and decays are in `step`.
        leaves = [self.parameters[name] for name in self.trained]
        self.optimizer = (torch.optim.SGD(leaves, lr=config.learning_rate, momentum=config.betas[0], fused=True)
                          if config.optimizer == "sgd"
                          else torch.optim.AdamW(leaves, betas=config.betas, weight_decay=0.0, fused=True))  # fmt: skip
        named, self._held = _named(model), dict[str, tuple[Tensor, Tensor]]()
        for name in self.trained:
            if not bool(rows[name].all()):  # entries that stay, laid out as the leaf is
                stays = ~_beside(rows[name], named[name]).expand(named[name].shape)
                stays = self._turns[name](stays).expand(self.parameters[name].shape)
                self._held[name] = stays, self.parameters[name].detach()[stays].clone()

    def also(self, configs: Sequence[TrainConfig]) -> Ensemble:
        """The same weights, not copies, with other training configs and an optimiser of its own: so that two losses can train two
        groups of weights in turn."""
        if len(configs) != len(self):
            raise EnsembleError(f"{len(configs)} configs are not allowed; allowed: one for each of {len(self)} members")
        check_configs(configs)
        other = copy.copy(self)
        other.configs = list(configs)
        other._prepare(self.member(0))
        return other

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
        data, leaves = stacked(batches), [self.parameters[name] for name in self.trained]
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.configs[0].precision == "bfloat16"):
            losses = self._losses(self.parameters, data)
        # No member's loss knows another's weights.
        gradients = [gradient.contiguous() for gradient in torch.autograd.grad(losses.sum(), leaves)]
        for name, (stays, _) in self._held.items():
            gradients[self.trained.index(name)].masked_fill_(stays, 0.0)
        norms = torch.stack([gradient.view(len(self), -1).norm(dim=1) for gradient in gradients]).norm(dim=0)
        self._clip(gradients, norms)
        for leaf, gradient in zip(leaves, gradients, strict=True):
            leaf.grad = gradient  # laid out as the weights are, which the fused AdamW takes for granted
        self._update(leaves, [config.rate(step) for config in self.configs])
        for name, (stays, value) in self._held.items():
            self.parameters[name].data[stays] = value  # weight decay reaches them too
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
        """One update with each member's rate η and decay λ: p ← p − ηλp, then p ← p − η·(the optimiser's step)."""
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
        grads = {name: self.parameters[name].grad for name in self.trained}
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
        for name in self.trained:
            moments = self.optimizer.state[self.parameters[name]]
            state |= {f"optimizer.{name}.{moment}": kept for moment, kept in moments.items()}
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
