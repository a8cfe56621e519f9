"""What a folder of units holds, what is skipped, done again or refused; in this process."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
import pytest
import torch
from engine_units import about, counting, executions

import interp.engines
from interp.engines import ENGINES, EngineError, UnitsFailedError, run_units
from interp.engines import results as results_module
from interp.engines.results import claim, encode

UNITS = {"b": {"x": 2}, "a": {"x": 1}, "c": {"x": 3}}


def serial(function, units, folder, **more):
    return run_units(function, units, folder, engine="serial", progress=False, **more)


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {".lock"}


def test_tables_come_in_the_units_order_with_the_unit_first(tmp_path):
    table = serial(counting(tmp_path / "log"), UNITS, tmp_path / "run")
    assert list(table.columns) == ["unit", "x", "square", "part"] and table.index.equals(pd.RangeIndex(6))
    assert list(table["unit"]) == ["b", "b", "a", "a", "c", "c"] and list(table["square"]) == [4, 4, 1, 1, 9, 9]
    assert names(tmp_path / "run") == {"a.parquet", "b.parquet", "c.parquet"}


def test_a_file_says_where_it_came_from(tmp_path):
    serial(counting(tmp_path / "log"), UNITS, tmp_path / "run")
    told = about(tmp_path / "run", "b")
    assert told["unit"] == "b" and told["config"] == {"x": 2} and told["attempts"] == 1 and told["engine"] == "serial"
    assert told["function"] == "engine_units.counting.<locals>.function" and told["machine"]["threads"] == 1
    assert {"seconds", "host", "pid", "commit", "versions", "finished", "driver", "command"} <= told.keys()


def test_the_same_call_again_runs_nothing_and_gives_the_same_table(tmp_path):
    function = counting(tmp_path / "log")
    first = serial(function, UNITS, tmp_path / "run")
    again = serial(function, UNITS | {"d": {"x": 4}}, tmp_path / "run")
    pd.testing.assert_frame_equal(again[again["unit"] != "d"], first)
    assert executions(tmp_path / "log") == {1: 1, 2: 1, 3: 1, 4: 1}


def test_another_config_under_a_finished_name_is_refused_with_both_values(tmp_path):
    function = counting(tmp_path / "log")
    serial(function, UNITS, tmp_path / "run")
    with pytest.raises(EngineError, match=r"unit 'a' is finished in .*: config.x: 1 there, 5 asked for; allowed: .*another "
                                          "name, or a new folder"):  # fmt: skip
        serial(function, UNITS | {"a": {"x": 5}}, tmp_path / "run")
    with pytest.raises(EngineError, match=r"config.y: \(absent\) there, 0 asked for"):
        serial(function, UNITS | {"a": {"x": 1, "y": 0}}, tmp_path / "run")
    with pytest.raises(EngineError, match=r"function: .*counting.* there, .*<lambda>.* asked for"):
        serial(lambda config, scratch: pd.DataFrame(), UNITS, tmp_path / "run")
    assert executions(tmp_path / "log") == {1: 1, 2: 1, 3: 1}


def test_a_dataclass_config_and_a_mapping_of_the_same_fields_are_the_same_unit(tmp_path):
    @dataclass
    class Config:
        x: int

    def function(config, scratch):
        return pd.DataFrame({"type": [type(config).__name__]})

    assert list(serial(function, {"a": Config(1)}, tmp_path)["type"]) == ["Config"]
    assert list(serial(function, {"a": {"x": 1}}, tmp_path)["type"]) == ["Config"]  # not run again


def test_a_failed_unit_is_named_kept_as_text_and_run_again_later(tmp_path, caplog):
    function, folder = counting(tmp_path / "log"), tmp_path / "run"
    with pytest.raises(UnitsFailedError, match=r"1 of 4 units failed: 'e' \(RuntimeError: x = 9 is wrong\)") as caught:
        serial(function, {"e": {"x": 9, "do": "raise"}, **UNITS}, folder)
    assert caught.value.failures == {"e": "RuntimeError: x = 9 is wrong"} and "'e' failed" in caplog.text
    assert "in function\n" in (text := (folder / "e.error.txt").read_text()) and "second line" in text
    assert executions(tmp_path / "log") == {9: 1, 1: 1, 2: 1, 3: 1}
    assert len(serial(function, {"e": {"x": 9}, **UNITS}, folder)) == 8  # the failed one may have another config
    assert executions(tmp_path / "log") == {9: 2, 1: 1, 2: 1, 3: 1}
    assert names(folder) == {"e.parquet", "a.parquet", "b.parquet", "c.parquet"}


def test_leaving_the_program_is_a_failure_of_the_unit(tmp_path):
    with pytest.raises(UnitsFailedError, match="SystemExit: 3"):
        serial(lambda config, scratch: exit(3), {"a": {}}, tmp_path)


def test_a_truncated_file_is_refused_by_name(tmp_path):
    function, units = counting(tmp_path / "log"), {"a": {"x": 1}}
    serial(function, units, tmp_path / "run")
    path = tmp_path / "run" / "a.parquet"
    whole = path.read_bytes()
    for cut in (0, 1, len(whole) // 2, -1):
        path.write_bytes(whole[:cut])
        with pytest.raises(EngineError, match=r"a\.parquet is truncated, or no result of run_units"):
            serial(function, units, tmp_path / "run")
        assert path.read_bytes() == whole[:cut]
    path.unlink()
    assert len(serial(function, units, tmp_path / "run")) == 2 and executions(tmp_path / "log") == {1: 2}


def test_somebody_elses_file_is_refused_and_stays(tmp_path):
    pd.DataFrame({"x": [1]}).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(EngineError, match="no result of run_units"):
        serial(counting(tmp_path / "log"), UNITS, tmp_path)
    assert list(pd.read_parquet(tmp_path / "a.parquet")["x"]) == [1]


def test_a_kill_in_the_middle_of_a_write_leaves_no_file_and_no_litter(tmp_path, monkeypatch):
    function, folder = counting(tmp_path / "log"), tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(
            results_module.record, "write_atomic", lambda path, write: write(path.with_name(".a.xyz.parquet"))
        )
        with pytest.raises(EngineError, match="cannot be read"):
            serial(function, {"a": {"x": 1}}, folder)
    assert names(folder) == {".a.xyz.parquet"}
    assert len(serial(function, {"a": {"x": 1}}, folder)) == 2 and names(folder) == {"a.parquet"}


def test_scratch_lasts_to_the_next_attempt_and_not_to_another_config(tmp_path):
    seen = []

    def function(config, scratch):
        assert scratch.is_dir() and scratch.is_relative_to(tmp_path / "run")
        path = scratch / "checkpoint"
        seen.append((config["x"], path.read_text() if path.exists() else None))
        path.write_text(f"of {config['x']}")
        if len(seen) < 4:
            raise RuntimeError("stopped")
        return pd.DataFrame({"x": [1]})

    for x in (1, 1, 2):
        with pytest.raises(UnitsFailedError):
            serial(function, {"a": {"x": x}}, tmp_path / "run")
    serial(function, {"a": {"x": 1}}, tmp_path / "run")
    assert seen == [(1, None), (1, "of 1"), (2, None), (1, "of 1")]
    assert names(tmp_path / "run") == {"a.parquet"}


def test_scratch_left_by_a_kill_after_the_write_is_removed(tmp_path):
    function = counting(tmp_path / "log")
    serial(function, UNITS, tmp_path / "run")
    (tmp_path / "run" / "a.scratch").mkdir()
    serial(function, UNITS, tmp_path / "run")
    assert "a.scratch" not in names(tmp_path / "run")


@pytest.mark.parametrize(
    ("table", "message"),
    [(None, "returned a NoneType; allowed: a pandas DataFrame"), ({"x": 1}, "returned a dict"),
     (pd.DataFrame({"unit": [1]}), "the column 'unit'"), (pd.DataFrame([[1, 2]]), "the column 0"),
     (pd.DataFrame([[1, 2]], columns=["x", "x"]), "two columns 'x'"),
     (pd.DataFrame({"x": [1]}, index=["mean"]), "the index .*reset_index"),
     (pd.DataFrame({"x": [1]}, index=pd.Index([1], name="layer")), r"the index \['layer'\], which would be lost"),
     (pd.DataFrame({"x": [object()]}), "ArrowInvalid")],
)  # fmt: skip
def test_what_is_no_plain_table_fails_with_what_is_allowed(tmp_path, table, message):
    with pytest.raises(UnitsFailedError, match=message):
        serial(lambda config, scratch: table, {"a": {}}, tmp_path)


def test_tables_survive_the_file(tmp_path):
    table = pd.DataFrame({
        "name": ["a", None], "value": [0.1, float("nan")], "few": pd.Categorical(["x", "y"]),
        "when": pd.to_datetime(["2026-01-01", "2026-01-02"]), "flag": [True, False],
    })  # fmt: skip
    got = serial(
        lambda config, scratch: table[table["value"] < 9], {"a": {}}, tmp_path
    )  # a filtered table's index may go
    pd.testing.assert_frame_equal(got.drop(columns="unit"), table.iloc[:1].reset_index(drop=True))
    assert len(serial(lambda config, scratch: table.iloc[:0], {"a": {}}, tmp_path / "empty")) == 0


def test_a_function_that_writes_into_its_config_changes_nobody_elses(tmp_path):
    shared = {"x": []}

    def function(config, scratch):
        config["x"].append(1)
        return pd.DataFrame({"n": [len(config["x"])]})

    assert list(serial(function, {"a": shared, "b": shared}, tmp_path)["n"]) == [1, 1] and shared == {"x": []}


def test_a_unit_has_one_thread_and_the_caller_keeps_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", "7")
    torch.set_num_threads(2)
    try:

        def function(config, scratch):  # fmt: skip
            import os

            return pd.DataFrame({"torch": [torch.get_num_threads()], "mkl": [os.environ["MKL_NUM_THREADS"]]})

        got = serial(function, {"a": {}}, tmp_path)
        assert (got["torch"][0], got["mkl"][0]) == (1, "1")
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)


def test_an_interrupt_leaves_what_is_finished_and_one_message(tmp_path):
    function = counting(tmp_path / "log")

    def interrupted(config, scratch):
        if config["x"] == 1 and not (tmp_path / "again").exists():
            raise KeyboardInterrupt
        return function(config, scratch)

    with pytest.raises(KeyboardInterrupt, match=r"1 of 3 units are finished in .*; the same call goes on from there"):
        serial(interrupted, UNITS, tmp_path / "run")
    assert "b.parquet" in names(tmp_path / "run")
    (tmp_path / "again").touch()
    assert len(serial(interrupted, UNITS, tmp_path / "run")) == 6
    assert executions(tmp_path / "log") == {1: 1, 2: 1, 3: 1}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"engine": "dask"}, "engine='dask' is not allowed; allowed: 'local', 'serial', 'ray'"),
     ({"workers": 0}, "workers=0 is not allowed; allowed: a whole number from 1, or None"),
     ({"workers": 2.0}, "workers=2.0"), ({"workers": 2}, "workers=2 is not allowed with engine='serial'"),
     ({"retries": -1}, "retries=-1 is not allowed; allowed: a whole number from 0"),
     ({"resources": {"num_gpus": 1}}, "are for engine='ray'"), ({"address": "auto"}, "are for engine='ray'"),
     ({"engine": "ray", "resources": {"gpus": 1}}, "allowed: a mapping with the keys num_cpus, num_gpus")],
)  # fmt: skip
def test_what_is_not_allowed_is_named_before_anything_runs(tmp_path, wrong, message):
    with pytest.raises(EngineError, match=message):
        run_units(counting(tmp_path / "log"), UNITS, tmp_path / "run", progress=False, **{"engine": "serial", **wrong})
    assert not (tmp_path / "run").exists() and not executions(tmp_path / "log")


def test_what_cannot_be_sent_is_refused_before_anything_runs(tmp_path):
    message = r"test_run_units.*lambda.* cannot be sent to another process .*; allowed:.* or engine='serial'"
    with (tmp_path / "open").open("w") as file, pytest.raises(EngineError, match=message):
        run_units(lambda config, scratch: pd.DataFrame({"x": [file.name]}), UNITS, tmp_path / "run", progress=False)
    with (tmp_path / "open").open("w") as file, pytest.raises(EngineError, match="has no JSON form"):
        run_units(counting(tmp_path / "log"), {"a": {"x": file}}, tmp_path / "run", progress=False)
    assert not (tmp_path / "run").exists()


def test_ray_missing_says_how_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(EngineError, match=r"engine='ray' needs Ray, .*pip install 'interp\[cluster\]'"):
        run_units(counting(tmp_path / "log"), UNITS, tmp_path / "run", engine="ray", progress=False)


def test_a_folder_is_worked_in_by_one_process_at_a_time(tmp_path):
    with claim(tmp_path), pytest.raises(EngineError, match="another process is running units in"):
        serial(counting(tmp_path / "log"), UNITS, tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(EngineError, match="is a file; allowed: a folder of results"):
        serial(counting(tmp_path / "log"), UNITS, tmp_path / "file")


def test_the_bar_counts_all_units_and_starts_at_the_finished_ones(tmp_path, capsys):
    function = counting(tmp_path / "log")
    run_units(function, {"a": {"x": 1}}, tmp_path / "run", engine="serial")
    run_units(function, UNITS, tmp_path / "run", engine="serial")
    assert "1/1" in (shown := capsys.readouterr().err) and "3/3" in shown and "33%" in shown


def test_the_package_imports_no_model_and_no_engine_before_it_is_asked_for():
    package = Path(interp.engines.__file__).parent
    for path in package.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            found = {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            found |= {node.module} if isinstance(node, ast.ImportFrom) and node.module else set()
            for name in found:
                root = name.split(".")[0]
                assert root not in ("torch", "tyro", "joblib", "ray"), (path, name)
                assert root != "interp" or name == "interp" or name.startswith("interp.engines"), (path, name)
    assert set(interp.engines.__all__) == {"run_units", "UnitsFailedError", "EngineError", "ENGINES"}
    assert ENGINES == ("local", "serial", "ray") and encode.__doc__


def test_the_page_on_units_runs(tmp_path, monkeypatch, capsys):
    text = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    programs = [part.partition("```")[0] for part in text.split("```python\n")[1:]]
    assert len(programs) == 3 and "num_gpus" in programs[2]  # which needs a cluster
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    for program in programs[:2]:
        exec(compile(program, "cluster.md", "exec"), names)
    assert "seed3" in (printed := capsys.readouterr().out) and "{'seed': 0} 1 " in printed
