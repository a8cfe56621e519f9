"""Units in this process, one after the other, or in processes of this machine with one thread each."""

from __future__ import annotations

import copy
import os
import re
import signal
import threading
import time
import traceback
import warnings
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from typing import Any

from interp.engines.work import THREAD_VARIABLES, Call, Died, Failed, Outcome, execute

_EXIT = re.compile(r"exit codes of the workers are \{(.*?)\}")


class Serial:
    """Runs each unit when its outcome is asked for: for debugging, or for one unit."""

    slots = 1

    def __init__(self, function: Any) -> None:
        self._function = function
        self._waiting: list[Call] = []

    def submit(self, call: Call) -> None:
        self._waiting.append(replace(call, config=copy.deepcopy(call.config)))  # a function may write into its own

    def next(self) -> tuple[str, Outcome]:
        call = self._waiting.pop(0)
        return call.unit, execute(self._function, call)

    def close(self, kill: bool = False) -> None:
        self._waiting.clear()


class Local:
    """joblib's loky, one pool of one process per worker: a process that dies takes no other unit with it."""

    def __init__(self, function: bytes, workers: int) -> None:
        self._function, self.slots = function, workers
        self._free: list[Any] = []
        self._running: dict[Future, tuple[str, Any]] = {}

    def submit(self, call: Call) -> None:
        executor = self._free.pop() if self._free else _start()
        self._running[executor.submit(execute, self._function, call)] = call.unit, executor

    def next(self) -> tuple[str, Outcome]:
        with warnings.catch_warnings():  # loky replaces a process that has grown; nothing is lost by it
            warnings.filterwarnings("ignore", "A worker stopped while some jobs", UserWarning)
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
        future = done.pop()
        unit, executor = self._running.pop(future)
        try:
            outcome = future.result()
        except BrokenProcessPool as error:
            executor.shutdown(wait=True, kill_workers=True)
            codes = _EXIT.search(str(error))
            return unit, Died(f"its process ended ({codes[1]})" if codes else "its process ended")
        except Exception as error:  # the call or its outcome could not be sent
            outcome = Failed(f"{type(error).__name__}: {error}", "".join(traceback.format_exception(error)))
        self._free.append(executor)
        return unit, outcome

    def close(self, kill: bool = False) -> None:
        executors = self._free + [executor for _, executor in self._running.values()]
        with ThreadPoolExecutor(max(1, len(executors))) as helpers:  # all at once: each takes a moment to end
            list(helpers.map(lambda executor: executor.shutdown(wait=True, kill_workers=kill), executors))
        self._free, self._running = [], {}


def _start() -> Any:
    from joblib.externals.loky import ProcessPoolExecutor

    env = dict.fromkeys(THREAD_VARIABLES, "1")  # before anything is imported there
    return ProcessPoolExecutor(max_workers=1, timeout=None, env=env, initializer=_begin, initargs=(os.getpid(),))


def _begin(parent: int) -> None:
    """A worker leaves Ctrl-C to its parent, and does not outlive it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)
