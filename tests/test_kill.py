"""kill -9 at random moments of a training and of a sweep: every rerun ends with the undisturbed result, bit for bit."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

import pytest

TRAIN = ["train", "facts", "--task.n-subjects", "32", "--model.d-model", "32", "--steps", "150", "--batch-size", "64",
         "--checkpoint-every", "10", "--evaluate-every", "50", "--keep", "4", "--threads", "1"]  # fmt: skip
SWEEP = [
    "sweep",
    "shipped",
    "--pairs",
    "96",
    "--sites",
    "ffn_act",
    "--by",
    "layer",
    "position",
    "neuron",
    "--threads",
    "1",
]


def command(words, folder):
    return [sys.executable, "-m", "interp", *words, "--folder", str(folder)]


def killed_until_done(words, folder, again, whole_seconds, kills, seed):
    """Runs the command, killing it `kills` times at random moments, then to its end; returns how often it was killed."""
    rng, done = random.Random(seed), 0
    for i in range(kills):
        process = subprocess.Popen([*command(words, folder), *(again if i else [])],
                                   stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # fmt: skip
        time.sleep(rng.uniform(0.2, 1.0) * whole_seconds)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            done += 1
        process.wait()
        if process.returncode == 0 or (folder / "index.html").exists():  # the page is written last: it had finished
            return done
    subprocess.run([*command(words, folder), *again], check=True, capture_output=True)
    return done


def same(a, b, names):
    for name in names:
        assert (a / name).read_bytes() == (b / name).read_bytes(), name


@pytest.mark.slow
def test_a_training_killed_ten_times(tmp_path):
    start = time.monotonic()
    subprocess.run(command(TRAIN, tmp_path / "whole"), check=True, capture_output=True)
    seconds, kills, run = time.monotonic() - start, 0, 0
    kept = sorted(path.name for path in (tmp_path / "whole" / "steps").iterdir())
    while kills < 10:
        run += 1
        folder = tmp_path / f"cut{run}"
        kills += killed_until_done(TRAIN, folder, ["--resume"], seconds, 10 - kills, run)
        names = ["model/weights.safetensors", *(f"steps/{step}/weights.safetensors" for step in kept)]
        same(tmp_path / "whole", folder, names)
        assert sorted(path.name for path in folder.iterdir() if not path.name.startswith(".")) == sorted(
            path.name for path in (tmp_path / "whole").iterdir()
        )


@pytest.mark.slow
def test_a_sweep_killed_ten_times(tmp_path):
    start = time.monotonic()
    subprocess.run(command(SWEEP, tmp_path / "whole"), check=True, capture_output=True)
    seconds, kills, run = time.monotonic() - start, 0, 0
    while kills < 10:
        run += 1
        folder = tmp_path / f"cut{run}"
        kills += killed_until_done(SWEEP, folder, [], seconds, 10 - kills, run)
        same(tmp_path / "whole", folder, ["values.safetensors", "effect.csv"])
