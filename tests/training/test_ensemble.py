"""An ensemble's members are the models trained alone, whatever the kind of model, and leave one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from interp import Transformer
from interp.tasks import TASKS, Rewriting, ToyFacts
from interp.tasks.train_config import TrainConfig
from interp.training.ensemble import Ensemble, EnsembleError, stacked
from interp.training.optimizer import make_optimizer
from interp.training.train import Loss, train_step

TASK = ToyFacts(16)
SMALL = {"n_layers": 1, "d_model": 16, "n_heads": 2}
BASE = TrainConfig(steps=50, batch_size=16, learning_rate=3e-3, weight_decay=0.3)
MEMBERS = [
    BASE,
    replace(BASE, seed=1, learning_rate=1e-2, clip=0.05, warmup=0.5),
    replace(BASE, seed=2, weight_decay=0.0, schedule="constant", data_seed=7),
]


def models(task, dtype=torch.float64, **sizes):
    return [Transformer(task.model_config(**{**SMALL, **sizes}), seed=config.seed).to(dtype) for config in MEMBERS]


def trained_alone(model, task, config, steps):
    """The ordinary loop's steps."""
    optimizer = make_optimizer(model, config)
    losses = []
    for step in range(steps):
        batch = task.batch(step, config.batch_size, config.data)
        losses.append(train_step(Loss(model), optimizer, batch, config, step)[0])
    return torch.stack(losses)


def trained_together(ensemble, task, steps, start=0):
    losses = []
    for step in range(start, start + steps):
        batches = [task.batch(step, config.batch_size, config.data) for config in ensemble.configs]
        losses.append(ensemble.step(batches, step)[0])
    return torch.stack(losses, 1)


def largest_difference(a, b):
    pairs = zip(a.parameters(), b.parameters(), strict=True)
    return max(float((x - y).detach().abs().max()) for x, y in pairs)


CASES = {
    "facts": (TASK, {}),
    "gated, grouped, rotary, learned β": (TASK, {"n_heads": 4, "n_kv_heads": 2, "d_model": 16, "swish_beta": "learned"}),
    "post-norm, tied, every bias": (TASK, {"norm": "layernorm", "norm_position": "post", "tied_embeddings": True, "ffn": "gelu",
                                           "positions": "learned", "bias": {"qkv", "attn_out", "ffn", "unembed"}}),
    "no norm, no FFN": (TASK, {"norm": "none", "ffn": "none"}),
    "q/k norm, window": (TASK, {"qk_norm": True, "window": 3}),
    "encoder-decoder, padded": (Rewriting("copy", n_symbols=8, shortest=2, longest=4), {}),
    "encoder, padded": (TASKS["dyck"](), {}),
    "prefix decoder": (TASKS["lookahead"](), {}),
    "attention only, padded": (TASKS["induction"](), {}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_fifty_steps_equal_the_models_trained_alone(name):
    task, sizes = CASES[name]
    steps = 50 if name == "facts" else 8
    ensemble, alone = Ensemble(models(task, **sizes), MEMBERS), models(task, **sizes)
    together = trained_together(ensemble, task, steps)
    for k, (model, config) in enumerate(zip(alone, MEMBERS, strict=True)):
        before = trained_alone(model, task, config, steps)
        assert torch.allclose(before, together[k], atol=1e-9)
        assert largest_difference(model, ensemble.member(k)) < 1e-9
    assert largest_difference(alone[0], ensemble.member(1)) > 1e-3  # and the members differ


def test_the_embeddings_do_not_decay_unless_asked():
    """With a zero gradient what decays shrinks by 1 − rate · decay a step and nothing else moves."""
    for decay in ("matrices", "all"):
        config = replace(BASE, decay=decay, weight_decay=0.5)
        model = Transformer(TASK.model_config(**SMALL), seed=0).double()
        ensemble = Ensemble([model], [config])
        leaves = list(ensemble.parameters.values())
        for leaf in leaves:
            leaf.grad = torch.zeros_like(leaf)
        ensemble._update(leaves, [3e-3])
        after = ensemble.member(0)
        shrunk = {name for name, p in after.named_parameters() if not torch.equal(p, model.get_parameter(name))}
        assert torch.allclose(after.blocks[0].ffn.down.weight, model.blocks[0].ffn.down.weight * (1 - 3e-3 * 0.5))
        assert ("embedding.weight" in shrunk) == (decay == "all") and "blocks.0.attention.qkv.weight" in shrunk


def test_picking_members_keeps_their_moments():
    whole, part = Ensemble(models(TASK), MEMBERS), Ensemble(models(TASK), MEMBERS)
    trained_together(whole, TASK, 6)
    trained_together(part, TASK, 3)
    part = part.pick([2, 0])
    trained_together(part, TASK, 3, start=3)
    assert largest_difference(part.member(0), whole.member(2)) < 1e-12
    assert largest_difference(part.member(1), whole.member(0)) < 1e-12


def test_a_member_is_a_view_and_an_unstacked_model_is_its_own():
    ensemble = Ensemble(models(TASK), MEMBERS)
    view, own = ensemble.member(1), ensemble.unstack()[1]
    with torch.no_grad():
        ensemble.parameters["embedding.weight"].zero_()
    assert float(view.W_E.detach().abs().max()) == 0.0 < float(own.W_E.detach().abs().max())
    assert view.config == own.config and own(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, own.config.vocab)


def test_bfloat16_autocast_is_close():
    both = [
        Ensemble(models(TASK, torch.float32), [replace(c, precision=p) for c in MEMBERS])
        for p in ("float32", "bfloat16")
    ]
    a, b = (trained_together(ensemble, TASK, 2) for ensemble in both)
    assert 0 < float((a - b).abs().max()) < 0.2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Ensemble([], []), "0 models and 0 configs"),
        (lambda: Ensemble(models(TASK), [BASE] * 2), "3 models and 2 configs"),
        (lambda: Ensemble(models(TASK), [BASE, replace(BASE, batch_size=8), BASE]), r"differ in batch_size: \[16, 8\]"),
        (lambda: Ensemble([*models(TASK)[:2], *models(TASK, d_model=32)[:1]], MEMBERS), "models of one config"),
        (lambda: stacked([TASK.batch(0, 4, 0), TASK.batch(0, 5, 0)]), "different shapes.*how='sequence'"),
    ],
)
def test_what_cannot_be_stacked_is_named(make, message):
    with pytest.raises(EnsembleError, match=message):
        make()
