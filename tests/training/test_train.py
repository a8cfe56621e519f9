"""The loop learns, resumes bit for bit after a kill, and refuses what it must."""

from __future__ import annotations

import errno
import json
from dataclasses import replace

import pandas as pd
import pytest
import torch

from interp import ModelConfig, TrainConfig, Transformer, load
from interp.tasks import ToyFacts
from interp.tasks.task import Goal
from interp.training import DivergedError, TrainingFolderError, open_run, state, train
from interp.training.ensemble import Ensemble
from interp.training.folder import held
from interp.training.judge import read
from interp.training.many import train_many
from interp.training.optimizer import make_optimizer
from interp.training.train import Loss, train_step

TASK = ToyFacts(16)
MODEL = TASK.model_config(d_model=32, n_heads=2)
CONFIG = TrainConfig(steps=30, batch_size=32, evaluate_every=10, checkpoint_every=10, learning_rate=5e-3)


def weights(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_same(a, b):
    a, b = weights(a), weights(b)
    assert all(torch.equal(a[name], b[name]) for name in a)


def test_it_learns_a_small_table_by_heart():
    result = train(MODEL, TASK, replace(CONFIG, steps=300), progress=False)
    accuracy = result.curves.groupby("split")["accuracy"].last()
    assert accuracy["train"] == 1.0 and result.curves["loss"].iloc[-1] < 0.1 < result.curves["loss"].iloc[0]


def test_same_seed_same_numbers_and_another_seed_others():
    a, b = (train(MODEL, TASK, CONFIG, progress=False) for _ in range(2))
    assert_same(a.model, b.model)
    assert a.curves.drop(columns="seconds").equals(b.curves.drop(columns="seconds"))
    c = train(MODEL, TASK, replace(CONFIG, seed=1), progress=False)
    assert not torch.equal(a.model.W_E, c.model.W_E)


def test_resuming_equals_never_having_stopped(tmp_path, monkeypatch):
    whole = train(MODEL, TASK, CONFIG, tmp_path / "whole", progress=False)

    class Killed(BaseException):
        """As good as kill -9 for the loop: nothing is caught or tidied."""

    def until(step):
        def batch(self, at, size, seed):
            if at == step:
                raise Killed
            return original(self, at, size, seed)

        return batch

    original = ToyFacts.batch
    for stop in (14, 27):  # not at a checkpoint: steps since the last one are done again
        monkeypatch.setattr(ToyFacts, "batch", until(stop))
        with pytest.raises(Killed):
            train(MODEL, TASK, CONFIG, tmp_path / "cut", resume=stop != 14, progress=False)
    monkeypatch.setattr(ToyFacts, "batch", original)
    resumed = train(MODEL, TASK, CONFIG, tmp_path / "cut", resume=True, progress=False)
    assert_same(whole.model, resumed.model)
    assert whole.curves.drop(columns="seconds").equals(resumed.curves.drop(columns="seconds"))
    files = [tmp_path / name / "model" / "weights.safetensors" for name in ("whole", "cut")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_the_folder_holds_everything_and_a_finished_run_is_reused(tmp_path):
    result = train(MODEL, TASK, CONFIG, tmp_path / "run", progress=False)
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "config.json",
        "curves.parquet",
        "model",
        "provenance.json",
        "samples.csv",
    }
    assert_same(result.model, load(tmp_path / "run" / "model"))
    curves = pd.read_parquet(tmp_path / "run" / "curves.parquet")
    assert list(curves["step"].unique()) == [10, 20, 30] and set(curves["split"]) == {"train", "held_out"}
    again = train(MODEL, TASK, CONFIG, tmp_path / "run", resume=True, progress=False)
    assert_same(result.model, again.model)


def test_folders_are_never_overwritten_or_mixed(tmp_path):
    train(MODEL, TASK, CONFIG, tmp_path / "run", progress=False)
    with pytest.raises(TrainingFolderError, match="--resume"):
        train(MODEL, TASK, CONFIG, tmp_path / "run", progress=False)
    with pytest.raises(TrainingFolderError, match=r"train\.steps: 30 there, 40 asked for"):
        train(MODEL, TASK, replace(CONFIG, steps=40), tmp_path / "run", resume=True, progress=False)
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "thesis.tex").touch()
    with pytest.raises(TrainingFolderError, match="not empty"):
        train(MODEL, TASK, CONFIG, tmp_path / "foreign", progress=False)


