"""Many runs: every way gives the same models, a killed one goes on, one that diverges ends alone."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest
import torch

from interp.tasks import ToyFacts
from interp.tasks.task import Goal
from interp.tasks.train_config import TrainConfig
from interp.training import DivergedError, TrainingFolderError, open_run, train
from interp.training.ensemble import EnsembleError
from interp.training.many import chosen, train_many

TASK = ToyFacts(16)
MODEL = TASK.model_config(d_model=16, n_heads=2, n_layers=1)
CONFIG = TrainConfig(steps=30, batch_size=16, evaluate_every=10, checkpoint_every=10, learning_rate=5e-3, keep=3)
THREE = [replace(CONFIG, seed=seed) for seed in (3, 1, 2)]


def weights(folder):
    return (folder / "model" / "weights.safetensors").read_bytes()


def files(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


@pytest.mark.slow  # processes that import torch
def test_every_way_leaves_the_same_folders(tmp_path):
    torch.set_num_threads(1)  # as the processes of "local" have
    found = {how: train_many(MODEL, TASK, THREE, tmp_path / how, how, progress=False)  # type: ignore[arg-type]
             for how in ("sequence", "stacked", "local")}  # fmt: skip
    assert files(tmp_path / "sequence") == files(tmp_path / "stacked") == files(tmp_path / "local")
    for name in ("seed_0001", "seed_0002", "seed_0003"):
        alone, stacked, local = (found[how][name] for how in ("sequence", "stacked", "local"))
        assert weights(tmp_path / "sequence" / name) == weights(tmp_path / "local" / name)
        assert torch.allclose(alone.model.W_E, stacked.model.W_E, atol=1e-4)
        assert (alone.how, stacked.how, local.how) == ("sequence", "stacked", "local")
        columns = ["step", "split", "learning_rate", "n"]
        assert alone.curves[columns].equals(stacked.curves[columns]) and alone.kept == stacked.kept == (0, 1, 5, 30)
        assert torch.equal(alone.at(0).W_E, stacked.at(0).W_E)
        assert torch.equal(open_run(tmp_path / "stacked" / name).model.W_E, stacked.model.W_E)
    assert list(found["stacked"]) == ["seed_0003", "seed_0001", "seed_0002"]


class Killed(BaseException):
    """As good as kill -9 for the loop: nothing is caught or tidied."""


def stop_at(monkeypatch, step, original=ToyFacts.batch):
    def batch(self, at, size, seed):
        if at == step:
            raise Killed
        return original(self, at, size, seed)

    monkeypatch.setattr(ToyFacts, "batch", batch)


def test_a_killed_stack_goes_on_bit_for_bit_even_past_a_run_that_has_ended(tmp_path, monkeypatch):
    configs = {
        "a": CONFIG,
        "b": replace(CONFIG, seed=1, learning_rate=1e20, clip=1e20, warmup=0.0),
        "c": replace(CONFIG, seed=2),
    }
    whole = train_many(MODEL, TASK, configs, tmp_path / "whole", "stacked", progress=False)
    assert whole["b"].note and not whole["b"].success and whole["a"].note == ""
    for step in (2, 7, 15, 28):  # before the first state, and after b has ended
        stop_at(monkeypatch, step)
        with pytest.raises(Killed):
            train_many(MODEL, TASK, configs, tmp_path / "cut", "stacked", resume=step != 2, progress=False)
    stop_at(monkeypatch, -1)
    cut = train_many(MODEL, TASK, configs, tmp_path / "cut", "stacked", resume=True, progress=False)
    for name in ("a", "c"):
        assert weights(tmp_path / "whole" / name) == weights(tmp_path / "cut" / name)
        a, b = (found[name].curves.drop(columns="seconds") for found in (whole, cut))
        assert a.equals(b)
    assert cut["b"].note == whole["b"].note and "learning rate 1e+20" in cut["b"].note
    assert files(tmp_path / "whole") == files(tmp_path / "cut")
    again = train_many(MODEL, TASK, configs, tmp_path / "whole", "stacked", resume=True, progress=False)
    assert torch.equal(again["a"].model.W_E, whole["a"].model.W_E) and again["b"].note == whole["b"].note


class Easy(ToyFacts):
    goals = (Goal("train", "accuracy", 0.8),)


def test_runs_that_meet_their_goals_stop_early_one_by_one(tmp_path):
    slow = replace(CONFIG, steps=120, stop="goals", keep=0, learning_rate=5e-4, schedule="constant")
    configs = {"slow": slow, "fast": replace(slow, learning_rate=2e-2)}
    model = TASK.model_config(d_model=32, n_heads=2)
    found = train_many(model, Easy(8), configs, tmp_path / "runs", "stacked", progress=False)
    ends = {name: int(run.curves["step"].max()) for name, run in found.items()}
    assert ends["fast"] < ends["slow"] <= 120 and found["fast"].success
    alone = train(model, Easy(8), configs["fast"], progress=False)
    assert int(alone.curves["step"].max()) == ends["fast"]
    assert torch.allclose(alone.model.W_E, found["fast"].model.W_E, atol=1e-4)


@pytest.mark.parametrize("how", ["sequence", "stacked", pytest.param("local", marks=pytest.mark.slow)])
def test_divergence_ends_one_run_and_not_the_others(tmp_path, how):
    wild = replace(CONFIG, keep=0, learning_rate=1e20, clip=1e20, warmup=0.0)
    with pytest.raises(DivergedError, match="gradient norm"):
        train(MODEL, TASK, wild, progress=False)
    found = train_many(
        MODEL, TASK, {"tame": replace(CONFIG, keep=0), "wild": wild}, tmp_path / "runs", how, progress=False
    )
    assert "lower learning_rate" in found["wild"].note and not found["tame"].note
    again = train_many(
        MODEL, TASK, {"tame": replace(CONFIG, keep=0), "wild": wild}, tmp_path / "runs", how, True, progress=False
    )
    assert again["wild"].note == found["wild"].note and again["wild"].curves.equals(found["wild"].curves)
    assert again["tame"].how == found["tame"].how == how and again["tame"].success == found["tame"].success


def test_the_choice_follows_from_sizes_alone():
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    small = [replace(CONFIG, seed=seed) for seed in range(4)]
    large = TASK.model_config(d_model=4096)
    assert chosen(MODEL, TASK, small, cpu) == "stacked" == chosen(large, TASK, small, gpu)
    assert chosen(large, TASK, small, cpu) in ("local", "sequence")
    assert chosen(MODEL, TASK, small[:1], cpu) == "sequence"
    assert chosen(MODEL, TASK, [*small, replace(CONFIG, batch_size=8)], gpu) == "sequence"


def test_bad_calls_are_named(tmp_path):
    with pytest.raises(EnsembleError, match="how='fast' is not allowed; allowed: 'auto', 'stacked'"):
        train_many(MODEL, TASK, THREE, how="fast")  # type: ignore[arg-type]
    with pytest.raises(EnsembleError, match="no training configs"):
        train_many(MODEL, TASK, [])
    train_many(MODEL, TASK, THREE[:2], tmp_path / "runs", "stacked", progress=False)
    for how in ("sequence", "stacked", "local"):
        with pytest.raises(TrainingFolderError, match="resume"):
            train_many(MODEL, TASK, THREE, tmp_path / "runs", how, progress=False)  # type: ignore[arg-type]
    other = [replace(one, learning_rate=1e-3) for one in THREE]
    with pytest.raises(TrainingFolderError, match=r"train\.learning_rate: 0\.005 there, 0\.001 asked for"):
        train_many(MODEL, TASK, other, tmp_path / "runs", "stacked", resume=True, progress=False)


def test_a_stack_s_state_belongs_to_its_runs(tmp_path, monkeypatch):
    stop_at(monkeypatch, 15)
    with pytest.raises(Killed):
        train_many(MODEL, TASK, THREE, tmp_path / "runs", "stacked", progress=False)
    stop_at(monkeypatch, -1)
    more = [*THREE, replace(CONFIG, seed=9)]
    with pytest.raises(TrainingFolderError, match="without seed_0009"):
        train_many(MODEL, TASK, more, tmp_path / "runs", "stacked", resume=True, progress=False)
    with pytest.raises(TrainingFolderError, match="it is the state of seed_0003"):
        train_many(MODEL, TASK, THREE[:2], tmp_path / "runs", "stacked", resume=True, progress=False)
    for folder in (tmp_path / "runs").glob("seed_*"):
        shutil.rmtree(folder)
    other = [replace(one, learning_rate=1e-5) for one in THREE]
    with pytest.raises(TrainingFolderError, match="unfinished stack"):
        train_many(MODEL, TASK, other, tmp_path / "runs", "stacked", progress=False)


def test_what_only_some_ways_can_do_is_refused_by_the_others(tmp_path, monkeypatch):
    with pytest.raises(EnsembleError, match=r"a Easy is not allowed with how='local'"):
        train_many(MODEL, Easy(16), THREE, tmp_path / "a", "local", progress=False)
    with pytest.raises(EnsembleError, match=r"workers are not allowed with how='stacked'"):
        train_many(MODEL, TASK, THREE, tmp_path / "b", "stacked", progress=False, workers=2)
    for name in ("../evil", "/evil", "", ".hidden", 3):
        with pytest.raises(EnsembleError, match="run name"):
            train_many(MODEL, TASK, {name: CONFIG}, tmp_path / "c", progress=False)
    with pytest.raises(EnsembleError, match="model=int is not allowed"):
        train_many(3, TASK, THREE, progress=False)  # type: ignore[arg-type]
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EnsembleError, match="torchrun"):
        train_many(MODEL, TASK, THREE, progress=False)
