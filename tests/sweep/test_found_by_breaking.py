"""What a breaker found in the sweep engine, and must stay fixed."""

from __future__ import annotations

import copy
from functools import partial

import pytest
import torch

from interp import (
    Add,
    Metric,
    Zero,
    ablation_sweep,
    knock_out_sweep,
    logit_difference,
    patch_sweep,
    run,
    run_many,
)
from interp.metrics import MetricError
from interp.sweep import SweepError
from interp.sweep.checkpoint import mark_of

METRIC = logit_difference(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]))


@pytest.fixture
def pair(tokens):
    corrupted = tokens.clone()
    corrupted[:, 3] = (corrupted[:, 3] + 5) % 13
    return tokens, corrupted


def test_a_metric_that_works_in_place_spoils_nothing(model, pair):
    for spoiling, plain in (
        (lambda x: x.mul_(2)[:, -1, 0], lambda x: (x * 2)[:, -1, 0]),
        (Metric("a", lambda x: x.mul_(2)[:, 0, 3], -1), Metric("b", lambda x: (x * 2)[:, 0, 3], -1)),
    ):
        got, expected = (
            patch_sweep(model, *pair, metric, "resid_pre").values["resid_pre"] for metric in (spoiling, plain)
        )
        assert torch.allclose(got, expected, atol=1e-12)


def test_a_file_of_a_model_with_other_weights_is_refused(model, tokens, tmp_path):
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.weight("W_U")[:, 7] *= -3  # which the metric does not read
    cells = [Zero("1.z")]
    run_many(model, tokens, cells, METRIC, checkpoint=tmp_path / "kept.safetensors")
    with pytest.raises(SweepError, match="another sweep"):
        run_many(other, tokens, cells, METRIC, checkpoint=tmp_path / "kept.safetensors")


@pytest.mark.parametrize("site", ["final", "final_scale", "final_hat", "logits"])
def test_sites_behind_the_last_block_are_checked_too(model, pair, site):
    got = patch_sweep(model, *pair, METRIC, site, "position", check=20)
    assert got.checks and got.checked < 1e-10
    slow = patch_sweep(model, *pair, METRIC, site, "position", engine="reference")
    assert torch.allclose(got.values[site], slow.values[site], atol=1e-12)


def test_a_metric_that_is_nan_is_nan(model, pair):
    got = patch_sweep(model, *pair, lambda x: (x[:, -1, 0] - 1e6).sqrt(), "z", "layer")
    assert got.values["z"].isnan().all()


def test_marks_do_not_depend_on_the_process():
    class Reads:
        def __init__(self, k):
            self.k = k

    assert mark_of(Reads(1)) == mark_of(Reads(1)) != mark_of(Reads(2))
    function = partial(max, key=len)
    assert mark_of(function) == mark_of(partial(max, key=len)) and mark_of({"b", "a"}) == mark_of({"a", "b"})


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda m, a, c: patch_sweep(m, a, c, METRIC, [("z", "z")]), SweepError, "twice"),
        (lambda m, a, c: patch_sweep(m, a, c, "logit_difference"), MetricError, "a Metric such as"),
        (lambda m, a, c: patch_sweep(m, a, c, METRIC, checkpoint=3), SweepError, "a path"),
        (lambda m, a, c: run_many(m, a, Zero("1.z"), METRIC), SweepError, "a list of interventions"),
        (lambda m, a, c: run_many(m, a, [None], METRIC), SweepError, "allowed: interventions"),
        (lambda m, a, c: knock_out_sweep(m, a, METRIC, {"x": (-1,)}), SweepError, r"\(query, key\)"),
        (lambda m, a, c: knock_out_sweep(m, a, METRIC, [(1, 2)]), SweepError, r"\(query, key\)"),
        (lambda m, a, c: ablation_sweep(m, a, METRIC, "mean", reference=run(m, a)), SweepError, "a Run that recorded"),
        (lambda m, a, c: ablation_sweep(m, a, METRIC, "noise", std=-1.0), SweepError, "std=-1.0"),
    ],
)
def test_arguments_that_cannot_be_meant(model, pair, call, error, words):
    with pytest.raises(error, match=words):
        call(model, *pair)


def test_axes_may_be_any_iterable(model, pair):
    got = patch_sweep(model, *pair, METRIC, "z", by=(axis for axis in ("layer", "head")))  # type: ignore[arg-type]
    assert got.values["z"].shape == (2, 4, 3)
    assert run_many(model, pair[0], [Add("0.z", 0.0)], METRIC).values["cells"].shape == (1, 3)
