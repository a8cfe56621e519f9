"""A change of facts, and which weights it is written into: by hand where only one group could move."""

from dataclasses import replace

import pytest
import torch

from interp import Transformer
from interp.claims.storage import change, fine_tuned, interchange, recall
from interp.tasks import ToyFacts
from interp.tasks.train_config import TrainConfig

TASK = ToyFacts(12)
TUNING = TrainConfig(steps=40, batch_size=32, learning_rate=3e-3, weight_decay=0.0, trainable=("attention", "ffn"))


def bases():
    return {seed: Transformer(TASK.model_config(n_layers=1, d_model=16, n_heads=2), seed=seed) for seed in (1000, 1001)}


def test_half_of_the_facts_change_in_every_template_alike_and_stay_in_their_relation():
    one = change(TASK, 1000)
    values = {relation: set(rows["object"]) for relation, rows in TASK.facts.facts.groupby("relation")}
    new: dict[int, set[int]] = {}
    for split, prompts in one.prompts.items():
        for row, (_, asked) in enumerate(prompts.table.iterrows()):
            answer, old = int(prompts.answers[row]), int(one.old[split][row])
            assert (answer != old) == bool(one.changed[split][row])
            assert TASK.vocabulary.text(answer) in values[asked["relation"]]
            new.setdefault(int(asked["fact"]), set()).add(answer)
    assert all(len(answers) == 1 for answers in new.values())
    hit = {
        int(fact)
        for split, prompts in one.prompts.items()
        for fact in prompts.table["fact"][one.changed[split].numpy()]
    }
    assert len(hit) == len(TASK.facts.facts) // 2


@pytest.mark.parametrize("group, share", [("ffn", 1.0), ("attention", 0.0)])
def test_what_alone_was_trained_holds_all_of_the_change(group, share):
    models = bases()
    changes = {seed: change(TASK, seed) for seed in models}
    tuned = fine_tuned(models, changes, replace(TUNING, trainable=(group,)))
    for seed, base in models.items():
        logits, _ = interchange(base, tuned[seed], changes[seed], split="train")
        assert logits.share()[0] == pytest.approx(share, abs=1e-9)
        assert float(logits.total.mean()) > 0


@torch.no_grad()
def last_logits(model, prompts):
    return model(prompts.inputs)[torch.arange(len(prompts)), prompts.inputs.roles["final"]]


def test_values_add_up_to_what_the_fine_tune_changed():
    models = bases()
    changes = {seed: change(TASK, seed) for seed in models}
    tuned = fine_tuned(models, changes, TUNING)
    one = changes[1000]
    prompts = one.prompts["held_out"].select(one.changed["held_out"].numpy())
    old, rows = one.old["held_out"][one.changed["held_out"]], torch.arange(len(prompts))
    before, after = (last_logits(model, prompts) for model in (models[1000], tuned[1000]))
    moved = ((after - before)[rows, prompts.answers] - (after - before)[rows, old]).mean()
    logits, _ = interchange(models[1000], tuned[1000], one)
    assert float(logits.values.mean(-1).sum()) == pytest.approx(float(moved), abs=1e-5)
    for name, was in models[1000].named_parameters():  # nothing but the blocks' matrices has moved
        new = dict(tuned[1000].named_parameters())[name]
        assert torch.equal(was, new) == (name not in models[1000].weights.select(("attention", "ffn"))), name
    assert set(recall(tuned[1000], one)) == {"recall_changed", "recall_unchanged"}