def test_divergence_is_reported(monkeypatch):
    model = Transformer(MODEL)
    with torch.no_grad():
        model.blocks[0].ffn.down.weight.mul_(float("inf"))
    with pytest.raises(DivergedError, match="step 0"):
        train(model, TASK, CONFIG, progress=False)


def test_reading_some_positions_equals_the_full_forward(model, tokens):
    positions = torch.tensor([[0, 3], [6, 1], [2, 2]])
    from interp import Inputs

    full = model(tokens)
    assert torch.allclose(read(model, Inputs(tokens), positions), full[torch.arange(3)[:, None], positions], atol=1e-12)


def test_decay_spares_embeddings_norms_and_biases():
    model = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8))
    decayed, spared = make_optimizer(model, CONFIG).param_groups
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[id(p)].split(".")[-2] for p in decayed["params"]} == {"qkv", "out", "up", "down"}
    assert {"W_pos", "embedding.weight", "unembedding.weight", "final_norm.bias"} <= {
        names[id(p)] for p in spared["params"]
    }
    assert len(names) == len(decayed["params"]) + len(spared["params"]) and spared["weight_decay"] == 0


def test_a_step_is_adamw_on_the_clipped_gradient():
    """The same update written out, for one parameter."""
    model = Transformer(MODEL, seed=0).double()
    reference = Transformer(MODEL, seed=0).double()
    config = replace(CONFIG, clip=0.05, weight_decay=0.1)
    batch = TASK.batch(0, 32, 0)
    train_step(Loss(model), make_optimizer(model, config), batch, config, 0)
    logits = reference(batch.inputs)[torch.arange(32)[:, None], batch.positions]
    torch.nn.functional.cross_entropy(logits[:, 0], batch.targets[:, 0]).backward()
    norm = torch.stack([p.grad.norm() for p in reference.parameters()]).norm()
    weight = reference.blocks[0].attention.qkv.weight
    gradient = weight.grad * (0.05 / (norm + 1e-6))
    rate = config.rate(0)
    expected = weight * (1 - rate * 0.1) - rate * gradient / (gradient.abs() + 1e-8)
    assert norm > 0.05 and torch.allclose(model.blocks[0].attention.qkv.weight, expected, atol=1e-10)


def test_schedule():
    cosine = TrainConfig(steps=100, learning_rate=1.0, warmup=0.1)
    assert [round(cosine.rate(step), 3) for step in (0, 9, 10, 55)] == [0.1, 1.0, 1.0, 0.5] and cosine.rate(99) < 0.001
    assert replace(cosine, schedule="linear").rate(55) == 0.5 and replace(cosine, schedule="constant").rate(99) == 1.0
    for bad in ({"steps": 0}, {"learning_rate": 0.0}, {"warmup": 1.0}, {"schedule": "step"}):
        with pytest.raises(ValueError, match="allowed"):
            TrainConfig(**bad)


def test_broken_folders_are_named(tmp_path, monkeypatch):
    original, folder = ToyFacts.batch, tmp_path / "run"

    def stop(self, at, size, seed):
        if at == 15:
            raise KeyboardInterrupt
        return original(self, at, size, seed)

    monkeypatch.setattr(ToyFacts, "batch", stop)
    with pytest.raises(KeyboardInterrupt):
        train(MODEL, TASK, CONFIG, folder, progress=False)
    (folder / "state.safetensors").write_bytes(b"half")
    with pytest.raises(TrainingFolderError, match="truncated or foreign"):
        train(MODEL, TASK, CONFIG, folder, resume=True, progress=False)
    for text in ("[]", "{}", "no"):
        (folder / "config.json").write_text(text)
        with pytest.raises(TrainingFolderError, match=r"config\.json"):
            train(MODEL, TASK, CONFIG, folder, resume=True, progress=False)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / ".config.abc.json").touch()  # a write of ours that was killed
    monkeypatch.setattr(ToyFacts, "batch", original)
    train(MODEL, TASK, CONFIG, tmp_path / "new", progress=False)


