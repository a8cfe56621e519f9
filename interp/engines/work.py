"""What happens where a unit runs: limit the threads, call the function, turn its table into a file's bytes."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from interp import record
from interp.engines.errors import EngineError
from interp.engines.results import check_table, encode

THREAD_VARIABLES = (
    "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "VECLIB_MAXIMUM_THREADS", "NUMEXPR_NUM_THREADS"
)  # fmt: skip


@dataclass(frozen=True)
class Call:
    """One attempt at a unit; the config is packed if it goes to another process."""

    unit: str
    config: Any
    scratch: Path
    threads: int
    about: dict[str, Any]
    travels: bool = False  # to a machine that may not share the folder: then the worker also tidies up


@dataclass(frozen=True)
class Finished:
    """The result file's bytes."""

    data: bytes


@dataclass(frozen=True)
class Failed:
    """The function raised: the last line, and the whole traceback."""

    line: str
    text: str


@dataclass(frozen=True)
class Died:
    """The process ended under the unit; another attempt may succeed."""

    reason: str


Outcome = Finished | Failed | Died


class Pool(Protocol):
    """Where calls run: at most `slots` at a time."""

    slots: int

    def submit(self, call: Call) -> None:
        """Start a call, without waiting for it."""
        ...

    def next(self) -> tuple[str, Outcome]:
        """Wait for any running call; the unit's name and how it ended."""
        ...

    def close(self, kill: bool = False) -> None:
        """Let the workers go; `kill` ends what still runs."""
        ...


def pack(thing: Any, what: str) -> bytes:
    """A function or config as bytes, lambdas and notebook functions included. Raises EngineError."""
    from joblib.externals.loky.backend.reduction import dumps

    try:
        return bytes(dumps(thing))
    except Exception as error:  # whatever a __reduce__ raises
        raise EngineError(
            f"{what} cannot be sent to another process ({type(error).__name__}: {error}); allowed: functions and values that "
            "hold no open files, locks, threads or generators, or engine='serial'"
        ) from None


def execute(function: Any, call: Call) -> Finished | Failed:
    """Run one call here. Exceptions become `Failed`, so that only the end of the process looks like one."""
    began = time.time()
    try:
        with limited_threads(call.threads):
            function, config = _unpack(function), _unpack(call.config)
            _limit_torch(call.threads)  # which unpacking may have imported
            scratch = _scratch(call)
            table = check_table(function(config, scratch), call.about["function"])
        here = {"host": socket.gethostname(), "pid": os.getpid(), "seconds": round(time.time() - began, 3)}
        data = encode(table, record.provenance(started=began, **{**here, **call.about}))
        if call.travels:
            shutil.rmtree(scratch.parent, ignore_errors=True)
    except (Exception, SystemExit) as error:
        first = (str(error).splitlines() or [""])[0]
        return Failed(f"{type(error).__name__}: {first}", traceback.format_exc())
    return Finished(data)


@contextmanager
def limited_threads(threads: int) -> Iterator[None]:
    """The thread counts that sums depend on: of torch, and of libraries that the function imports. Restored after."""
    before = {name: os.environ.get(name) for name in THREAD_VARIABLES}
    torch = sys.modules.get("torch")
    had = torch.get_num_threads() if torch else None
    os.environ.update(dict.fromkeys(THREAD_VARIABLES, str(threads)))
    _limit_torch(threads)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if torch and had is not None:
            torch.set_num_threads(had)


def _limit_torch(threads: int) -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.get_num_threads() != threads:
        torch.set_num_threads(threads)


def _unpack(thing: Any) -> Any:
    if not isinstance(thing, bytes):
        return thing
    from joblib.externals.loky.backend.reduction import loads

    return loads(thing)


def _scratch(call: Call) -> Path:
    """The unit's folder; on a machine where the run's folder cannot be made, one in the temporary folder."""
    try:
        call.scratch.mkdir(parents=True, exist_ok=True)
        return call.scratch
    except OSError:
        if not call.travels:
            raise
    other = Path(tempfile.gettempdir(), "interp-scratch", *call.scratch.parts[-3:])
    other.mkdir(parents=True, exist_ok=True)
    return other
