"""On a GPU: the same numbers up to rounding, and training there. Skipped without one."""

from __future__ import annotations

import pytest
import torch

from interp import Replace, TrainConfig, generate, logit_difference, patch_sweep, run
from interp.tasks import ToyFacts, replacement_pairs
from interp.training import train

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_forward_changes_generation_and_sweeps_equal_the_cpu(shipped):
    import copy

    model, task = shipped
    there = copy.deepcopy(model).cuda()
    pairs = replacement_pairs(task.splits["held_out"].select(range(32)))
    here, gone = (run(m, pairs.clean, record="z", change=Replace("0.z", 0.0, at=(1, 2))) for m in (model, there))
    assert torch.allclose(here.logits, gone.logits.cpu(), atol=1e-3)
    assert gone.cache["1.z"].device.type == "cuda"
    assert torch.equal(
        generate(model, pairs.clean.tokens, 2).tokens, generate(there, pairs.clean.tokens, 2).tokens.cpu()
    )
    metric = logit_difference(pairs.correct, pairs.wrong)
    a, b = (patch_sweep(m, pairs.clean, pairs.corrupted, metric, "ffn_out", ("layer", "role")) for m in (model, there))
    assert torch.allclose(a.effect()["ffn_out"], b.effect()["ffn_out"].cpu(), atol=1e-3)


def test_training_on_the_gpu_learns():
    task = ToyFacts(16)
    config = TrainConfig(steps=300, batch_size=32, learning_rate=5e-3)
    result = train(task.model_config(d_model=32, n_heads=2), task, config, device="cuda", progress=False)
    assert result.curves["accuracy"].max() == 1.0


def test_bfloat16_is_close(shipped):
    import copy

    model, task = shipped
    inputs = task.splits["held_out"].inputs.select(slice(0, 64))
    half = copy.deepcopy(model).to("cuda", torch.bfloat16)
    assert (run(half, inputs).logits.argmax(-1).cpu() == run(model, inputs).logits.argmax(-1)).float().mean() > 0.95