def test_a_finished_run_fills_the_model_it_was_given(tmp_path):
    result = train(Transformer(MODEL, seed=9), TASK, CONFIG, tmp_path / "run", progress=False)
    mine = Transformer(MODEL, seed=9)
    again = train(mine, TASK, CONFIG, tmp_path / "run", resume=True, progress=False)
    assert again.model is mine
    assert_same(mine, result.model)
    for other in (MODEL, Transformer(MODEL, seed=8), Transformer(MODEL, seed=9).double()):
        with pytest.raises(TrainingFolderError, match="start"):
            train(other, TASK, CONFIG, tmp_path / "run", resume=True, progress=False)


def test_the_state_of_another_run_is_refused(tmp_path, monkeypatch):
    original = ToyFacts.batch

    def stop(self, at, size, seed):
        if at == 15:
            raise KeyboardInterrupt
        return original(self, at, size, seed)

    monkeypatch.setattr(ToyFacts, "batch", stop)
    for seed in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            train(MODEL, TASK, replace(CONFIG, seed=seed), tmp_path / str(seed), progress=False)
    (tmp_path / "1" / "state.safetensors").replace(tmp_path / "0" / "state.safetensors")
    with pytest.raises(TrainingFolderError, match="a run with other settings"):
        train(MODEL, TASK, CONFIG, tmp_path / "0", resume=True, progress=False)


def test_a_folder_of_another_version_is_named(tmp_path):
    train(MODEL, TASK, CONFIG, tmp_path / "run", progress=False)
    path = tmp_path / "run" / "config.json"
    document = json.loads(path.read_text())
    del document["train"]["decay"]
    document["train"]["momentum"] = 0.9
    path.write_text(json.dumps({**document, "interp": "0.0.1"}))
    with pytest.raises(
        TrainingFolderError, match=r"by interp 0\.0\.1: its train config has unknown fields \['momentum'\] and lacks"
    ):
        train(MODEL, TASK, CONFIG, tmp_path / "run", resume=True, progress=False)


def test_a_full_disk_leaves_the_last_state_and_the_run_goes_on(tmp_path, monkeypatch):
    whole = train(MODEL, TASK, CONFIG, tmp_path / "whole", progress=False)
    written = state.save_file
    calls = []

    def full(tensors, path, metadata):
        calls.append(path)
        if len(calls) == 2:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        written(tensors, path, metadata=metadata)

    monkeypatch.setattr(state, "save_file", full)
    with pytest.raises(
        TrainingFolderError, match=r"no space left .* at step 20; the last state in .* is whole: make room"
    ):
        train(MODEL, TASK, CONFIG, tmp_path / "cut", progress=False)
    assert {path.name for path in (tmp_path / "cut").iterdir()} == {"config.json", "state.safetensors"}
    monkeypatch.setattr(state, "save_file", written)
    resumed = train(MODEL, TASK, CONFIG, tmp_path / "cut", resume=True, progress=False)
    assert_same(whole.model, resumed.model)


def test_two_programs_cannot_train_into_one_folder(tmp_path):
    with held(tmp_path / "run"), pytest.raises(TrainingFolderError, match="is being trained into by another program"):
        train(MODEL, TASK, CONFIG, tmp_path / "run", resume=True, progress=False)
    train(MODEL, TASK, replace(CONFIG, steps=2), tmp_path / "run", progress=False)
    (tmp_path / "file").write_text("")
    with pytest.raises(TrainingFolderError, match="is a file, or lies below one; choose a folder"):
        train(MODEL, TASK, CONFIG, tmp_path / "file", progress=False)


def test_a_model_that_cannot_read_the_task_claims_no_folder(tmp_path):
    small = ModelConfig(vocab=8, n_layers=1, n_heads=2, d_model=8, n_ctx=8)
    with pytest.raises(ValueError, match=r"vocab=8 is too small for 'facts'; allowed: at least its \d+"):
        train(small, TASK, CONFIG, tmp_path / "run", progress=False)
    with pytest.raises(ValueError, match=r"vocab=8 is too small for 'facts'; allowed: at least its \d+"):
        train_many(small, TASK, [CONFIG], tmp_path / "runs", progress=False)
    assert not (tmp_path / "run").exists() and not (tmp_path / "runs").exists()


def test_a_run_that_diverged_keeps_its_curves_and_says_so_again(tmp_path):
    wild = replace(CONFIG, learning_rate=1e20, clip=1e20, warmup=0.1, evaluate_every=1)
    with pytest.raises(DivergedError) as first:
        train(MODEL, TASK, wild, tmp_path / "run", progress=False)
    found = open_run(tmp_path / "run")
    assert found.note == str(first.value) and not found.success and len(found.curves) == len(first.value.rows) > 0
    with pytest.raises(DivergedError) as again:
        train(MODEL, TASK, wild, tmp_path / "run", resume=True, progress=False)
    assert str(again.value) == str(first.value)


