"""Metrics against their definitions, and wrong shapes refused."""

from __future__ import annotations

import pytest
import torch

from interp import Inputs, kl_divergence, log_probability, logit_difference, loss, probability, run
from interp.at import SelectionError
from interp.metrics import Metric, MetricError, evaluate
from interp.model.inputs import InputsError


def test_values_by_definition(model, tokens):
    got = run(model, tokens)
    last = got.logits[:, -1]
    correct, wrong = torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6])
    rows = torch.arange(3)
    assert torch.equal(
        evaluate(logit_difference(correct, wrong), got.logits, got.inputs), last[rows, correct] - last[rows, wrong]
    )
    assert torch.equal(evaluate(logit_difference(1, 2), got.logits, got.inputs), last[:, 1] - last[:, 2])
    chance = last.exp() / last.exp().sum(-1, keepdim=True)
    assert torch.allclose(evaluate(probability(correct), got.logits, got.inputs), chance[rows, correct], atol=1e-14)
    assert torch.allclose(
        evaluate(log_probability(5, position=2), got.logits, got.inputs), got.logits[:, 2].log_softmax(-1)[:, 5]
    )


def test_kl_is_zero_to_itself_and_the_sum_elsewhere(model, tokens):
    got, other = run(model, tokens), run(model, (tokens + 1) % 13)
    assert evaluate(kl_divergence(got), got.logits, got.inputs).abs().max() < 1e-14
    p, q = got.logits[:, -1].softmax(-1), other.logits[:, -1].softmax(-1)
    expected = (p * (p / q).log()).sum(-1)
    assert torch.allclose(evaluate(kl_divergence(got), other.logits, other.inputs), expected, atol=1e-12)


def test_loss_skips_padding(model, tokens):
    plain = run(model, tokens[:1, :4])
    padded = Inputs(torch.cat([tokens[:1, :4], tokens[:1, :2]], 1), mask=torch.tensor([[True] * 4 + [False] * 2]))
    got = run(model, padded)
    expected = torch.nn.functional.cross_entropy(plain.logits[0, :-1], tokens[0, 1:4])
    assert torch.allclose(evaluate(loss(plain.inputs), plain.logits, plain.inputs), expected[None], atol=1e-12)
    assert torch.allclose(evaluate(loss(padded), got.logits, padded), expected[None], atol=1e-10)


def test_position_minus_one_is_the_last_real_token(model, tokens):
    mask = torch.ones(3, 7).bool()
    mask[1, 4:] = False
    inputs = Inputs(tokens, mask=mask, roles={"here": torch.tensor([0, 1, 2])})
    got = run(model, inputs)
    expected = torch.stack([got.logits[0, 6, 2], got.logits[1, 3, 2], got.logits[2, 6, 2]])
    at = Metric("logit", lambda x: x[:, 0, 0], -1, torch.tensor([2]))
    assert torch.equal(evaluate(at, got.logits, inputs), expected)
    named = Metric("logit", lambda x: x[:, 0, 0], "here", torch.tensor([2]))
    assert torch.equal(evaluate(named, got.logits, inputs), got.logits[torch.arange(3), torch.arange(3), 2])


@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda logits: logits, r"shape \[batch\] = \(3,\), got torch.float64 \(3, 7, 13\)"),
        (lambda logits: logits.mean(), r"got torch.float64 \(\)"),
        (lambda logits: 1.0, "got 1.0"),
        (lambda logits: logits[:, -1].argmax(-1), "got torch.int64"),
    ],
)
def test_a_metric_of_the_wrong_shape_is_refused(model, tokens, function, words):
    got = run(model, tokens)
    with pytest.raises(MetricError, match=words):
        evaluate(function, got.logits, got.inputs)


def test_token_ids_outside_the_vocabulary_are_refused(model, tokens):
    got = run(model, tokens)
    for metric in (logit_difference(13, 0), probability(-1), log_probability(torch.tensor([0, 1, 99]))):
        with pytest.raises(SelectionError, match=r"0 … 12"):
            evaluate(metric, got.logits, got.inputs)
    with pytest.raises(SelectionError, match="must be an int"):
        probability(0.5)


def test_a_row_without_a_next_token_is_refused_and_half_precision_is_widened(model, tokens):
    mask = torch.ones(3, 7).bool()
    mask[2, 1:] = False
    with pytest.raises(InputsError, match=r"example\(s\) \[2\]"):
        loss(Inputs(tokens, mask=mask))
    logits = run(model, tokens).logits.bfloat16()
    assert evaluate(probability(3), logits, Inputs(tokens)).dtype == torch.float32
