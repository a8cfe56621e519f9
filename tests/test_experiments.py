"""The experiments run with tiny settings and leave what they say."""

from __future__ import annotations

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


@pytest.mark.slow
def test_e08_edits_are_measured_beside_controls(tmp_path, capsys):
    experiment("e08_editing").main(["--facts", "3", "--tune", "2", "--folder", str(tmp_path)])
    table = pd.read_csv(tmp_path / "edits.csv").set_index("method")
    assert len(table) == 9 and table["ES"]["unedited"] < 50 < table["ES"].max()
    assert len(pd.read_csv(tmp_path / "sites.csv")) == 12
    assert "Rank-one edits of the toy model" in capsys.readouterr().out
