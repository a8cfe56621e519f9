"""Edits of weights: the constraint k* W' = v*, the least change under C, the published mixture, controls, scores by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from interp import Inputs, ModelConfig, Site, Transformer, run
from interp.analyses.edit_controls import (
    edited_logits,
    fine_tuned_edit,
    random_edit,
    random_key_edit,
    spread_edit,
    together,
)
from interp.analyses.edit_scores import EditCase, edit_cases, edit_scores, edit_summary
from interp.analyses.editing import Edit, EditError, Rewrite, find_values, key_covariance, rank_one_edit
from interp.tasks import ToyFacts

MODULES = {"ffn": ("1.ffn_act", "1.ffn_out"), "attention": ("1.z", "1.attn_out")}
TASK = ToyFacts(n_subjects=12)


@pytest.fixture(scope="module")
def toy():
    """Random, with biases, grouped keys and a gated FFN."""
    config = ModelConfig(
        vocab=13, n_layers=2, n_heads=4, n_kv_heads=2, d_model=16, n_ctx=8, ffn="swiglu", bias=True, norm="rmsnorm"
    )
    model, drawn = Transformer(config, seed=3).double(), torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        if "bias" in name:
            value.data.normal_(0, 0.2, generator=drawn)
    return model


def rewrite(seed=0, target=7, true=2, essence=True):
    tokens = torch.randint(0, 13, (3, 6), generator=torch.Generator().manual_seed(seed))
    roles = {"subject_last": torch.tensor([1, 2, 3])}
    other = Inputs(tokens[:1, :4], roles={"subject_last": torch.tensor([2])})
    return Rewrite(Inputs(tokens, roles=roles), target, true, other if essence else None, f"fact {seed}")


def key_and_output(model, given, module):
    key, out = MODULES[module]
    found = run(model, given.inputs, record=[key, out]).cache
    rows, at = torch.arange(3), given.inputs.roles["subject_last"]
    return found[key].flatten(2)[rows, at], found[out][rows, at]


@pytest.mark.parametrize("module", MODULES)
def test_the_new_matrix_maps_the_key_to_the_value_exactly(toy, module):
    given = rewrite()
    covariance, n = key_covariance(toy, torch.randint(0, 13, (40, 8)), 1, module)
    assert n == 320
    edit = rank_one_edit(toy, given, 1, module, covariance=covariance)
    keys, outputs = key_and_output(toy, given, module)
    new = edit.applied(toy)
    matrix = new.weight("W_out", 1) if module == "ffn" else new.weight("W_O", 1).flatten(0, 1)
    bias = toy.weight("b_out" if module == "ffn" else "b_O", 1)
    wanted = outputs.mean(0) + edit.value  # v*
    assert torch.allclose(keys.mean(0) @ matrix + bias, wanted, atol=1e-10) and float(edit.value.norm()) > 0.01
    after = run(new, given.inputs, record=MODULES[module][1]).cache[MODULES[module][1]]
    change = after[torch.arange(3), given.inputs.roles["subject_last"]] - outputs
    assert torch.allclose(change.mean(0), edit.value, atol=1e-10)
    assert torch.linalg.matrix_rank(edit.update) == 1


@pytest.mark.parametrize("module", MODULES)
def test_it_is_the_smallest_change_of_what_text_writes(toy, module):
    """Among updates with k* U = v, tr(Uᵀ C U) is least: adding any U₀ with k* U₀ = 0 makes it larger, and by its own size."""
    covariance, _ = key_covariance(
        toy, torch.randint(0, 13, (60, 8), generator=torch.Generator().manual_seed(1)), 1, module
    )
    edit = rank_one_edit(toy, rewrite(), 1, module, covariance=covariance)
    size = lambda u: float((u.T @ covariance @ u).trace())  # noqa: E731
    k = edit.key
    for seed in range(3):
        other = torch.randn(edit.update.shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        other -= torch.outer(k, k @ other) / (k @ k)
        assert size(edit.update + other) == pytest.approx(size(edit.update) + size(other), rel=1e-4)
    plain = rank_one_edit(toy, rewrite(), 1, module)
    assert torch.allclose(plain.update, torch.outer(k, plain.value) / (k @ k), atol=1e-12)


def test_covariance_is_the_uncentred_second_moment_of_real_tokens(toy):
    tokens = torch.randint(0, 13, (5, 6))
    mask = torch.ones(5, 6, dtype=torch.bool)
    mask[2, 3:] = False
    got, n = key_covariance(toy, [Inputs(tokens[:3], mask=mask[:3]), tokens[3:]], 0, batch_size=2)
    act = run(toy, Inputs(tokens, mask=mask), record="0.ffn_act").cache["0.ffn_act"][mask].numpy()
    assert n == 27
    np.testing.assert_allclose(got.numpy(), sum(np.outer(k, k) for k in act) / 27, atol=1e-12)


def test_which_key_is_constrained(toy):
    """First and mean key hold for themselves, the published mixture for the first prompt's, in the mean's direction."""
    covariance, _ = key_covariance(toy, torch.randint(0, 13, (40, 8)), 1)
    keys, _ = key_and_output(toy, rewrite(), "ffn")
    found = {
        name: rank_one_edit(toy, rewrite(), 1, covariance=covariance, key=name) for name in ("mean", "first", "rome")
    }
    written = {name: (keys.mean(0) @ edit.update, keys[0] @ edit.update) for name, edit in found.items()}
    delta = found["mean"].value
    assert torch.allclose(written["mean"][0], delta) and not torch.allclose(written["mean"][1], delta, rtol=1e-3)
    assert torch.allclose(written["first"][1], delta) and not torch.allclose(written["first"][0], delta, rtol=1e-3)
    assert torch.allclose(written["rome"][1], delta) and not torch.allclose(written["rome"][0], delta, rtol=1e-3)
    ratio = found["rome"].update / found["mean"].update  # one direction, another length
    assert torch.allclose(ratio, ratio[0, 0], rtol=1e-6)


def test_the_search_is_adam_on_the_stated_loss(toy):
    """The first loss by hand, a target that is reached, a length that is held, a prediction that is to stay."""
    given, last = rewrite(), {"position": -1, "steps": 60}
    found = find_values(toy, [given], 1, clamp=None, decay=0.01, **last)
    outputs = run(toy, given.inputs, record="1.ffn_out").cache["1.ffn_out"][:, -1]
    start = -toy(given.inputs.tokens)[:, -1].log_softmax(-1)[:, 7].mean()
    assert found.losses[0][0] == pytest.approx(float(start.detach()), abs=1e-12)
    assert torch.allclose(found.before[0], outputs.mean(0))
    edit = rank_one_edit(toy, given, 1, clamp=None, decay=0.01, **last)
    p = edited_logits(toy, edit.weights(toy), given.inputs).detach().softmax(-1)[:, 7]
    assert found.losses[0][-1] < found.losses[0][0] / 2 and float(p.mean()) > 0.2
    held = find_values(toy, [given], 1, clamp=0.3, **last)
    assert float(held.deltas.norm()) == pytest.approx(0.3 * float(outputs.mean(0).norm()))
    free = find_values(toy, [rewrite(essence=False)], 1, kl_weight=100.0, **last)
    tied = find_values(toy, [given], 1, kl_weight=100.0, **last)
    assert free.losses[0][0] == pytest.approx(found.losses[0][0]) and tied.losses[0][-1] > free.losses[0][-1]


def test_several_rewrites_are_each_edited_alone(toy):
    many = [rewrite(seed, target) for seed, target in ((0, 7), (1, 4), (2, 9))]
    together_ = rank_one_edit(toy, many, 1)
    for one, edit in zip(many, together_, strict=True):
        alone = rank_one_edit(toy, one, 1)
        assert torch.allclose(alone.update, edit.update, atol=1e-9) and len(alone.losses) == len(edit.losses)


def test_the_given_model_is_never_touched(toy):
    before = {name: value.clone() for name, value in toy.named_parameters()}
    edit = rank_one_edit(toy, rewrite(), 0)
    new = edit.applied(toy)
    fine_tuned_edit(toy, rewrite(), 0, learning_rate=0.1)
    spread_edit(
        toy,
        [rewrite()],
        [0, 1],
        {i: key_covariance(toy, torch.randint(0, 13, (20, 8)), i)[0] for i in (0, 1)},
        weight=1.0,
    )
    assert all(torch.equal(value, before[name]) and value.grad is None for name, value in toy.named_parameters())
    moved = [name for name, value in new.named_parameters() if not torch.equal(value, before[name])]
    assert moved == ["blocks.0.ffn.down.weight"]
    logits = edited_logits(toy, edit.weights(toy), rewrite().inputs)
    assert torch.allclose(logits, new(rewrite().inputs.tokens)[:, -1], atol=1e-12)


def test_controls_have_the_size_that_they_should(toy):
    edit = rank_one_edit(toy, rewrite(), 1)
    for control in (random_edit(edit, 0), random_key_edit(edit, 0)):
        assert (
            torch.allclose(control.update.norm(), edit.update.norm()) and torch.linalg.matrix_rank(control.update) == 1
        )
    assert not torch.equal(random_edit(edit, 0).update, random_edit(edit, 1).update)
    assert edit.value is not None
    direction = torch.nn.functional.cosine_similarity(random_key_edit(edit, 0).update, edit.value[None], dim=1).abs()
    assert torch.allclose(direction, torch.ones_like(direction))
    tuned = fine_tuned_edit(toy, rewrite(), 1, learning_rate=0.05, steps=60)
    bound = fine_tuned_edit(toy, rewrite(), 1, learning_rate=0.05, steps=60, limit=0.01)
    p = lambda e: float(edited_logits(toy, e.weights(toy), rewrite().inputs).detach().softmax(-1)[:, 7].mean())  # noqa: E731
    assert p(tuned) > 0.5 and tuned.losses[-1] < tuned.losses[0] and tuned.method == "FT"
    assert float(bound.update.abs().max()) <= 0.01 + 1e-12 and p(bound) < p(tuned)


def test_spreading_over_layers_writes_equal_parts_of_what_is_lacking(toy):
    """With λ → 0 and one fact each layer's solution meets its part exactly, so the stream ends at v*."""
    covariances = {i: key_covariance(toy, torch.randint(0, 13, (40, 8)), i)[0] for i in (0, 1)}
    given = Rewrite(rewrite().inputs.select([0]), 7, 2)
    goal = find_values(toy, [given], 1, site=Site("resid_post", 1))
    edits = spread_edit(toy, [given], [1, 0], covariances, weight=1e-9)
    new = Transformer(toy.config, seed=0).double()
    new.load_state_dict({**toy.state_dict(), **together(edits, toy)})
    at = int(given.inputs.roles["subject_last"][0])
    got = run(new, given.inputs, record="1.resid_post").cache["1.resid_post"][0, at]
    assert [edit.layer for edit in edits] == [0, 1]
    assert torch.allclose(got, goal.before[0] + goal.deltas[0], atol=1e-6)
    first = edits[0].key is None and edits[0].update
    keys = run(toy, given.inputs, record="0.ffn_act").cache["0.ffn_act"][0, at]
    assert torch.allclose(keys @ first, goal.deltas[0] / 2, atol=1e-6)


