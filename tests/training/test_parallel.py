"""Two processes started as torchrun starts them train the model that one process trains."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from interp import load
from interp.tasks import ToyFacts
from interp.tasks.train_config import TrainConfig
from interp.training import train

PROGRAM = """
import sys, torch
torch.set_num_threads(1)
from interp import Transformer
from interp.tasks import ToyFacts, Rewriting
from interp.tasks.train_config import TrainConfig
from interp.training import train, TrainingFolderError
folder, stop = sys.argv[1], int(sys.argv[2])
config = TrainConfig(steps=12, batch_size=15, evaluate_every=6, checkpoint_every=4, learning_rate=5e-3, keep=2)
task = Rewriting("copy", n_symbols=8, shortest=2, longest=6)  # padded: the processes' shares ask for different numbers of tokens
original = Rewriting.batch
if stop:
    def batch(self, step, size, seed):
        if step == stop:
            raise SystemExit(3)
        return original(self, step, size, seed)
    Rewriting.batch = batch
model = Transformer(task.model_config(n_layers=1, d_model=16, n_heads=2), seed=0).double()
try:
    result = train(model, task, config, folder, resume=stop == 0 and len(sys.argv) > 3, progress=False)
except TrainingFolderError as error:
    sys.exit(f"refused: {error}")
print(result.success, len(result.curves), torch.distributed.is_initialized())
"""


def launch(path, *words, processes=2):
    command = (
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes > 1 else []
    )
    return subprocess.run(
        [sys.executable, *command, str(path), *words], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow  # seven processes that import torch
def test_two_processes_equal_one_and_go_on_after_a_stop(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    alone = launch(path, str(tmp_path / "alone"), "0", processes=1)
    assert alone.stdout.split() == ["False", "2", "False"], alone.stderr
    stopped = launch(path, str(tmp_path / "two"), "10")
    assert stopped.returncode and not (tmp_path / "two" / "model").exists()
    refused = launch(path, str(tmp_path / "two"), "0")
    assert "resume it" in refused.stderr
    two = launch(path, str(tmp_path / "two"), "0", "resume")
    assert two.stdout.split() == ["False", "2", "True"] * 2, two.stderr
    a, b = (load(tmp_path / name / "model") for name in ("alone", "two"))
    assert a.dtype == torch.float64
    assert max(float((x - y).detach().abs().max()) for x, y in zip(a.parameters(), b.parameters(), strict=True)) < 1e-10
    assert sorted(path.name for path in (tmp_path / "two" / "steps").iterdir()) == ["000000", "000001", "000012"]


def test_one_process_needs_no_group():
    task = ToyFacts(8)
    config = TrainConfig(steps=2, batch_size=8)
    train(task.model_config(d_model=16, n_heads=2), task, config, progress=False)
    assert not torch.distributed.is_initialized()
