"""Processes that die, functions that raise, Ctrl-C and kill -9: nothing finished is lost or done twice."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from engine_units import about, began, counting, executions, finish, gone, start, wait_for, when, workers_of

from interp.engines import EngineError, UnitsFailedError, run_units
from interp.engines import run as run_module
from interp.engines.work import Died, Failed, execute

pytestmark = pytest.mark.slow  # processes that import torch
needs_proc = pytest.mark.skipif(not Path("/proc").exists(), reason="looks processes up in /proc")
PLAIN = {f"u{x}": {"x": x} for x in range(1, 5)}
UNITS = {
    "once": {"x": 10, "do": "die once"},
    "wrong": {"x": 12, "do": "raise"},
    **PLAIN,
    "long": {"x": 20, "do": "wait"},
}


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory) -> dict[str, Any]:
    """One run of two processes: a unit kills its process, one raises, and Ctrl-C comes during the last one."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background is born deaf to Ctrl-C
    folder = tmp_path_factory.mktemp("local")
    log, run, lines = folder / "log", folder / "run", []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("interp.engines").addHandler(handler)
    all_else_done = [run / f"{unit}.parquet" for unit in ("once", *PLAIN)]
    thread = when(
        lambda: began(log, 20) and all(path.exists() for path in all_else_done),
        lambda: os.kill(os.getpid(), signal.SIGINT),
    )
    with pytest.raises(KeyboardInterrupt) as caught:
        run_units(counting(log), UNITS, run, workers=2, progress=False)
    thread.join()
    logging.getLogger("interp.engines").removeHandler(handler)
    return {"log": log, "run": run, "lines": lines, "message": str(caught.value), "pids": workers_of(log)}


def test_a_process_that_dies_costs_only_its_own_unit_an_attempt(interrupted):
    assert executions(interrupted["log"]) == {10: 2, 12: 1, 1: 1, 2: 1, 3: 1, 4: 1, 20: 1}
    assert "unit 'once', attempt 1 of 3: its process ended (SIGKILL(-9)); trying again" in interrupted["lines"]
    assert about(interrupted["run"], "once")["attempts"] == 2 and about(interrupted["run"], "u1")["attempts"] == 1


def test_an_exception_is_not_tried_again(interrupted):
    assert "unit 'wrong' failed: RuntimeError: x = 12 is wrong" in interrupted["lines"]
    assert "in function\n" in (interrupted["run"] / "wrong.error.txt").read_text()


def test_a_worker_is_another_process_with_one_thread(interrupted):
    told = about(interrupted["run"], "u1")
    assert told["pid"] != os.getpid() and told["machine"]["threads"] == 1 and told["engine"] == "local"


@needs_proc
def test_ctrl_c_leaves_what_is_finished_one_message_and_no_process(interrupted):
    assert interrupted["message"].startswith("5 of 7 units are finished in ")
    assert len(interrupted["pids"]) == 3 and all(gone(pid) for pid in interrupted["pids"])
    assert not (interrupted["run"] / "long.parquet").exists()


def test_the_rest_runs_later_on_another_engine_and_the_table_is_that_of_one_process(interrupted, tmp_path):
    (interrupted["log"] / "go").touch()
    units = {**UNITS, "wrong": {"x": 12}}
    before = executions(interrupted["log"])
    got = run_units(counting(interrupted["log"]), units, interrupted["run"], engine="serial", progress=False)
    assert executions(interrupted["log"]) - before == {12: 1, 20: 1}
    here = run_units(counting(tmp_path / "log"), PLAIN, tmp_path / "here", engine="serial", progress=False)
    pd.testing.assert_frame_equal(got[got["unit"].isin(PLAIN)].reset_index(drop=True), here)
    left = {path.name for path in interrupted["run"].iterdir()} - {".lock"}
    assert left == {f"{unit}.parquet" for unit in units}


def test_a_unit_that_no_attempt_survives_fails_and_the_others_finish(tmp_path, monkeypatch, caplog):
    class Deadly(run_module.Serial):
        def next(self):
            call = self._waiting.pop(0)
            return call.unit, Died("its process ended") if call.unit == "u2" else execute(self._function, call)

    monkeypatch.setattr(run_module, "Serial", Deadly)
    with pytest.raises(UnitsFailedError) as caught:
        run_units(counting(tmp_path / "log"), PLAIN, tmp_path / "run", engine="serial", retries=1, progress=False)
    line = "no attempt of 2 survived; the last: its process ended"
    assert caught.value.failures == {"u2": line} and (tmp_path / "run" / "u2.error.txt").read_text() == line + "\n"
    assert executions(tmp_path / "log") == {1: 1, 3: 1, 4: 1} and caplog.text.count("trying again") == 1


def test_an_error_of_ours_ends_the_workers(tmp_path, monkeypatch):
    closed = []

    class Broken(run_module.Serial):
        def next(self):
            raise EngineError("something else")

        def close(self, kill: bool = False):
            closed.append(kill)

    monkeypatch.setattr(run_module, "Serial", Broken)
    with pytest.raises(EngineError, match="something else"):
        run_units(counting(tmp_path / "log"), PLAIN, tmp_path / "run", engine="serial", progress=False)
    assert closed == [True] and Failed.__doc__


@pytest.mark.slow
def test_a_real_process_that_always_dies(tmp_path):
    units = {"always": {"x": 11, "do": "die"}, **PLAIN}
    with pytest.raises(UnitsFailedError, match=r"1 of 5 units failed: 'always' \(no attempt of 2 survived; .*SIGKILL"):
        run_units(counting(tmp_path / "log"), units, tmp_path / "run", workers=2, retries=1, progress=False)
    assert executions(tmp_path / "log") == {11: 2, 1: 1, 2: 1, 3: 1, 4: 1}


@pytest.mark.slow
@needs_proc
def test_ctrl_c_in_a_program_shows_one_traceback(tmp_path):
    process = start(tmp_path)
    pids = workers_of(tmp_path / "log")
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode != 0 and all(gone(pid) for pid in pids)
    assert "KeyboardInterrupt: 1 of 5 units are finished in " in shown and shown.count("Traceback") == 1
    finish(tmp_path)


@pytest.mark.slow
@needs_proc
def test_workers_do_not_outlive_a_killed_parent(tmp_path):
    process = start(tmp_path)
    pids = workers_of(tmp_path / "log")
    process.kill()
    process.communicate(timeout=60)
    wait_for(lambda: all(gone(pid) for pid in pids), 10)
    finish(tmp_path)