def test_cases_of_a_fact_set():
    cases = edit_cases(TASK.prompts, [0, 5], "held_out", seed=1)
    table = TASK.facts.facts
    for fact, case in zip((0, 5), cases, strict=True):
        row = table.iloc[fact]
        words = TASK.vocabulary
        assert words.words[case.rewrite.true] == row["object"] and case.rewrite.inputs.batch == 3
        new = words.words[case.rewrite.target]
        assert new != row["object"] and new in set(table[table["relation"] == row["relation"]]["object"])
        assert set(case.paraphrases.table["template"]) == {row["held_out"]}
        assert (case.neighbours.table["object"] == row["object"]).all()
        assert row["subject"] not in set(case.neighbours.table["subject"])
        assert set(case.subject.table["relation"]) == set(table["relation"]) - {row["relation"]}
        assert set(case.subject.table["subject"]) == {row["subject"]}
    with pytest.raises(EditError, match="fact 999 is not among these prompts"):
        edit_cases(TASK.prompts, [999], "held_out")


def test_scores_and_the_published_table_by_hand():
    model = Transformer(TASK.model_config(), seed=0)
    cases = edit_cases(TASK.prompts, [0, 1, 2], "held_out")
    scores = edit_scores(model, cases, [None] * 3)
    p = model(cases[1].rewrite.inputs.tokens)[:, -1].softmax(-1)
    mine = scores[(scores["case"] == 1) & (scores["kind"] == "rewrite")]
    assert mine["p_target"].tolist() == pytest.approx(p[:, cases[1].rewrite.target].tolist(), rel=1e-4)
    assert mine["success"].tolist() == (p[:, cases[1].rewrite.target] > p[:, cases[1].rewrite.true]).tolist()
    rows = [("rewrite", 0, 0.9, 0.1), ("rewrite", 0, 0.2, 0.3), ("rewrite", 1, 0.8, 0.1), ("paraphrase", 0, 0.6, 0.1),
            ("paraphrase", 1, 0.1, 0.6), ("neighbour", 0, 0.1, 0.5), ("neighbour", 1, 0.2, 0.3)]  # fmt: skip
    table = pd.DataFrame(rows, columns=["kind", "case", "p_target", "p_true"])
    up = table["kind"].isin(["rewrite", "paraphrase"])
    table["success"] = (table["p_target"] > table["p_true"]).where(up, table["p_true"] > table["p_target"])
    row = edit_summary(table.assign(method="x")).iloc[0]
    assert row["ES"] == pytest.approx(75) and row["PS"] == pytest.approx(50) and row["NS"] == pytest.approx(100)
    assert row["EM"] == pytest.approx(100 * (0.35 + 0.7) / 2) and row["NM"] == pytest.approx(25)
    assert row["S"] == pytest.approx(3 / (1 / 75 + 1 / 50 + 1 / 100)) and row["n"] == 2
    assert row["ES ±"] == pytest.approx(12.706 * np.std([50, 100], ddof=1) / np.sqrt(2), rel=1e-3)


