"""Functions to run as units: each leaves a line per execution in a file, so that a test can count them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pyarrow.parquet as pq

from interp.engines import run_units

SCRIPT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a program in the background is born deaf to Ctrl-C
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from engine_units import counting
from interp.engines import run_units
units = {"first": {"x": 1}, **{f"u{x}": {"x": x, "do": "wait"} for x in range(2, 6)}}
print(len(run_units(counting(Path(sys.argv[2])), units, sys.argv[3], engine=sys.argv[4], workers=2)))
"""


def counting(log: Path, seconds: float = 0.0):
    """A function of (config, scratch) that writes down that it began, then does what config["do"] says.

    "square": a table of the square. "raise": an error. "die": kill -9 of itself. "die once": that, the first time only.
    "wait": sleep until the file `log / "go"` is there. Its closure holds all it needs, so that it is sent by value.
    """
    log.mkdir(parents=True, exist_ok=True)

    def function(config, scratch):
        import os
        import signal
        import sys
        import time

        import pandas as pd

        do, x = config.get("do", "square"), config["x"]
        ray = sys.modules.get("ray")
        node = ray.get_runtime_context().get_node_id() if ray and ray.is_initialized() else ""
        with (log / f"unit{x}.began").open("a") as file:
            file.write(f"{os.getpid()} {node}\n")
        first = not (scratch / "seen").exists()
        (scratch / "seen").touch()
        if do == "raise":
            raise RuntimeError(f"x = {x} is wrong\nsecond line")
        if do == "die" or (do == "die once" and first):
            os.kill(os.getpid(), signal.SIGKILL)
        if do == "wait":
            deadline = time.monotonic() + 60
            while not (log / "go").exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        time.sleep(seconds)
        return pd.DataFrame({"x": [x, x], "square": [x * x, x * x], "part": ["a", "b"]})

    return function


def executions(log: Path) -> Counter:
    """How often each unit began, by its x."""
    return Counter({int(path.stem[4:]): len(path.read_text().splitlines()) for path in log.glob("unit*.began")})


def began(log: Path, x: int) -> list[tuple[int, str]]:
    """(process, node) of each execution of one unit."""
    path = log / f"unit{x}.began"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(int(pid), *node) if node else (int(pid), "") for pid, *node in map(str.split, lines)]


def about(folder: Path, unit: str) -> dict:
    """What a unit's result file says about itself."""
    return json.loads(pq.read_schema(folder / f"{unit}.parquet").metadata[b"interp_unit"])


def start(tmp_path: Path, engine: str = "local") -> subprocess.Popen:
    """A run in a process of its own; returns when its first unit is finished and two others are running."""
    arguments = [str(Path(__file__).parent), str(tmp_path / "log"), str(tmp_path / "run"), engine]
    first = tmp_path / "run" / "first.parquet"
    process = subprocess.Popen([sys.executable, "-c", SCRIPT, *arguments], stderr=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: process.poll() is not None or (first.exists() and len(executions(tmp_path / "log")) == 3))
        assert process.poll() is None, process.communicate()[1]
    except AssertionError:
        process.kill()
        process.communicate()
        raise
    return process


def wait_for(condition, seconds: float = 300) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.02)


def gone(pid: int) -> bool:
    """Whether a process has ended (a zombie has: whoever started it has not asked yet)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def workers_of(log: Path) -> set[int]:
    return {pid for x in executions(log) for pid, _ in began(log, x)}


def finish(tmp_path: Path) -> None:
    """The same call again runs what was not finished, and only that."""
    (tmp_path / "log" / "go").touch()
    units = {"first": {"x": 1}, **{f"u{x}": {"x": x, "do": "wait"} for x in range(2, 6)}}
    assert len(run_units(counting(tmp_path / "log"), units, tmp_path / "run", engine="serial", progress=False)) == 10
    assert executions(tmp_path / "log") == {1: 1, 2: 2, 3: 2, 4: 1, 5: 1}


def when(condition, action) -> threading.Thread:
    """Does something in the middle of a run: as soon as the condition holds."""

    def watch():
        deadline = time.monotonic() + 60
        while not condition() and time.monotonic() < deadline:
            time.sleep(0.02)
        action()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    return thread
