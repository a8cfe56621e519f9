"""Knowledge neurons: integrals by hand, the published sums, thresholds and sharing, effects on a fact and on others."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

from interp import Inputs, ModelConfig, Replace, Transformer, Zero, run
from interp.analyses.knowledge_neurons import (
    KnowledgeNeuronError,
    NeuronAttribution,
    knowledge_neurons,
    neuron_attribution,
    neuron_effects,
    relative_change,
)
from interp.hookable import UnsupportedModelError
from interp.tasks import ToyFacts

ANSWERS = torch.tensor([1, 5, 9])
TASK = ToyFacts(n_subjects=6)


def by_hand(model, tokens, layer, alphas):
    """w · mean of ∂P/∂w at α·w, one example at a time, by finite differences along each neuron."""
    found = []
    act = run(model, tokens, record=f"{layer}.ffn_act").cache[f"{layer}.ffn_act"][:, -1]

    def p(example, w):
        logits = run(model, tokens[example : example + 1], change=Replace(f"{layer}.ffn_act", w, at=(-1,))).logits
        return float(logits[0, -1].softmax(-1)[ANSWERS[example]])

    for example in range(len(tokens)):
        total = np.zeros(act.shape[-1])
        for alpha in alphas:
            for i in range(act.shape[-1]):
                step = torch.zeros_like(act[example])
                step[i] = 1e-5
                up, down = p(example, alpha * act[example] + step), p(example, alpha * act[example] - step)
                total[i] += (up - down) / 2e-5
        found.append(act[example].numpy() * total / len(alphas))
    return np.array(found)


ALPHAS = {"midpoint": [1 / 6, 3 / 6, 5 / 6], "original": [0, 1 / 3, 2 / 3], "port": [0, 0.5, 1]}


@pytest.mark.parametrize(("rule", "alphas"), ALPHAS.items())
def test_scores_are_the_mean_gradient_times_the_activation(model, tokens, rule, alphas):
    got = neuron_attribution(model, tokens, ANSWERS, steps=3, rule=rule, layers=[1], batch_size=4)
    np.testing.assert_allclose(got.scores[0].numpy(), by_hand(model, tokens, 1, alphas), atol=1e-8)


def test_scores_add_up_to_what_the_layer_does(model, tokens):
    """Σ scores → P(own activations) − P(none of them), and the middles of the parts get there sooner than the published sums."""
    errors = {rule: neuron_attribution(model, tokens, ANSWERS, rule=rule).completeness for rule in ALPHAS}  # type: ignore[arg-type]
    assert float(errors["midpoint"].max()) < 1e-3
    assert float(errors["original"].mean()) > 10 * float(errors["midpoint"].mean())
    assert float(errors["port"].mean()) > float(errors["midpoint"].mean())
    got = neuron_attribution(model, tokens, ANSWERS, steps=200)
    for layer in (0, 1):
        none = run(model, tokens, change=Zero(f"{layer}.ffn_act", at=(-1,))).logits[:, -1].softmax(-1)
        wanted = got.p - none.gather(1, ANSWERS[:, None])[:, 0]
        assert torch.allclose(got.scores[layer].sum(-1), wanted, atol=1e-5)
    table = got.table()
    assert len(table) == 6 and table["completeness_error"].max() < 1e-4 and set(table["rule"]) == {"midpoint"}


def test_batches_padding_and_positions_change_nothing(model, tokens):
    whole = neuron_attribution(model, tokens, ANSWERS, steps=4)
    parts = neuron_attribution(model, tokens, ANSWERS, steps=4, batch_size=1)
    mask = torch.ones(3, 9, dtype=torch.bool)
    mask[:, 7:] = False
    padded = Inputs(torch.nn.functional.pad(tokens, (0, 2)), mask=mask, roles={"final": torch.tensor([6, 6, 6])})
    right = neuron_attribution(model, padded, ANSWERS, "final", steps=4)
    assert torch.allclose(whole.scores, parts.scores, atol=1e-12) and torch.allclose(
        whole.scores, right.scores, atol=1e-12
    )


def attribution(scores):
    scores = torch.tensor(scores, dtype=torch.float64)[None]  # one layer
    n = scores.shape[1]
    return NeuronAttribution(scores, scores.flip(-1), torch.zeros(1, n), torch.ones(n), (0,), "midpoint", 20)


def test_thresholds_and_sharing_by_hand():
    """Fact A in four prompts: neuron 0 is always largest, 1 in three of them above a fifth, 2 in one; fact B: neuron 3 alone."""
    scores = [
        [1.0, 0.3, 0.1, -2.0],
        [1.0, 0.3, 0.3, 0.0],
        [2.0, 0.3, 0.0, 0.0],
        [1.0, 0.2, 0.0, 0.0],
        [0.0, 0.0, 0.0, 0.5],
    ]
    found = attribution(scores)
    table = knowledge_neurons(found, list("AAAAB"), wanted=None)
    assert [(r.fact, r.neuron) for r in table.itertuples()] == [("A", 0), ("A", 1), ("B", 3)]
    assert table["prompts"].tolist() == [1.0, 0.75, 1.0] and table["score"].tolist() == pytest.approx(
        [1.25, 0.275, 0.5]
    )
    strict = knowledge_neurons(found, list("AAAAB"), threshold=0.3, share=1.0, wanted=None)
    assert [(r.fact, r.neuron) for r in strict.itertuples()] == [("A", 0), ("B", 3)]
    loud = knowledge_neurons(found, list("AAAAB"), by="activation", threshold=0.5, wanted=None)
    assert [(r.fact, r.neuron) for r in loud.itertuples()] == [("A", 3), ("B", 0)]


def test_the_share_moves_until_a_fact_has_as_many_as_wanted():
    scores = [[1.0] * 7 + [0.0], [1.0] * 4 + [0.0] * 4, [1.0] * 3 + [0.0] * 5, [1.0] * 2 + [0.0] * 6]
    found = attribution(scores)  # shared by 1, 1, .75, .5, .25 … of the prompts
    for start in (0.1, 0.5, 0.7):
        table = knowledge_neurons(found, ["A"] * 4, share=start)
        assert 2 <= len(table) <= 5 and (table["prompts"] >= table["share"] - 1e-9).all()
    assert knowledge_neurons(found, ["A"] * 4, share=0.1)["share"].iloc[0] == pytest.approx(0.3)  # 7 at .25, 4 above
    assert len(knowledge_neurons(found, ["A"] * 4, wanted=None, share=0.25)) == 7
    none = knowledge_neurons(found, ["A"] * 4, wanted=(20, 30))
    assert len(none) == 7 and none["share"].iloc[0] == pytest.approx(0.05)  # as low as it goes


def test_effects_are_runs_with_the_neurons_scaled():
    model = Transformer(TASK.model_config(), seed=0).double()
    prompts = TASK.prompts
    neurons = pd.DataFrame({"fact": [3, 3, 8], "layer": [0, 1, 1], "neuron": [5, 7, 2]})
    effects = neuron_effects(model, prompts, neurons, 2.0, "final", batch_size=7)
    assert len(effects) == 2 * len(prompts)
    mine = effects[effects["fact"] == 3]
    act = {}

    def tap(site, value):
        if str(site) in ("0.ffn_act", "1.ffn_act"):
            value = value.clone()
            value[:, -1, {0: 5, 1: 7}[site.layer]] *= 2
            act[site] = value
        return value

    p = model(prompts.inputs.tokens, tap)[:, -1].softmax(-1).gather(1, prompts.answers[:, None])[:, 0]
    np.testing.assert_allclose(mine["changed"], p.detach().numpy(), atol=1e-6)
    table = prompts.table
    assert mine["own"].tolist() == (table["fact"] == 3).tolist() and len(act) == 2
    row = relative_change(effects).iloc[0]
    own, rest = mine[mine["own"]], mine[~mine["same_relation"]]
    assert row["own"] == pytest.approx(own["changed"].mean() / own["clean"].mean() - 1)
    assert row["other"] == pytest.approx(rest["changed"].mean() / rest["clean"].mean() - 1) and row["n_neurons"] == 2
    same = neuron_effects(model, prompts, neurons, 1.0, "final")
    np.testing.assert_allclose(same["changed"], same["clean"], atol=1e-12)


def test_what_is_refused(model, tokens):
    with pytest.raises(
        KnowledgeNeuronError, match="rule='simpson' is not allowed; allowed: 'midpoint', 'original', 'port'"
    ):
        neuron_attribution(model, tokens, ANSWERS, rule="simpson")  # type: ignore[arg-type]
    with pytest.raises(KnowledgeNeuronError, match="steps=1 is not allowed"):
        neuron_attribution(model, tokens, ANSWERS, steps=1)
    with pytest.raises(KnowledgeNeuronError, match=r"layers=\[4\] is not allowed; allowed: some of 0 … 1"):
        neuron_attribution(model, tokens, ANSWERS, layers=[4])
    plain = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8, ffn="none"))
    with pytest.raises(UnsupportedModelError, match="no site 'ffn_act'"):
        neuron_attribution(plain, tokens, ANSWERS)
    found = attribution([[1.0, 0.0]])
    with pytest.raises(KnowledgeNeuronError, match="threshold=0 is not allowed"):
        knowledge_neurons(found, ["A"], threshold=0)
    with pytest.raises(
        KnowledgeNeuronError, match=r"facts of shape \(2,\) are not allowed; allowed: one per example, \(1,\)"
    ):
        knowledge_neurons(found, ["A", "B"])
    with pytest.raises(KnowledgeNeuronError, match="by='size' is not allowed"):
        knowledge_neurons(found, ["A"], by="size")  # type: ignore[arg-type]
    with pytest.raises(KnowledgeNeuronError, match="no fact has neurons"):
        neuron_effects(model, TASK.prompts, pd.DataFrame(columns=["fact", "layer", "neuron"]))
    with pytest.raises(KnowledgeNeuronError, match="factor=nan is not allowed"):
        neuron_effects(model, TASK.prompts, pd.DataFrame(columns=["fact", "layer", "neuron"]), float("nan"))