def test_what_is_refused(toy):
    with pytest.raises(EditError, match=r"layer=2 is not allowed; allowed: 0 … 1"):
        rank_one_edit(toy, rewrite(), 2)
    with pytest.raises(EditError, match="module='mlp' is not allowed; allowed: 'ffn', 'attention'"):
        rank_one_edit(toy, rewrite(), 0, "mlp")
    with pytest.raises(EditError, match="key='last' is not allowed; allowed: 'mean', 'first', 'rome'"):
        rank_one_edit(toy, rewrite(), 0, key="last")
    with pytest.raises(EditError, match=r"covariance of shape \(3, 3\) is not allowed"):
        rank_one_edit(toy, rewrite(), 0, covariance=torch.eye(3))
    with pytest.raises(EditError, match="no rewrites"):
        find_values(toy, [], 0)
    with pytest.raises(EditError, match="has no FFN"):
        plain = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8, ffn="none"))
        rank_one_edit(plain, rewrite(), 0)
    with pytest.raises(TypeError, match=r"interp\.Transformer"):
        rank_one_edit(object(), rewrite(), 0)  # type: ignore[arg-type]
    with pytest.raises(EditError, match=r"layers=\[0, 5\] are not allowed; allowed: different ones of \[0\]"):
        spread_edit(toy, [rewrite()], [0, 5], {0: torch.eye(42)})
    with pytest.raises(EditError, match="1 edits for 0 cases"):
        edit_scores(toy, [], [None])
    mask = torch.tensor([[False, True, True, True]])
    padded = Inputs(torch.zeros(1, 4, dtype=torch.long), mask=mask, roles={"subject_last": torch.tensor([2])})
    with pytest.raises(EditError, match="padded on the left"):
        rank_one_edit(toy, Rewrite(padded, 1, 2), 0)
    assert isinstance(EditCase, type) and "rank-one ffn" in repr(Edit(0, "ffn", torch.zeros(2, 2), "rank-one ffn"))
