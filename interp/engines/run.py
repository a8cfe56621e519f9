"""`run_units`: many independent units on one machine or many, each finished once."""

from __future__ import annotations

import logging
import os
import socket
from collections import Counter, deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from interp import record
from interp.engines.cluster import RESOURCES, Cluster, import_ray
from interp.engines.errors import EngineError, UnitsFailedError
from interp.engines.local import Local, Serial
from interp.engines.results import claim, error_path, is_finished, read_tables, scratch_path, write
from interp.engines.units import Unit, make_units
from interp.engines.work import Call, Died, Failed, Pool, pack

ENGINES = ("local", "serial", "ray")
_LOG = logging.getLogger("interp.engines")


def run_units(
    function: Callable[[Any, Path], pd.DataFrame],
    units: Mapping[str, Any],
    folder: str | Path,
    engine: str = "local",
    workers: int | None = None,
    retries: int = 2,
    progress: bool = True,
    resources: Mapping[str, Any] | None = None,
    address: str | None = None,
) -> pd.DataFrame:
    """Call `function(config, scratch)` once per unit and return all tables below each other, first column `unit`.

    units: name -> config, a mapping of JSON values or a dataclass of them; the function gets it as given.
    scratch: a folder of the unit's own for checkpoints, the same at the next attempt, removed when the unit is finished
    (with "ray" it is on the machine of the worker, and shared only if `folder` is).
    folder: `<unit>.parquet` per finished unit, whole or absent, its config, attempts, seconds, host and provenance in the
    file's metadata (key interp_unit). The same call later skips what is finished and runs the rest.
    engine: "local" (processes of one thread), "serial" (this process) or "ray".
    workers: how many units at a time; None is one per CPU, with "ray" as many as fit.
    retries: how often a unit is tried again after its process died. An exception is not tried again: it is kept in
    `<unit>.error.txt`, the other units go on, and UnitsFailedError at the end names it.
    resources, address: for "ray", e.g. {"num_cpus": 1, "num_gpus": 0.25} per unit (threads: num_cpus), "auto".
    Raises EngineError (what is not allowed, or a folder with another config), UnitsFailedError. It cannot see that the
    function's code, or data that it reads, has changed: use a new folder then.
    """
    planned = make_units(function, units)
    _check(engine, workers, retries, resources, address)
    folder = Path(folder).resolve()
    sent: Any = function if engine == "serial" else pack(function, planned[0].function)
    configs = {unit.name: unit.config if engine == "serial" else pack(unit.config, f"the config of unit {unit.name!r}")
               for unit in planned}  # fmt: skip
    with claim(folder):
        todo = [unit for unit in planned if not is_finished(folder, unit)]
        bar = tqdm(
            total=len(planned), initial=len(planned) - len(todo), disable=not progress, desc=folder.name, unit="unit"
        )
        with bar:
            failures: dict[str, str] = {}
            if todo:
                threads = max(1, int((resources or {}).get("num_cpus", 1)))
                run = _Run(folder, engine, threads, retries, bar)
                failures = run.work(_open(engine, sent, workers, resources or {}, address, len(todo)), todo, configs)
    if failures:
        raise UnitsFailedError(folder, failures, len(planned))
    return read_tables(folder, planned)


class _Run:
    """One pass over the unfinished units of a folder."""

    def __init__(self, folder: Path, engine: str, threads: int, retries: int, bar: Any) -> None:
        self.folder, self.engine, self.threads = folder, engine, threads
        self.retries, self.bar = retries, bar
        self.done = bar.n  # a bar that is not shown does not count
        here = record.provenance()
        self.driver = {"host": socket.gethostname(), "pid": os.getpid(), "commit": here["commit"]}
        self.command = here["command"]

    def work(self, pool: Pool, todo: list[Unit], configs: dict[str, Any]) -> dict[str, str]:
        """Run them all; the failed ones with their last error line. Finished units are on disk at any moment."""
        try:
            failures = self._loop(pool, {unit.name: unit for unit in todo}, configs)
        except KeyboardInterrupt:
            pool.close(kill=True)
            raise KeyboardInterrupt(
                f"{self.done} of {self.bar.total} units are finished in {self.folder}, the workers are stopped; the same "
                "call goes on from there"
            ) from None
        except BaseException:
            pool.close(kill=True)
            raise
        pool.close()
        return failures

    def _loop(self, pool: Pool, units: dict[str, Unit], configs: dict[str, Any]) -> dict[str, str]:
        queue, attempts, running, failures = deque(units), Counter(), 0, {}
        while queue or running:
            while queue and running < pool.slots:
                name = queue.popleft()
                attempts[name] += 1
                pool.submit(self._call(units[name], configs[name], attempts[name]))
                running += 1
            name, outcome = pool.next()
            running -= 1
            if isinstance(outcome, Died) and attempts[name] <= self.retries:
                self._say(
                    f"unit {name!r}, attempt {attempts[name]} of {self.retries + 1}: {outcome.reason}; trying again"
                )
                queue.append(name)
                continue
            if isinstance(outcome, Died):
                line = f"no attempt of {attempts[name]} survived; the last: {outcome.reason}"
                outcome = Failed(line, line + "\n")
            if isinstance(outcome, Failed):
                failures[name] = outcome.line
                record.write_text(error_path(self.folder, name), outcome.text)
                self._say(f"unit {name!r} failed: {outcome.line}")
            else:
                write(self.folder, units[name], outcome.data)
                self.done += 1
            self.bar.update()
        return failures

    def _call(self, unit: Unit, config: Any, attempt: int) -> Call:
        about = {"unit": unit.name, "config": unit.document, "function": unit.function, "attempts": attempt,
                 "engine": self.engine, "command": self.command, "driver": self.driver}  # fmt: skip
        scratch = scratch_path(self.folder, unit)
        return Call(unit.name, config, scratch, self.threads, about, travels=self.engine == "ray")

    def _say(self, line: str) -> None:
        with tqdm.external_write_mode():
            _LOG.warning(line)


def _open(
    engine: str, function: Any, workers: int | None, resources: Mapping[str, Any], address: str | None, most: int
) -> Pool:
    if engine == "serial":
        return Serial(function)
    if engine == "ray":
        return Cluster(function, workers, resources, address)
    import joblib

    return Local(function, min(workers or joblib.cpu_count(), most))


def _check(engine: Any, workers: Any, retries: Any, resources: Any, address: Any) -> None:
    if engine not in ENGINES:
        raise EngineError(f"engine={engine!r} is not allowed; allowed: {', '.join(map(repr, ENGINES))}")
    if workers is not None and (type(workers) is not int or workers < 1):
        raise EngineError(f"workers={workers!r} is not allowed; allowed: a whole number from 1, or None")
    if type(retries) is not int or retries < 0:
        raise EngineError(f"retries={retries!r} is not allowed; allowed: a whole number from 0")
    if engine == "serial" and workers not in (None, 1):
        raise EngineError(
            f"workers={workers} is not allowed with engine='serial', which is this process; allowed: None, 1"
        )
    if engine != "ray" and (resources or address is not None):
        raise EngineError(f"resources={resources!r}, address={address!r} are for engine='ray'; with engine={engine!r} a unit "
                          "has one thread of this machine; allowed: None")  # fmt: skip
    if not isinstance(resources or {}, Mapping) or set(resources or {}) - set(RESOURCES):
        raise EngineError(
            f"resources={resources!r} is not allowed; allowed: a mapping with the keys {', '.join(RESOURCES)}"
        )
    if engine == "ray":
        import_ray()
