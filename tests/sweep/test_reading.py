"""A metric from the entries that it declares alone: the same number as from full logits."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from strategies import VOCAB, Case, small
from sweep_cases import CASES, METRICS, metric_of, pair_of

from interp import Metric, logit_difference, patch_sweep, probability
from interp.at import SelectionError
from interp.metrics import MetricError, evaluate
from interp.sweep.reading import Reading


@pytest.fixture(scope="module")
def pair():
    return pair_of(replace(CASES["modern"], padding=((0, 0),) * 3))


@pytest.mark.parametrize("name", METRICS)
def test_a_slice_is_enough(pair, name):
    metric, many = metric_of(name, pair), torch.randn(4, 3, 5, VOCAB, dtype=torch.float64)
    reading = Reading(metric, pair.clean, VOCAB)
    slices = torch.stack([reading.of_run(one) for one in many])
    expected = torch.stack([evaluate(metric, one, pair.clean) for one in many])
    assert torch.allclose(reading.of_slices(slices), expected, rtol=1e-14)
    assert torch.equal(reading.of_slices(slices[:1]), expected[:1]) and torch.equal(
        reading.of_full(many[2]), expected[2]
    )
    read = slices.shape[2:]
    assert read == {"last": (1, 2), "middle": (1, 2), "role": (1, VOCAB), "kl": (1, VOCAB), "loss": (5, VOCAB),
                    "all": (5, 1), "plain": (5, VOCAB)}[name]  # fmt: skip


def test_needed_positions_are_those_read():
    pair = pair_of(CASES["left padding"])
    needed = Reading(logit_difference(1, 2, position="own"), pair.clean, VOCAB).needed
    assert needed.sum(1).tolist() == [1, 1, 1]
    assert needed.argmax(1).tolist() == pair.clean.roles["own"].tolist()
    assert Reading(lambda logits: logits.sum((1, 2)), pair.clean, VOCAB).needed.all()
    assert Reading(logit_difference(1, 2, position=-2), pair.clean, VOCAB).needed.argmax(1).tolist() == [4, 4, 4]


def test_positions_of_right_padded_prompts_count_from_their_ends():
    pair = pair_of(CASES["right padding"])
    assert Reading(logit_difference(1, 2), pair.clean, VOCAB).needed.argmax(1).tolist() == [3, 5]


def test_a_metric_that_cannot_be_mapped_is_called_per_cell(pair):
    """Python control flow on values: `vmap` refuses it, the sweep does not."""
    calls = []

    def largest(x):
        calls.append(x.shape)
        return x[:, 0, 0] if float(x.sum()) > 0 else x[:, 0, 1]

    metric = Metric("largest", largest, -1, torch.tensor([[1, 2]]))
    fast, slow = (patch_sweep(pair.model, pair.clean, pair.corrupted, metric, "z", engine=engine, check=0).values["z"]
                  for engine in ("fast", "reference"))  # fmt: skip
    assert torch.allclose(fast, slow, rtol=1e-12) and set(calls) == {(3, 1, 2)}


def test_a_mapping_that_gives_other_bits_is_not_used(pair, monkeypatch):
    metric, many = probability(3), torch.randn(5, 3, 1, VOCAB)
    expected = torch.stack([metric(one) for one in many])
    original, used = torch.func.vmap, []

    def sloppy(function):
        return lambda x: used.append(1) or original(function)(x) * (1 + 1e-6)

    monkeypatch.setattr(torch.func, "vmap", sloppy)
    reading = Reading(metric, pair.clean, VOCAB)
    assert torch.equal(reading.of_slices(many), expected) and torch.equal(reading.of_slices(many), expected)
    assert len(used) == 1, "tried once"


@pytest.mark.parametrize("value", [lambda x: x.mean(), lambda x: x[:, 0], lambda x: x[:, 0, 0].long(), lambda x: 3.0])
def test_a_metric_returns_one_float_per_example(pair, value):
    with pytest.raises(MetricError, match=r"must return floats of shape \[batch\]"):
        patch_sweep(pair.model, pair.clean, pair.corrupted, Metric("m", value, -1, torch.tensor([[1, 2]])), "z")


def test_what_is_not_there_cannot_be_read(pair):
    with pytest.raises(SelectionError, match=f"reads token id {VOCAB}"):
        patch_sweep(pair.model, pair.clean, pair.corrupted, logit_difference(1, VOCAB), "z")
    with pytest.raises(SelectionError, match="position"):
        patch_sweep(pair.model, pair.clean, pair.corrupted, logit_difference(1, 2, position=5), "z")
    padded = pair_of(CASES["left padding"])
    with pytest.raises(SelectionError, match="padding"):
        patch_sweep(padded.model, padded.clean, padded.corrupted, logit_difference(1, 2, position=0), "z", ("layer",))


def test_half_precision_logits_are_read_wide():
    pair = pair_of(Case(small()), (1,))
    reading = Reading(logit_difference(1, 2), pair.clean, VOCAB)
    assert reading.of_slices(torch.randn(3, 2, 1, 2).bfloat16()).dtype == torch.float32
