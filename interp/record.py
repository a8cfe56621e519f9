"""Result folders: tables, figures and where they came from; never overwritten, each file whole or absent."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pandas as pd

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

VERSIONED = ("interp", "torch", "numpy", "pandas", "scipy", "transformers", "transformer-lens", "matplotlib")


def cache_folder() -> Path:
    """$INTERP_CACHE, else $XDG_CACHE_HOME/interp, else ~/.cache/interp."""
    if os.environ.get("INTERP_CACHE"):
        return Path(os.environ["INTERP_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "interp"


def write_atomic(path: str | Path, write: Callable[[Path], Any]) -> Path:
    """Call `write` on a temporary name beside `path`, then rename: the file is whole or absent."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.stem}.", suffix=path.suffix, dir=path.parent)
    os.close(handle)
    try:
        write(Path(name))
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
    return path


def new_folder(folder: str | Path, fill: Callable[[Path], Any]) -> Path:
    """Call `fill` on a temporary folder beside `folder`, then rename: the folder is whole or absent. It must not be there yet."""
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        fill(temporary)
        temporary.chmod(0o755)
        temporary.rename(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def hold(folder: Path) -> Callable[[], None]:
    """Make the folder and hold it for this process until the returned function is called or the process ends, however it ends.

    Raises BlockingIOError while another process holds it, NotADirectoryError where it is a file or lies below one. Windows and
    file systems without such locks (some network ones) keep nobody out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise NotADirectoryError(f"{folder} is a file") from None
    if fcntl is None:
        return lambda: None
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise
    except OSError:
        pass
    return lambda: os.close(handle)


def write_text(path: str | Path, text: str) -> Path:
    """A text file, whole or absent."""
    return write_atomic(path, lambda temporary: temporary.write_text(text, encoding="utf-8"))


def write_json(path: str | Path, value: Any) -> Path:
    """A JSON file, whole or absent."""
    return write_text(path, json.dumps(value, indent=1, default=str) + "\n")


def write_table(path: str | Path, table: pd.DataFrame) -> Path:
    """A parquet file, whole or absent."""
    return write_atomic(path, lambda temporary: table.to_parquet(temporary, index=False))


def provenance(config: Any = None, seed: Any = None, started: float | None = None, **more: Any) -> dict[str, Any]:
    """Commit, uncommitted files, command, config, seeds, versions, device, threads, time (seconds since `started`)."""
    torch = sys.modules.get("torch")  # whoever measured something has imported it; this file need not
    machine = {"python": platform.python_version(), "platform": platform.platform(), "cpus": os.cpu_count()}
    if torch is not None:
        machine["threads"] = torch.get_num_threads()
        machine["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted": _git("status", "--porcelain").splitlines(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "config": config,
        "seed": seed,
        "versions": {name: _version(name) for name in VERSIONED if _version(name)},
        "machine": machine,
        "finished": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "seconds": None if started is None else round(time.time() - started, 1),
        **more,
    }


def save(
    folder: str | Path,
    tables: Mapping[str, pd.DataFrame],
    figures: Mapping[str, Any] | None = None,
    **about: Any,
) -> Path:
    """A new result folder: `<name>.parquet` per table, `<name>.png` per figure, provenance.json. FileExistsError if taken.

    figures: matplotlib figures (anything with `savefig`). about: keywords of `provenance`.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} holds results already; results are never overwritten, choose a new folder")
    for name, table in tables.items():
        write_table(folder / f"{name}.parquet", table)
    for name, figure in (figures or {}).items():
        write_atomic(folder / f"{name}.png", lambda temporary, figure=figure: figure.savefig(temporary, dpi=150))
    rows = {name: len(table) for name, table in tables.items()}
    write_json(folder / "provenance.json", provenance(**about, rows=rows))
    return folder


def _git(*words: str) -> str:
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", *words], cwd=here, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
