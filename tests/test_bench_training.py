"""The programs that time training and check a GPU run from end to end, here with tiny sizes and on a CPU."""

from __future__ import annotations

import runpy
from pathlib import Path

import pandas as pd
import pytest

BENCH = Path(__file__).parents[1] / "experiments" / "bench"


@pytest.mark.slow
def test_training_is_timed_against_plain_loops_and_in_sequence(tmp_path, capsys):
    program = runpy.run_path(str(BENCH / "training.py"))
    program["main"](["--quick", "--repeats", "1", "--threads", "1", "--folder", str(tmp_path)])
    loop, seeds = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("loop", "seeds"))
    assert len(loop) == 2 and (loop["times faster"] > 0.3).all()
    assert (
        list(seeds["batch"]) == [64, 256] and (seeds["times faster"] > 0.2).all() and set(seeds["auto"]) == {"stacked"}
    )
    assert "differ from the models trained alone by at most" in capsys.readouterr().out


@pytest.mark.slow
def test_what_a_gpu_is_checked_for_holds_on_a_cpu(tmp_path, capsys):
    program = runpy.run_path(str(BENCH / "gpu.py"))
    assert program["main"](["--device", "cpu", "--quick", "--folder", str(tmp_path)]) == 0
    table = pd.read_csv(tmp_path / "gpu.csv")
    assert set(table["check"]) == {"forwards", "sweeps", "generation", "data", "training", "ensembles"}
    assert "0 checks failed" in capsys.readouterr().out


@pytest.mark.slow
def test_the_first_step_that_meets_the_goals_is_found(tmp_path):
    program = runpy.run_path(str(BENCH / "tasks.py"))
    program["main"](["--tasks", "facts", "--folder", str(tmp_path)])
    table = pd.read_csv(tmp_path / "tasks.csv")
    assert 100 <= table["steps"][0] <= 600 and "held_out accuracy" in table["reached"][0]
    program["main"](["--tasks", "facts", "--folder", str(tmp_path)])  # nothing is measured twice
    assert pd.read_csv(tmp_path / "tasks.csv").equals(table)
