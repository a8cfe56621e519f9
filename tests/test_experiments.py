"""The experiments run with tiny settings and leave what they say."""

from __future__ import annotations

import dataclasses
import importlib.util
from pathlib import Path

import pandas as pd
import pytest

ROOT = Path(__file__).parents[1] / "experiments"


def experiment(name: str):
    spec = importlib.util.spec_from_file_location(name, ROOT / name / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_e02_measures_alignment(tmp_path, capsys):
    module = experiment("e02_does_cross_attention_align")
    words = ["--folder", str(tmp_path / "run"), "--seeds", "2", "--steps", "2"]
    module.main(words)
    results = tmp_path / "run" / "results"
    heads, layers = (pd.read_parquet(results / f"{name}.parquet") for name in ("heads", "layers"))
    assert len(heads) == (2 + 2 + 1) * 2 * 2 * 2  # heads of the three tasks, seeds, halves, layers
    assert layers.groupby(["task", "seed"])["best"].sum().eq(1).all() and len(layers) == 12
    assert layers["mass"].between(0, 0.3).all() and layers["chance"].between(0.08, 0.13).all()
    rows = heads[
        (heads["half"] == "read") & (heads["task"] == "sort") & (heads["seed"] == 1001) & (heads["layer"] == 1)
    ]
    found = layers[(layers["task"] == "sort") & (layers["seed"] == 1001) & (layers["layer"] == 1)]
    assert found["mass"].item() == pytest.approx(rows["mass"].mean())
    assert {path.name for path in results.glob("*.png")} == {"copy.png", "reverse.png", "sort.png"}
    assert "unit: seed, n = 2" in capsys.readouterr().out


def test_e07_opens_again_what_it_planted(tmp_path):
    from interp import Transformer
    from interp.claims.planted import CONFIG, SomeFacts
    from interp.tasks.toy_facts import as_batch
    from interp.training.judge import judge

    module, task = experiment("e07_calibration"), SomeFacts(16, 8)
    models = {1: Transformer(task.model_config(d_model=16, n_heads=2), seed=1)}
    few = dataclasses.replace(CONFIG, steps=60, batch_size=32, learning_rate=1e-2)
    for _ in range(2):  # made, then opened
        [one] = module.mixtures(models, [1.0], tmp_path / "planted", task, few)
        assert judge(one.model, as_batch(one.train))["accuracy"] == pytest.approx(one.recall["train ffn"])
        assert one.recall["train ffn"] > 2 * one.recall["base"] and set(one.train.table["part"]) == {"ffn"}
    readings = module.measure([one], tmp_path / "readings", prompts=12, steps=2)
    assert len(readings) == 6 and readings["reading"].notna().all()
    assert readings.equals(module.measure([one], tmp_path / "readings"))  # finished files are not made again


@pytest.mark.slow
def test_e08_edits_are_measured_beside_controls(tmp_path, capsys):
    experiment("e08_editing").main(["--facts", "3", "--tune", "2", "--folder", str(tmp_path)])
    table = pd.read_csv(tmp_path / "edits.csv").set_index("method")
    assert len(table) == 9 and table["ES"]["unedited"] < 50 < table["ES"].max()
    assert len(pd.read_csv(tmp_path / "sites.csv")) == 12
    assert "Rank-one edits of the toy model" in capsys.readouterr().out


def test_e09_counts_verdicts_on_planted_truth(tmp_path, capsys, monkeypatch):
    from interp.claims import confusion

    module = experiment("e09_are_verdicts_right")
    monkeypatch.setattr(module, "TRUTHS", confusion.chosen(["F2.special", "R3.composition"]))
    module.main(["--draws", "3", "--models", "1", "--folder", str(tmp_path)])
    table = pd.read_csv(tmp_path / "confusion.csv")
    assert (table[["supported", "refuted", "undecided"]].sum(axis=1) == 3).all() and len(table) == 5
    assert "How often are the verdicts wrong?" in capsys.readouterr().out
    assert set(module.NULLS) <= {truth.effect for truth in confusion.TRUTHS}
