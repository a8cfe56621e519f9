"""A task draws its batch on the default device and nowhere else.

The device "meta" computes nothing but shapes and refuses to be mixed with another, so what runs there never leaves it: no
table left on the CPU, no number read back, which a GPU would have to wait for.
"""

from __future__ import annotations

import sys

import pytest
import torch

from interp.tasks import TASKS, Language, as_task
from interp.tasks.task import drawn_on


@pytest.fixture
def no_random_numbers(monkeypatch):
    """A generator of the meta device does not exist; without one its random tensors have shapes all the same."""
    for name, module in list(sys.modules.items()):
        if name.startswith("interp.tasks") and hasattr(module, "stream"):
            monkeypatch.setattr(module, "stream", lambda seed, step: None)


@pytest.mark.parametrize("name", [name for name in TASKS if not name.startswith("language")])
def test_a_batch_never_leaves_the_device(name, no_random_numbers):
    check(as_task(name))


def test_a_batch_of_text_never_leaves_the_device(no_random_numbers, tmp_path, monkeypatch):
    monkeypatch.setenv("INTERP_CACHE", str(tmp_path))
    check(Language(limit=500_000))


def check(task):
    here = task.batch(0, 8, 0)
    there = drawn_on(torch.device("meta"), task, 0, 8, 0)
    assert there.inputs.tokens.shape == here.inputs.tokens.shape and there.inputs.roles == {}
    for tensor in (there.inputs.tokens, there.positions, there.targets, there.inputs.mask, there.inputs.source):
        assert tensor is None or tensor.device.type == "meta"
    assert task.batch(0, 8, 0).inputs.tokens.device.type == "cpu"
