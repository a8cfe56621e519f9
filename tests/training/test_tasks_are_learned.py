"""Every task's default model meets its goals with its default training (slow: minutes each)."""

from __future__ import annotations

import math

import pytest
import torch

from interp import generate, load
from interp.analyses import attention_mass
from interp.model import Inputs
from interp.tasks import TASKS, Dyck, Induction, ModularAddition, Rewriting
from interp.tasks.rewriting import EOS
from interp.training import train

SEED = 1000  # seeds 0-9 are kept for the registered claims


def learned(name, stop="goals", **changes):
    task = TASKS[name]()
    result = train(task.model_config(**changes), task, task.train_config(seed=SEED, stop=stop), progress=False)
    return task, result


@pytest.mark.slow
def test_induction_takes_two_layers():
    task, result = learned("induction", stop="steps")
    assert result.success
    batch = task.evaluation["second_copy"]
    heads = attention_mass(result.model, batch.inputs, task.induction_target(batch))
    assert heads["mass"].max() > 0.7 and heads.loc[heads["mass"].idxmax(), "layer"] == 1
    assert isinstance(task, Induction)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["copy", "reverse", "sort"])
def test_rewriting_is_learned_generated_and_aligned(name, tmp_path):
    task = TASKS[name]()
    assert isinstance(task, Rewriting)
    result = train(None, task, task.train_config(seed=SEED), tmp_path / "run", progress=False)
    assert result.success
    model, batch = load(tmp_path / "run" / "model"), task.evaluation["held_out"]
    inputs = batch.inputs
    layers = attention_mass(model, inputs, task.alignment(inputs), "cross_pattern").groupby("layer")["mass"].mean()
    assert layers.max() > 0.8, layers
    start = Inputs(inputs.tokens[:, :1], source=inputs.source, source_mask=inputs.source_mask)
    made = [generate(model, start, 13, stop=EOS, use_cache=use).tokens for use in (True, False)]
    assert torch.equal(*made)
    wanted = torch.where(batch.targets < 0, EOS, batch.targets)[:, : made[0].shape[1]]
    assert float((made[0] == wanted).all(1).float().mean()) == pytest.approx(result.curves["exact"].iloc[-1], abs=1e-6)


@pytest.mark.slow
def test_dyck_reaches_what_can_be_known():
    task, result = learned("dyck")
    assert result.success and isinstance(task, Dyck)
    last = result.curves.groupby("split").last()["accuracy"]
    assert last["masked"] < task.best_accuracy + 0.02  # no model can know more than the exact posterior


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lookahead", "lookahead-causal"])
def test_lookahead_is_learned_with_and_without_looking_ahead(name):
    _, result = learned(name)
    assert result.success, result.curves.tail(2)


@pytest.mark.slow
def test_modular_addition_groks():
    task = ModularAddition()
    result = train(None, task, task.train_config(seed=SEED, stop="goals"), progress=False)
    assert result.success
    curves = result.curves.pivot_table(index="step", columns="split", values="accuracy")
    by_heart, understood = (int((curves[split] >= 0.99).idxmax()) for split in ("train", "held_out"))
    assert understood >= 3 * by_heart, curves  # the training pairs are known long before the others


@pytest.mark.slow
def test_a_small_language_model_begins_to_learn():
    """Sixty steps of the 500 that meet its goal (docs/training.md)."""
    task = TASKS["language-small"]()
    config = task.train_config(steps=60, evaluate_every=60, seed=SEED)
    result = train(None, task, config, progress=False)
    assert result.last["nats"].iloc[0] < 0.9 * math.log(task.model_config().vocab) and not result.success
