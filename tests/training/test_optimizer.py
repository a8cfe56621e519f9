"""SGD beside AdamW: the textbook's update by hand, alone and stacked, with held rows and decoupled decay."""

from dataclasses import replace

import pytest
import torch

from interp import ModelConfig, Transformer
from interp.tasks import ToyFacts
from interp.tasks.train_config import TrainConfig
from interp.training.ensemble import Ensemble
from interp.training.optimizer import make_optimizer
from interp.training.train import Loss, train_step

TASK = ToyFacts(8)
MODEL = ModelConfig(vocab=len(TASK.vocabulary), n_layers=1, n_heads=2, d_model=8, n_ctx=8, bias=False)
CONFIG = TrainConfig(
    steps=6, batch_size=16, learning_rate=0.1, weight_decay=0.2, optimizer="sgd", betas=(0.5, 0.9), clip=100.0
)


def alone(config, steps):
    model = Transformer(MODEL, seed=config.seed).double()
    optimizer, loss = make_optimizer(model, config), Loss(model)
    for step in range(steps):
        train_step(loss, optimizer, TASK.batch(step, config.batch_size, config.data), config, step)
    return model


def test_an_sgd_step_is_momentum_after_decoupled_decay():
    model = Transformer(MODEL, seed=0).double()
    optimizer = make_optimizer(model, CONFIG)
    name, weight = next(
        (n, p) for n, p in model.named_parameters() if p.ndim == 2 and "embedding" not in n and n != "W_pos"
    )
    gain = next(p for n, p in model.named_parameters() if p.ndim == 1)
    start, velocity, by_hand = weight.detach().clone(), torch.zeros_like(weight), weight.detach().clone()
    for k in (1.0, 2.0):
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, k)
        velocity = 0.5 * velocity + k
        by_hand = by_hand * (1 - 0.1 * 0.2) - 0.1 * velocity
        before = gain.detach().clone()
        optimizer.step()
        torch.testing.assert_close(gain.detach(), before - 0.1 * velocity.flatten()[0])  # a gain does not decay
    torch.testing.assert_close(weight.detach(), by_hand, rtol=1e-12, atol=1e-12)
    assert not torch.equal(start, weight), name


def test_members_of_a_stack_with_rates_of_their_own_equal_the_models_alone():
    configs = [CONFIG, replace(CONFIG, seed=1, learning_rate=0.03, weight_decay=0.0)]
    ensemble = Ensemble([Transformer(MODEL, seed=config.seed).double() for config in configs], configs)
    for step in range(6):
        ensemble.step([TASK.batch(step, config.batch_size, config.data) for config in configs], step)
    for k, config in enumerate(configs):
        for (name, mine), theirs in zip(
            alone(config, 6).named_parameters(), ensemble.member(k).parameters(), strict=True
        ):
            torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, msg=name)


def test_what_is_not_trained_stays_bit_for_bit():
    config = replace(CONFIG, trainable=("ov",), decay="all")
    before, after = Transformer(MODEL, seed=0).double(), alone(config, 4)
    moved = after.weights.select("ov")
    for (name, old), new in zip(before.named_parameters(), after.parameters(), strict=True):
        rows = moved.get(name, torch.zeros(len(old), dtype=torch.bool))
        assert torch.equal(old[~rows], new[~rows]), name
        assert not rows.any() or not torch.equal(old[rows], new[rows]), name


def test_an_unknown_optimizer_is_named():
    with pytest.raises(ValueError, match="optimizer='adam' is not allowed; allowed: 'adamw', 'sgd'"):
        TrainConfig(optimizer="adam")  # type: ignore[arg-type]
