"""A Ray cluster of two nodes on this machine: both are used, and neither a dead worker nor a lost node costs a result."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile

import pandas as pd
import pytest
from engine_units import about, began, counting, executions, finish, gone, start, wait_for, when, workers_of

from interp.engines import EngineError, UnitsFailedError, run_units

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.filterwarnings("ignore::FutureWarning:ray"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:ray"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]


class TwoNodes:
    """A head and a worker node with one CPU each."""

    def __init__(self, folder: str) -> None:
        from ray.cluster_utils import Cluster

        self.settings = {
            "num_cpus": 1, "object_store_memory": 80 * 2**20, "include_dashboard": False,
            "no_monitor": True, "include_log_monitor": False,  # fewer processes: a node must start within 15 seconds
        }  # fmt: skip
        self.cluster = Cluster(initialize_head=True, head_node_args={**self.settings, "temp_dir": folder})
        self.head, self.second = self.cluster.head_node, None
        self.need_second()

    def need_second(self) -> None:
        if self.second is None:
            self.second = self.cluster.add_node(**self.settings)
        self.cluster.wait_for_nodes()

    def lose_second(self) -> None:
        second, self.second = self.second, None
        self.cluster.remove_node(second, allow_graceful=False)

    @property
    def address(self) -> str:
        return self.cluster.address


@pytest.fixture(scope="module")
def nodes():
    pytest.importorskip("ray")
    patch = pytest.MonkeyPatch()
    patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    patch.setenv("RAY_AUTH_MODE", "disabled")  # writes no token into the home folder
    patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    patch.setenv("RAY_health_check_period_ms", "500")
    folder = tempfile.mkdtemp(prefix="ray-", dir="/tmp")  # short: the sockets in it may have 107 characters
    two = TwoNodes(folder)
    yield two
    two.cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)
    patch.undo()


def on_ray(function, units, folder, nodes, **more) -> pd.DataFrame:
    return run_units(function, units, folder, engine="ray", address=nodes.address, progress=False, **more)


def test_both_nodes_work_and_the_table_is_that_of_one_process(tmp_path, nodes):
    nodes.need_second()
    units = {f"u{x}": {"x": x} for x in range(8)}
    table = on_ray(counting(tmp_path / "log", seconds=0.3), units, tmp_path / "run", nodes)
    assert len({node for x in range(8) for _, node in began(tmp_path / "log", x)}) == 2
    assert executions(tmp_path / "log") == dict.fromkeys(range(8), 1)
    pd.testing.assert_frame_equal(
        table, run_units(counting(tmp_path / "again"), units, tmp_path / "here", engine="serial", progress=False)
    )
    told = about(tmp_path / "run", "u0")
    assert told["engine"] == "ray" and told["pid"] != os.getpid() and told["machine"]["threads"] == 1
    assert not list((tmp_path / "run").glob("*.scratch"))


def test_a_killed_worker_costs_its_unit_an_attempt_and_nothing_else(tmp_path, nodes, caplog):
    nodes.need_second()
    log, folder = tmp_path / "log", tmp_path / "run"
    units = {"victim": {"x": 0, "do": "wait"}, **{f"u{x}": {"x": x} for x in range(1, 6)}}

    def kill():
        os.kill(began(log, 0)[0][0], signal.SIGKILL)
        (log / "go").touch()

    killer = when(lambda: began(log, 0) and executions(log)[3], kill)
    table = on_ray(counting(log, seconds=0.1), units, folder, nodes)
    killer.join()
    assert executions(log) == {0: 2, 1: 1, 2: 1, 3: 1, 4: 1, 5: 1} and len(table) == 12
    assert about(folder, "victim")["attempts"] == 2 and about(folder, "u5")["attempts"] == 1
    assert "unit 'victim', attempt 1 of 3: WorkerCrashedError" in caplog.text


def test_a_lost_node_costs_its_unit_an_attempt_and_nothing_else(tmp_path, nodes, caplog):
    nodes.need_second()
    log, folder = tmp_path / "log", tmp_path / "run"
    lost = nodes.second.node_id
    units = {f"u{x}": {"x": x, "do": "wait"} for x in range(6)}

    def lose():
        nodes.lose_second()
        (log / "go").touch()

    loser = when(lambda: len(executions(log)) == 2, lose)
    table = on_ray(counting(log), units, folder, nodes)
    loser.join()
    (hit,) = [x for x in range(6) if any(node == lost for _, node in began(log, x))]
    assert executions(log) == {x: 2 if x == hit else 1 for x in range(6)} and len(table) == 12
    assert {x: about(folder, f"u{x}")["attempts"] for x in range(6)} == {x: 2 if x == hit else 1 for x in range(6)}
    assert f"unit 'u{hit}', attempt 1 of 3: " in caplog.text


def test_exceptions_and_hopeless_units_are_named_and_the_others_finished(tmp_path, nodes):
    log = tmp_path / "log"
    units = {"wrong": {"x": 1, "do": "raise"}, "dies": {"x": 2, "do": "die"}, "fine": {"x": 3}}
    with pytest.raises(UnitsFailedError, match="2 of 3 units failed") as caught:
        on_ray(counting(log), units, tmp_path / "run", nodes, retries=1)
    assert caught.value.failures["wrong"] == "RuntimeError: x = 1 is wrong"
    assert "no attempt of 2 survived" in caught.value.failures["dies"]
    assert executions(log) == {1: 1, 2: 2, 3: 1} and (tmp_path / "run" / "fine.parquet").exists()


def test_an_address_that_is_none_is_refused(tmp_path):
    with pytest.raises(EngineError, match=r"address='127.0.0.1:1' cannot be reached .*; allowed: None"):
        run_units(counting(tmp_path / "log"), {"a": {"x": 1}}, tmp_path / "run", engine="ray", address="127.0.0.1:1")


def test_ctrl_c_leaves_what_is_finished_one_message_and_no_process(tmp_path, nodes, monkeypatch):
    nodes.need_second()
    monkeypatch.setenv("RAY_ADDRESS", nodes.address)
    process = start(tmp_path, "ray")
    pids = workers_of(tmp_path / "log")
    process.send_signal(signal.SIGINT)
    _, shown = process.communicate(timeout=60)
    assert process.returncode != 0 and "KeyboardInterrupt: 1 of 5 units are finished in " in shown
    wait_for(lambda: all(gone(pid) for pid in pids), 20)
    finish(tmp_path)


def test_without_an_address_it_starts_a_ray_of_its_own_and_ends_it(tmp_path, nodes, monkeypatch):
    import ray

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    function, units = counting(tmp_path / "log"), {"a": {"x": 1}, "b": {"x": 2}}
    try:
        table = run_units(function, units, tmp_path / "run", engine="ray", workers=1, progress=False)
    except EngineError as error:
        if "timed out during startup" not in str(error):
            raise
        pytest.skip("this machine is too busy for Ray's own limit of 15 seconds")
    assert len(table) == 4 and not ray.is_initialized()


def test_a_ray_that_is_connected_already_is_used_and_left(tmp_path, nodes):
    import ray

    ray.init(address=nodes.address, log_to_driver=False)
    try:
        function, units = counting(tmp_path / "log"), {"a": {"x": 1}, "b": {"x": 2}}
        table = run_units(function, units, tmp_path / "run", engine="ray", workers=1, progress=False)
        assert len(table) == 4 and ray.is_initialized()
        with pytest.raises(EngineError, match="is not allowed by Ray"):
            run_units(function, units, tmp_path / "x", engine="ray", resources={"num_cpus": -1}, progress=False)
    finally:
        ray.shutdown()
