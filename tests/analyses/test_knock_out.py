"""Attention knock-out against a model whose scores are set by hand: which edges, in which layers, of which examples."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from interp import Inputs, ModelConfig, Transformer, run
from interp.analyses.joint_metric import TraceError
from interp.analyses.knock_out import attention_knock_out, knock_out_effects
from interp.tasks.facts import Prompts
from interp.tasks.task import Pairs

L, T, V = 3, 7, 13


@pytest.fixture(scope="module")
def model() -> Transformer:
    config = ModelConfig(
        vocab=V, n_layers=L, n_heads=2, d_model=12, n_ctx=16, norm="rmsnorm", ffn="swiglu", positions="rotary"
    )
    return Transformer(config, seed=4).double().eval()


@pytest.fixture(scope="module")
def pairs() -> Pairs:
    """Subjects at 1 … 2, 2 … 4, 3; relation at 4, 5, 5; the last prompt is a token shorter, its relation its last token."""
    tokens = torch.randint(0, V, (3, T), generator=torch.Generator().manual_seed(1))
    mask = torch.ones(3, T, dtype=torch.bool)
    mask[2, -1] = False
    roles = {"subject": torch.tensor([1, 2, 3]), "subject_last": torch.tensor([2, 4, 3]), "relation": torch.tensor([4, 5, 5]),
             "final": torch.tensor([6, 6, 5])}  # fmt: skip
    clean = Inputs(tokens, mask=mask, roles=roles)
    table = pd.DataFrame({"fact": [7, 8, 9]})
    return Pairs(clean, clean, torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), table)


KEYS = {
    "subject": [[1, 2], [2, 3, 4], [3]],
    "relation": [[4], [5], []],
    "last": [[6], [6], [5]],
    "rest": [[0, 3, 5], [0, 1], [0, 1, 2, 4]],
    "non_subject": [[0, 3, 4, 5], [0, 1, 5], [0, 1, 2, 4]],
}


def by_hand(model: Transformer, pairs: Pairs, layers: list[int], keys: list[list[int]]) -> dict[str, np.ndarray]:
    """Scores of the cut edges set to −∞ in the model's own tap."""
    ends = pairs.clean.last().tolist()

    def tap(site, value):
        if site.name == "scores" and site.layer in layers:
            value = value.clone()
            for i, cut in enumerate(keys):
                for key in cut:
                    value[i, :, ends[i], key] = float("-inf")
        return value

    with torch.no_grad():
        logits = model(pairs.clean, tap)[torch.arange(3), torch.tensor(ends)]
    rows = torch.arange(3)
    return {"probability": logits.softmax(-1)[rows, pairs.correct].numpy(),
            "logit_difference": (logits[rows, pairs.correct] - logits[rows, pairs.wrong]).numpy()}  # fmt: skip


@pytest.mark.parametrize("engine", ["fast", "reference"])
@pytest.mark.parametrize("window", [1, 3])
def test_every_target_and_layer_by_hand(model, pairs, engine, window):
    table = attention_knock_out(model, pairs, window=window, targets=list(KEYS), engine=engine)
    assert len(table) == 3 * len(KEYS) * L * 2 and set(table["fact"]) == {7, 8, 9}
    clean = by_hand(model, pairs, [], [[], [], []])
    for name, keys in KEYS.items():
        for layer in range(L):
            layers = [one for one in range(layer - window // 2, layer + window // 2 + 1) if 0 <= one < L]
            wanted = by_hand(model, pairs, layers, keys)
            for metric, values in wanted.items():
                here = table[
                    (table["to"] == name) & (table["layer"] == layer) & (table["metric"] == metric)
                ].sort_values("example")
                assert np.allclose(here["knocked"], values, atol=1e-12, rtol=0)
                assert np.allclose(here["clean"], clean[metric], atol=1e-12, rtol=0)
                assert here["edges"].tolist() == [len(cut) for cut in keys]
                assert here["clipped"].eq(len(layers) < window).all()
                assert here["first_layer"].eq(layers[0]).all() and here["last_layer"].eq(layers[-1]).all()


def test_nothing_cut_changes_nothing_and_batches_do_not_matter(model, pairs):
    whole, one = (attention_knock_out(model, pairs, batch=size) for size in (64, 1))
    empty = whole[whole["edges"] == 0]
    assert len(empty) == L * 2 and (empty["knocked"] == empty["clean"]).all()
    keys = ["example", "to", "layer", "metric"]
    whole, one = (table.sort_values(keys, ignore_index=True) for table in (whole, one))
    pd.testing.assert_frame_equal(whole, one, rtol=0, atol=1e-12)


def test_own_masks_and_prompts(model, pairs):
    mask = torch.zeros(3, T, dtype=torch.bool)
    mask[:, 0] = True
    prompts = Prompts(pairs.clean, pairs.correct, pairs.table)
    table = attention_knock_out(model, prompts, targets={"first": mask})
    assert set(table["to"]) == {"first"} and set(table["metric"]) == {"probability"}
    wanted = by_hand(model, pairs, [1], [[0], [0], [0]])["probability"]
    assert np.allclose(table[table["layer"] == 1]["knocked"], wanted, atol=1e-12)
    predicted = attention_knock_out(model, prompts, targets={"first": mask}, answers="predicted")
    logits = run(model, pairs.clean).logits[torch.arange(3), pairs.clean.last()]
    assert np.allclose(predicted[predicted["layer"] == 0]["clean"], logits.softmax(-1).amax(-1), atol=1e-12)


def test_relative_change_by_hand():
    about = {
        "metric": "probability",
        "layer": 0,
        "window": 1,
        "first_layer": 0,
        "last_layer": 0,
        "clipped": False,
        "to": "subject",
    }
    rows = [{**about, "fact": 1, "edges": 2, "clean": 0.8, "knocked": 0.2},
            {**about, "fact": 2, "edges": 1, "clean": 0.2, "knocked": 0.1},
            {**about, "fact": 3, "edges": 0, "clean": 0.5, "knocked": 0.5}]  # fmt: skip
    (found,) = knock_out_effects(pd.DataFrame(rows)).to_dict("records")
    assert found["n"] == 2 and found["change"] == pytest.approx(-0.35)
    assert found["percent"] == pytest.approx((-75 - 50) / 2) and found["ratio_percent"] == pytest.approx(-70)
    assert found["percent_high"] - found["percent"] == pytest.approx(12.706204736 * 12.5)


def test_refusals(model, pairs):
    with pytest.raises(TraceError, match="window=2 is not allowed"):
        attention_knock_out(model, pairs, window=2)
    with pytest.raises(TraceError, match="targets=\\('verb',\\) is not allowed"):
        attention_knock_out(model, pairs, targets=("verb",))
    with pytest.raises(TraceError, match="must be bool \\(3, 7\\)"):
        attention_knock_out(model, pairs, targets={"x": torch.zeros(3, 2, dtype=torch.bool)})
    with pytest.raises(TraceError, match="targets is empty"):
        attention_knock_out(model, pairs, targets=())
    bare = replace(pairs, clean=replace(pairs.clean, roles={"subject": pairs.clean.roles["subject"]}))
    with pytest.raises(TraceError, match="no role 'subject_last'"):
        attention_knock_out(model, bare)
    with pytest.raises(TraceError, match="lacks column"):
        knock_out_effects(pd.DataFrame({"to": []}))
