"""Scrubbing keeps what a true hypothesis names and loses what a false one leaves out."""

from __future__ import annotations

import pytest
import torch
from circuits.test_edges import METRIC, a_model, two_prompts

from interp import Inputs, run
from interp.circuits import CircuitError, Graph, causal_scrub, scrubbing_loss
from interp.circuits.planted import planted
from interp.circuits.scrubbing import _draw


@pytest.mark.parametrize("kind", ["plain", "grouped", "no ffn"])
def test_a_model_that_may_depend_on_everything_is_the_model(kind):
    model, (clean, _) = a_model(kind), two_prompts()
    table = causal_scrub(model, clean, METRIC, dict.fromkeys(Graph.of(model).senders, "all"), samples=1)
    wanted = METRIC(METRIC.read(run(model, clean).logits, Inputs(clean)))
    assert torch.allclose(torch.tensor(table["value"].to_numpy()), wanted, atol=1e-12)
    own = causal_scrub(model, clean, METRIC, {name: [0, 1, 2] for name in Graph.of(model).senders}, samples=1)
    assert own["value"].equals(table["value"])  # classes of one example each


def test_the_planted_relay_is_accounted_for_by_its_program_and_by_nothing_less():
    found = planted("relay", n=64, noise=0.0)
    first = lambda inputs: inputs.tokens[:, 0]  # noqa: E731
    given = found.model, found.clean, found.metric
    true = {"input": "all", "a0.h2": first, "a1.h3": first}
    assert scrubbing_loss(causal_scrub(*given, true, 4)) < 0.02
    for less in ("a0.h2", "a1.h3"):
        assert scrubbing_loss(causal_scrub(*given, {**true, less: None}, 4)) > 0.5
    second = lambda inputs: inputs.tokens[:, 1]  # noqa: E731
    assert scrubbing_loss(causal_scrub(*given, {**true, "a1.h3": second}, 4)) > 0.5
    table = causal_scrub(*given, true, 2, seed=1)
    assert len(table) == 2 * 64 and table.equals(causal_scrub(*given, true, 2, seed=1))


def test_examples_are_drawn_within_their_class():
    labels = torch.tensor([0, 1, 0, 2, 1, 0])
    drawn = torch.stack([_draw(labels, 6, torch.Generator().manual_seed(i)) for i in range(200)])
    assert bool((labels[drawn] == labels).all()) and bool((drawn.sort(1)[0] == torch.arange(6)).all())
    share = (drawn[:, 0][:, None] == torch.tensor([0, 2, 5])).double().mean(0)
    assert bool(((share - 1 / 3).abs() < 0.1).all())


def test_bad_hypotheses_are_named():
    model, (clean, _) = a_model(), two_prompts()
    with pytest.raises(CircuitError, match=r"sender 'a9\.h0' is not one of this model's; allowed: input, a0\.h0"):
        causal_scrub(model, clean, METRIC, {"a9.h0": None})
    with pytest.raises(CircuitError, match=r"m0's labels have shape \(2,\); allowed: \[batch\] = \(3,\)"):
        causal_scrub(model, clean, METRIC, {"m0": [0, 1]})
    with pytest.raises(CircuitError, match="may depend on 'tokens' is not allowed"):
        causal_scrub(model, clean, METRIC, {"m0": "tokens"})
    with pytest.raises(CircuitError, match="1 example is not allowed"):
        causal_scrub(model, clean[:1], METRIC, {})
