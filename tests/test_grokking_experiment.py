"""experiments/grokking.py runs with tiny settings and leaves what it says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pandas as pd
import pytest

SCRIPT = Path(__file__).parents[1] / "experiments" / "grokking.py"


@pytest.mark.slow
def test_it_measures_every_kept_step(tmp_path, capsys):
    spec = importlib.util.spec_from_file_location("grokking", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    words = ["--run", str(tmp_path / "run"), "--folder", str(tmp_path / "results"), "--modulus", "7", "--steps", "4"]
    for _ in range(2):  # the second time from the finished run
        module.main([*words, "--keep", "3"])
    assert {path.name for path in (tmp_path / "results").iterdir()} == {
        "README.md",
        "power.png",
        "progress.csv",
        "progress.png",
    }
    table = pd.read_csv(tmp_path / "results" / "progress.csv")
    assert sorted(table["step"].unique()) == [0, 1, 2, 4]
    assert "Accuracy above 99%, first: train at step" in capsys.readouterr().out
    rising = pd.Series([4.0, 12.0, 3.0, 1.0], index=[0, 5, 9, 20])
    assert module.halved(rising) == 20 and module.halved_after_peak(rising) == 9