def test_a_run_is_opened_again_with_its_task_and_what_was_kept(tmp_path):
    result = train(MODEL, TASK, replace(CONFIG, keep=3), tmp_path / "run", progress=False)
    found = open_run(tmp_path / "run")
    assert_same(found.model, result.model)
    assert found.task == TASK and found.config == replace(CONFIG, keep=3) and found.kept == (0, 1, 5, 30)
    assert_same(found.at(30), result.model)
    assert torch.equal(found.at(0).W_E, Transformer(MODEL, seed=0).W_E)
    with pytest.raises(TrainingFolderError, match="step 7 was not kept; allowed: 0, 1, 5, 30"):
        found.at(7)
    with pytest.raises(TrainingFolderError, match="no training folder"):
        open_run(tmp_path)
    (tmp_path / "run" / "model").rename(tmp_path / "model")
    with pytest.raises(TrainingFolderError, match="has not finished"):
        open_run(tmp_path / "run")
    samples = pd.read_csv(tmp_path / "run" / "samples.csv")
    assert set(samples["split"]) == {"train", "held_out"} and samples["probability"].between(0, 1).all()


def test_it_stops_at_its_goals_if_asked():
    result = train(MODEL, TASK, replace(CONFIG, steps=400, stop="goals", learning_rate=1e-2), progress=False)
    assert result.success == (result.curves["step"].max() < 400)

    class Easy(ToyFacts):
        goals = (Goal("train", "nats", 100.0),)

    assert train(MODEL, Easy(16), replace(CONFIG, stop="goals"), progress=False).curves["step"].max() == 10


def test_a_loss_far_above_a_guess_is_divergence():
    with pytest.raises(DivergedError, match=r"the loss is .* at step \d+ .*learning rate 1e\+03.*losses before"):
        train(MODEL, TASK, replace(CONFIG, learning_rate=1e3, warmup=0.0, clip=1e9), progress=False)


def test_autocast_trains_and_keeps_float32_weights():
    result = train(MODEL, TASK, replace(CONFIG, precision="bfloat16"), progress=False)
    plain = train(MODEL, TASK, CONFIG, progress=False)
    assert result.model.dtype == torch.float32
    assert 0 < abs(result.curves["loss"].iloc[-1] - plain.curves["loss"].iloc[-1]) < 0.3


@pytest.mark.slow
def test_the_loss_compiles_whole_alone_and_mapped(monkeypatch):
    """Traced by torch.compile without a break, run by PyTorch's own kernels: the numbers are the same."""
    compiled = []
    original = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f: compiled.append(f) or original(f, backend="eager", fullgraph=True))
    config = replace(CONFIG, compile=True, steps=4, evaluate_every=2)
    result, plain = (train(MODEL, TASK, one, progress=False) for one in (config, replace(config, compile=False)))
    assert len(compiled) == 1 and isinstance(compiled[0], Loss)
    assert_same(result.model, plain.model)
    configs = [replace(config, seed=seed) for seed in range(3)]
    models = [Transformer(MODEL, seed=seed) for seed in range(3)]
    mapped, loop = Ensemble(models, configs), Ensemble(models, [replace(one, compile=False) for one in configs])
    for step in range(2):
        batches = [TASK.batch(step, 32, seed) for seed in range(3)]
        assert torch.allclose(mapped.step(batches, step)[0], loop.step(batches, step)[0], atol=1e-5)
    assert len(compiled) == 2


@pytest.mark.parametrize(
    "bad",
    [
        {"keep": 1},
        {"stop": "never"},
        {"decay": "some"},
        {"precision": "float8"},
        {"learning_rate": float("nan")},
        {"clip": float("inf")},
        {"weight_decay": -1.0},
        {"steps": 2.5},
        {"compile": "yes"},
        {"seed": 10**20},
        {"betas": (0.9,)},
        {"final_rate": -3.0},
        {"batch_size": True},
    ],
)
def test_new_options_are_checked(bad):
    with pytest.raises(ValueError, match="allowed"):
        TrainConfig(**bad)
