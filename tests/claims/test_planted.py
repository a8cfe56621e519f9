"""Planted mixtures: who is trained where, what stays, and that the truth is what was asked for (tiny, a few steps)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from interp import Transformer
from interp.claims.localisers import LOCALISERS, relearning
from interp.claims.planted import CONFIG, PlantedError, SomeFacts, deal, drawn, plant

TASK = SomeFacts(n_subjects=16, n_base=8)
FEW = replace(CONFIG, steps=3, batch_size=8)


@pytest.fixture(scope="module")
def models():
    config = TASK.model_config(d_model=16, n_heads=2)
    return {seed: Transformer(config, seed=seed) for seed in (1, 2)}


@pytest.fixture(scope="module")
def mixtures(models):
    return plant(models, (0.0, 0.5, 1.0), TASK, FEW, progress=False)


def test_base_and_planted_people_are_disjoint_and_all():
    other = TASK.others
    mine, theirs = (set(task.splits["train"].table["subject"]) for task in (TASK, other))
    assert not mine & theirs and len(mine | theirs) == 16 and len(mine) == 8
    assert set(other.splits["held_out"].table["subject"]) == theirs
    for split in ("train", "held_out"):
        assert (TASK.splits[split].table["template"] == TASK.splits[split].table["held_out"]).all() == (
            split == "held_out"
        )


def test_a_share_of_the_facts_is_dealt_to_each_part():
    for share in (0.0, 0.25, 1.0):
        dealt = deal(TASK, 5, share)
        facts = dealt["train"].table.drop_duplicates("fact")
        assert not set(facts["subject"]) & set(TASK.splits["train"].table["subject"])  # nobody the base has learned
        assert (facts["part"] == "ffn").sum() == round(share * 32) and len(facts) == 32
        held = dict(zip(dealt["held_out"].table["fact"], dealt["held_out"].table["part"], strict=True))
        assert all(held[fact] == part for fact, part in zip(facts["fact"], facts["part"], strict=True))
    parts = [deal(TASK, seed, 0.5)["train"].table["part"].tolist() for seed in (5, 5, 6)]
    assert parts[0] == parts[1] != parts[2]


def test_only_what_a_mixture_trains_has_moved(models, mixtures):
    assert [(one.seed, one.share) for one in mixtures] == [
        (seed, share) for share in (0.0, 0.5, 1.0) for seed in (1, 2)
    ]
    for one in mixtures:
        table = one.base.weights.table(one.model).set_index("group")["distance"]
        moved = {
            group
            for group in ("embeddings", "unembedding", "qk", "ov", "ffn_in", "ffn_out", "norms")
            if table[group] > 0
        }
        assert moved == (set() if one.share == 1 else {"ov"}) | (set() if one.share == 0 else {"ffn_in", "ffn_out"})
        assert one.base is models[one.seed]
        assert all(name in one.recall for name in ("base", *(["train ffn"] if one.share else ["train attention"])))


def test_each_part_learns_its_own_facts_only(models):
    """One step at a share of a half equals one step of each part on its own prompts, the FFNs first."""
    from interp.training.ensemble import Ensemble

    one = plant({1: models[1]}, (0.5,), TASK, replace(FEW, steps=1), progress=False)[0]
    dealt = deal(TASK, 1, 0.5)["train"]
    start = models[1]
    for part, groups in (("ffn", ("ffn",)), ("attention", ("ov",))):
        config = replace(FEW, steps=1, trainable=groups, seed=1)
        alone = Ensemble([start], [config])
        alone.step([drawn(dealt.select((dealt.table["part"] == part).to_numpy()), 0, 8, 1)], 0)
        start = alone.alone(0)
    for a, b in zip(start.parameters(), one.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_every_localiser_reads_a_share(mixtures):
    for name, (kind, localiser) in LOCALISERS.items():
        found = localiser(mixtures[2], 12)
        assert kind in ("storage", "mediation")
        total = found["value_ffn"] + found["value_attention"]
        assert np.isfinite(found["reading"]) and found["reading"] == pytest.approx(found["value_ffn"] / total), name
    swapped = [LOCALISERS["weight interchange"][1](one, 12)["reading"] for one in (mixtures[0], mixtures[4])]
    assert swapped == pytest.approx([0.0, 1.0])  # the only group that differs from the ancestor
    table = relearning(mixtures[:3], steps=2, batch_size=8)
    assert list(table["share"]) == [0.0, 0.0, 0.5] and table["reading"].notna().all()


def test_what_is_refused(models):
    with pytest.raises(PlantedError, match=r"shares=\[1\.5\] of 2 bases are not allowed"):
        plant(models, [1.5], TASK)
    with pytest.raises(PlantedError, match="n_base=16 is not allowed; allowed: 1 … 15"):
        SomeFacts(16, 16)
