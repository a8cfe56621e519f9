"""Modular addition: the answers are sums, every pair is in one split, a step is the whole training split."""

from __future__ import annotations

import pytest
import torch

from interp import Transformer
from interp.tasks import ModularAddition, TaskError

TASK = ModularAddition(modulus=13, share=0.3, split=4)


def read(batch):
    """(a, b) -> answer, from the words."""
    words = TASK.vocabulary.words
    rows = [[words[token] for token in row] for row in batch.inputs.tokens.tolist()]
    assert all(row[2] == "=" for row in rows) and (batch.positions == 2).all()
    return {
        (int(a), int(b)): int(words[answer]) for (a, b, _), (answer,) in zip(rows, batch.targets.tolist(), strict=True)
    }


def test_every_pair_is_in_one_split_with_its_sum():
    train, held_out = (read(TASK.evaluation[split]) for split in ("train", "held_out"))
    assert len(train) == TASK.n_train == 51 == round(0.3 * 169)
    assert train | held_out == {(a, b): (a + b) % 13 for a in range(13) for b in range(13)}
    assert not train.keys() & held_out.keys()
    roles = TASK.evaluation["held_out"].inputs.roles
    assert [int(roles[name].unique()) for name in ("a", "b", "final")] == [0, 1, 2]


def test_a_step_is_the_training_split_whatever_its_size_and_seed():
    wanted = read(TASK.evaluation["train"])
    for step, size, seed in ((0, 1, 0), (7, 1000, 3)):
        assert read(TASK.batch(step, size, seed)) == wanted
    assert TASK.train_config().batch_size == len(wanted)
    again, other = ModularAddition(13, 0.3, split=4), ModularAddition(13, 0.3, split=5)
    assert read(again.batch(0, 1, 0)) == wanted != read(other.batch(0, 1, 0))


def test_pairs_are_held_out_and_their_answers_sums():
    pairs = TASK.pairs(100, seed=1)
    held_out = set(read(TASK.evaluation["held_out"]))
    clean = [(a, b) for a, b, _ in pairs.clean.tokens.tolist()]
    assert set(clean) <= held_out and len(set(clean)) == 100
    assert [(a + b) % 13 for a, b in clean] == pairs.correct.tolist()
    assert [(a + b) % 13 for a, b, _ in pairs.corrupted.tokens.tolist()] == pairs.wrong.tolist()
    with pytest.raises(TaskError, match="n=119 is not allowed; allowed: 1 … 118, the held-out pairs"):
        TASK.pairs(119)


def test_the_models_are_the_papers_and_a_pre_norm_one():
    plain, normed = (Transformer(TASK.model_config(**changes)) for changes in ({}, {"norm": "layernorm"}))
    assert plain.final_norm is None and normed.final_norm is not None
    assert plain.blocks[0].ffn.W_in.shape == (128, 512) and plain.W_E.shape == (14, 128)
    assert [plain.weight(name, 0) is None for name in ("b_Q", "b_O", "b_U", "b_in", "b_out")] == [True] * 3 + [
        False
    ] * 2
    assert normed(TASK.batch(0, 1, 0).inputs).shape == (51, 3, 14)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"modulus": 2}, "modulus=2"),
        ({"share": 0.0}, "share=0.0"),
        ({"share": 1.0}, "share=1.0"),
        ({"share": -1}, "share"),
    ],
)
def test_options_out_of_range_are_refused(options, words):
    with pytest.raises(TaskError, match=words):
        ModularAddition(**options)


def test_a_batch_does_not_depend_on_who_asks_first():
    task = ModularAddition(7)
    with torch.device("meta"):  # a default device on which nothing can be drawn
        assert task.batch(0, 1, 0).inputs.tokens.is_meta
    assert not task.batch(0, 1, 0).inputs.tokens.is_meta and torch.equal(
        task.batch(0, 1, 0).targets, ModularAddition(7).batch(0, 1, 0).targets
    )
