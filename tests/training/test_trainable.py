"""Training some groups of weights: the others stay bit for bit, the step is AdamW on what is trained, both ways agree."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interp import Transformer, train
from interp.tasks import ToyFacts
from interp.tasks.train_config import TrainConfig
from interp.training.ensemble import Ensemble, EnsembleError
from interp.training.many import train_many
from interp.training.optimizer import make_optimizer
from interp.training.train import Loss, train_step

TASK = ToyFacts(n_subjects=8)
MODEL = TASK.model_config(n_layers=2, d_model=16, n_heads=4, n_kv_heads=2, bias=True)
CONFIG = TrainConfig(steps=6, batch_size=8, learning_rate=1e-2, weight_decay=0.5, clip=0.2, evaluate_every=6)
CHOICES = [("ffn",), ("ov",), ("qk", "norms"), ("embeddings", "ffn_out")]


def changed(model, start):
    """Group -> whether any and whether all of its rows moved."""
    return {group: any(not torch.equal(a, b) for a, b in zip(model.weights.read(group).values(),
                                                             start.weights.read(group).values(), strict=True))
            for group in ("embeddings", "unembedding", "qk", "ov", "ffn_in", "ffn_out", "norms")}  # fmt: skip


def values(model):
    weight = model.weight("W_out", 1)
    assert weight is not None
    return weight


@pytest.mark.parametrize("groups", CHOICES)
def test_only_the_named_groups_move_alone_and_in_an_ensemble(groups):
    config = replace(CONFIG, trainable=groups, decay="all")
    parts = {part for group in groups for part in (("ffn_in", "ffn_out") if group == "ffn" else (group,))}
    start = [Transformer(MODEL, seed=seed).double() for seed in (0, 1)]
    ensemble = Ensemble(start, [config] * 2)
    alone = [Transformer(MODEL, seed=seed).double() for seed in (0, 1)]
    optimizers = [make_optimizer(model, config) for model in alone]
    for step in range(6):
        batch = TASK.batch(step, 8, 3)
        losses, norms = ensemble.step([batch] * 2, step)
        for k, (model, optimizer) in enumerate(zip(alone, optimizers, strict=True)):
            loss, norm = train_step(Loss(model), optimizer, batch, config, step)
            assert torch.allclose(loss, losses[k], atol=1e-9) and torch.allclose(norm, norms[k], atol=1e-9)
    for k, model in enumerate(alone):
        assert {group for group, moved in changed(model, start[k]).items() if moved} == parts
        assert {group for group, moved in changed(ensemble.alone(k), start[k]).items() if moved} == parts
        assert max(float((a - b).detach().abs().max()) for a, b in
                   zip(model.parameters(), ensemble.member(k).parameters(), strict=True)) < 1e-9  # fmt: skip


def test_the_norm_that_is_clipped_is_that_of_what_is_trained():
    model, config = Transformer(MODEL, seed=0).double(), replace(CONFIG, trainable=("ov",))
    batch = TASK.batch(0, 8, 3)
    wanted = torch.autograd.grad(Loss(model)(batch.inputs, batch.positions, batch.targets, 8), list(model.parameters()))
    rows, named = model.weights.select("ov"), [name for name, _ in model.named_parameters()]
    squares = [wanted[named.index(name)][chosen].square().sum() for name, chosen in rows.items()]
    _, norm = train_step(Loss(model), make_optimizer(model, config), batch, config, 0)
    assert torch.allclose(norm, torch.stack(squares).sum().sqrt(), atol=1e-12)


def test_two_losses_in_turn_train_two_groups_of_the_same_weights():
    first = replace(CONFIG, trainable=("ffn",))
    start = Transformer(MODEL, seed=0).double()
    ensemble = Ensemble([start], [first])
    other = ensemble.also([replace(CONFIG, trainable=("ov",))])
    ensemble.step([TASK.batch(0, 8, 0)], 0)
    before = {name: value.detach().clone() for name, value in ensemble.parameters.items()}
    other.step([TASK.batch(1, 8, 0)], 0)
    moved = {name for name, value in ensemble.parameters.items() if not torch.equal(value, before[name])}
    assert moved == {name for name, _ in start.named_parameters() if ".attention." in name}
    assert {group for group, yes in changed(other.alone(0), start).items() if yes} == {"ffn_in", "ffn_out", "ov"}
    with pytest.raises(EnsembleError, match="one for each of 1 members"):
        ensemble.also([first, first])


def test_a_run_with_frozen_weights_from_given_ones_resumes_and_stays_itself(tmp_path):
    config = replace(CONFIG, trainable=("ffn_out",), evaluate_every=3, checkpoint_every=3)
    start = Transformer(MODEL, seed=5)
    alone = train(Transformer(MODEL, seed=5), TASK, config, tmp_path / "alone", progress=False)
    assert changed(alone.model, start) == {**dict.fromkeys(("embeddings", "unembedding", "qk", "ov", "ffn_in", "norms"), False),
                                           "ffn_out": True}  # fmt: skip
    configs = {"a": config, "b": replace(config, seed=1)}
    models = {"a": start, "b": Transformer(MODEL, seed=6)}
    for how in ("stacked", "sequence"):
        many = train_many(models, TASK, configs, tmp_path / how, how, progress=False)  # type: ignore[arg-type]
        assert torch.allclose(values(many["a"].model), values(alone.model), atol=1e-5)
        assert torch.equal(many["b"].model.W_E, models["b"].W_E) and torch.equal(
            start.W_E, Transformer(MODEL, seed=5).W_E
        )
        again = train_many(models, TASK, configs, tmp_path / how, how, resume=True, progress=False)  # type: ignore[arg-type]
        assert torch.equal(values(again["b"].model), values(many["b"].model))
    with pytest.raises(RuntimeError, match=r"holds another run: .*start\.weights"):
        train_many(
            {**models, "a": models["b"]}, TASK, configs, tmp_path / "stacked", "stacked", resume=True, progress=False
        )


def test_what_is_refused():
    with pytest.raises(ValueError, match=r"trainable=\('mlp',\) is not allowed; allowed: None or some of embeddings"):
        TrainConfig(trainable=("mlp",))
    assert TrainConfig(trainable="ffn").trainable == ("ffn",)  # type: ignore[arg-type]
    model = Transformer(MODEL, seed=0)
    with pytest.raises(EnsembleError, match="the configs differ in trainable"):
        Ensemble([model, model], [CONFIG, replace(CONFIG, trainable=("ffn",))])
    with pytest.raises(EnsembleError, match=r"models named \['a'\] are not allowed; .*for \['a', 'b'\]"):
        train_many({"a": model}, TASK, {"a": CONFIG, "b": CONFIG}, progress=False)
    with pytest.raises(EnsembleError, match="given weights are not allowed with how='local'"):
        train_many(model, TASK, [CONFIG], how="local", progress=False)
