"""Units on a Ray cluster, or on a Ray of this machine; results come back to the process that asked for them."""

from __future__ import annotations

import logging
import os
import socket
import sys
import traceback
from collections.abc import Mapping
from typing import Any

from interp.engines.errors import EngineError
from interp.engines.work import Call, Died, Failed, Outcome, execute

RESOURCES = ("num_cpus", "num_gpus", "memory", "resources", "accelerator_type")
_ADDRESSES = (
    "None (the RAY_ADDRESS of the environment, or a Ray of its own on this machine), 'auto' or 'host:port' from a machine "
    "of the cluster, 'ray://host:10001' from outside (needs ray[client])"
)
_STORE = 256 * 2**20  # bytes for results on their way, of a Ray that we start
_LOG = logging.getLogger("interp.engines")


class Cluster:
    """One Ray task per attempt, never retried by Ray itself, so that every attempt is counted and reported.

    A Ray that this process is connected to already is used and left running.
    """

    def __init__(self, function: bytes, workers: int | None, resources: Mapping[str, Any], address: str | None) -> None:
        self._ray = import_ray()
        self._own = not self._ray.is_initialized()
        ours = self._own and _connect(self._ray, workers, resources, address)
        try:
            _warn_if_too_small(self._ray, resources, final=ours)
            self.slots = workers or sys.maxsize
            self._task = self._ray.remote(execute).options(max_retries=0, **resources)
            self._function = self._ray.put(function)  # once, however many units
        except BaseException as error:
            self.close()
            if isinstance(error, ValueError | TypeError) and not isinstance(error, EngineError):
                raise EngineError(f"resources={dict(resources)!r} is not allowed by Ray: {error}") from None
            raise
        self._running: dict[Any, str] = {}

    def submit(self, call: Call) -> None:
        self._running[self._task.remote(self._function, call)] = call.unit

    def next(self) -> tuple[str, Outcome]:
        raised = self._ray.exceptions
        (done, *_), _ = self._ray.wait(list(self._running), num_returns=1)
        unit = self._running.pop(done)
        try:
            return unit, self._ray.get(done)
        except (raised.RayTaskError, raised.RuntimeEnvSetupError, raised.TaskUnschedulableError) as error:
            line = str(error).strip().splitlines()[-1]
            return unit, Failed(line, "".join(traceback.format_exception(error)))
        except raised.RayError as error:  # the worker, its node or the way back
            return unit, Died(f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}")

    def close(self, kill: bool = False) -> None:
        for task in getattr(self, "_running", {}) if kill else ():
            self._ray.cancel(task, force=True)
        self._running = {}
        if self._own:
            self._ray.shutdown()


def import_ray() -> Any:
    """Ray. Raises EngineError that says how to install it."""
    try:
        import ray
        import ray.exceptions
    except ImportError:
        raise EngineError("engine='ray' needs Ray, which is not installed: pip install 'interp[cluster]'") from None
    return ray


def _connect(ray: Any, workers: int | None, resources: Mapping[str, Any], address: str | None) -> bool:
    """Connect to the address; whether that started a Ray of our own."""
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        cpus = None if workers is None else max(1, int(workers * resources.get("num_cpus", 1)))
        quiet |= {"num_cpus": cpus, "include_dashboard": False, "object_store_memory": _STORE}
    try:
        _knock(address)
        ray.init(address=address, **quiet)
    except (
        Exception
    ) as error:  # of many kinds: no cluster, another version, no client package, a machine too busy to start
        raise EngineError(f"address={address!r} cannot be reached ({type(error).__name__}: {error}); "
                          f"allowed: {_ADDRESSES}") from error  # fmt: skip
    return address == "local"


def _knock(address: str) -> None:
    """Raises OSError at once where nobody listens; Ray itself would try for minutes."""
    host, colon, port = address.removeprefix("ray://").partition("/")[0].rpartition(":")
    if colon and port.isdigit():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _warn_if_too_small(ray: Any, resources: Mapping[str, Any], final: bool) -> None:
    """Ray would wait for ever for a node that is large enough. Raises EngineError if none can ever come."""
    named = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    wanted = {named[key]: value for key, value in {"num_cpus": 1, **resources}.items() if key in named}
    wanted |= resources.get("resources") or {}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(all(node.get(key, 0) >= value for key, value in wanted.items()) for node in nodes):
        return
    have = "; ".join(str({key: node.get(key, 0) for key in wanted}) for node in nodes)
    if final:
        raise EngineError(f"a unit asks for {wanted}, and this machine's Ray has {have}")
    _LOG.warning("a unit asks for %s, and no node has that now (nodes: %s); waiting for one", wanted, have)
