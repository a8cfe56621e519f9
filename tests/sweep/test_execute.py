"""Chunks under a budget, estimates, interruptions, and the sampled check."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from strategies import Case, small
from sweep_cases import CASES, assert_close, pair_of

from interp import Add, Metric, Resample, Scale, logit_difference, patch_sweep, plan_sweep, run_many
from interp.sweep import Checkpoint, SweepCheckError, SweepError, SweepInterrupted
from interp.sweep.execute import Job, free_memory
from interp.sweep.full import Full
from interp.sweep.walk import Walk

READ = logit_difference(1, 2)


@pytest.fixture(scope="module")
def pair():
    return pair_of(Case(small(n_layers=3), ((0, 0),) * 2, length=5), (1,))


def sweep(pair, sites="resid_pre", by=("layer", "position"), **options):
    return patch_sweep(pair.model, pair.clean, pair.corrupted, READ, sites, by, **options)  # type: ignore[arg-type]


def plan(pair, sites="resid_pre", by=("layer", "position"), **options):
    return plan_sweep(pair.model, pair.clean, pair.corrupted, READ, sites, by, **options)  # type: ignore[arg-type]


def least(pair, **options) -> float:
    """The smallest budget that is allowed."""
    job = plan(pair, **options).jobs[0]
    return job.cost.bytes_per_row * job.cost.most_rows


# The budget


def test_results_do_not_depend_on_the_budget(pair):
    whole = sweep(pair, ["resid_pre", "z"], ("layer",), check=0)
    for factor in (1.0, 2.5):
        budget = factor * max(least(pair, sites=site, by=("layer",)) for site in ("resid_pre", "z"))
        parts = sweep(pair, ["resid_pre", "z"], ("layer",), budget=budget, check=0)
        for site in whole.values:
            assert_close(parts.values[site], whole.values[site])
        assert parts.work["token_layers"] == whole.work["token_layers"]


@pytest.mark.parametrize("name", ["modern", "left padding", "two stacks, padded"])
def test_a_chunk_takes_no_more_rows_than_the_budget_allows(monkeypatch, name):
    pair = pair_of(CASES[name], (0, 1))
    stack = "decoder." if pair.model.encoder is not None else ""
    seen, cells = [], []
    blocks = type(pair.model.blocks[0])

    def counted(part):
        original = getattr(blocks, part)

        def run_part(self, x, *arguments):
            if x.shape[0] == 1:
                seen.append(x.shape[1])
            return original(self, x, *arguments)

        monkeypatch.setattr(blocks, part, run_part)

    for part in ("mix", "feed", "keys_values"):
        counted(part)
    original = Walk.__call__
    monkeypatch.setattr(
        Walk, "__call__", lambda self, some, touched: cells.append(len(some)) or original(self, some, touched)
    )
    sites, by = [stack + "resid_pre"], ("layer", "role")
    job = plan_sweep(pair.model, pair.clean, pair.corrupted, READ, sites, by).jobs[0]
    for factor in (1.0, 3.0):
        budget = factor * job.cost.bytes_per_row * job.cost.most_rows
        seen.clear()
        patch_sweep(pair.model, pair.clean, pair.corrupted, READ, sites, by, budget=budget, check=0)
        assert seen and max(seen) <= budget / job.cost.bytes_per_row
    if name != "left padding":  # whose few rows are one chunk at once
        assert len(set(cells)) > 1, "more memory, larger chunks"


def test_bitwise_batches_keep_to_the_budget_too(monkeypatch, pair):
    sizes, original = [], Full._forward
    monkeypatch.setattr(
        Full, "_forward", lambda self, start, changes: sizes.append(len(changes)) or original(self, start, changes)
    )
    job = plan(pair, by=("layer", "position"), exact="bitwise").jobs[0]
    sweep(pair, exact="bitwise", budget=3.2 * job.cost.bytes_per_row * job.cost.most_rows, check=0)
    assert max(sizes) <= 3


def test_full_forwards_keep_to_the_budget(monkeypatch, pair):
    sizes, original = [], Full._forward
    monkeypatch.setattr(
        Full, "_forward", lambda self, start, changes: sizes.append(len(changes)) or original(self, start, changes)
    )
    cells = [Resample("1.z", seed) for seed in range(8)]
    whole = run_many(pair.model, pair.clean, cells, READ, check=0)
    assert sizes == [8]
    sizes.clear()
    with pytest.raises(SweepError) as refused:
        run_many(pair.model, pair.clean, cells, READ, budget=1.0)
    need = float(str(refused.value).split()[-1].replace(",", ""))
    parts = run_many(pair.model, pair.clean, cells, READ, budget=need * 3.2, check=0)
    assert sizes == [3, 3, 2]
    assert_close(parts.values["cells"], whole.values["cells"])


def test_a_budget_smaller_than_a_cell_is_refused_with_both_numbers(pair):
    need = least(pair)
    with pytest.raises(SweepError, match=f"budget=1,000 bytes .* at least {need:,.0f}"):
        sweep(pair, budget=1000)
    with pytest.raises(SweepError, match="allowed: at least"):
        sweep(pair, budget=need * 0.999)
    sweep(pair, budget=need * 1.001, check=0)
    for wrong in (0, -5, True, "much"):
        with pytest.raises(SweepError, match="budget="):
            sweep(pair, budget=wrong)


def test_a_chunk_that_does_not_fit_is_halved(monkeypatch, pair):
    sizes, original = [], Walk.__call__

    def small_device(self, cells, touched):
        sizes.append(len(cells))
        if len(cells) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return original(self, cells, touched)

    whole = sweep(pair, check=0)
    monkeypatch.setattr(Walk, "__call__", small_device)
    got = sweep(pair, check=0)
    assert_close(got.values["resid_pre"], whole.values["resid_pre"])
    assert max(sizes) == 15 and sum(size for size in sizes if size <= 4) == 15


def test_a_cell_that_does_not_fit_is_an_error(monkeypatch, pair):
    def none(self, cells, touched):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(Walk, "__call__", none)
    with pytest.raises(SweepError, match="one cell of resid_pre does not fit"):
        sweep(pair)


def test_free_memory_is_a_number_of_bytes():
    assert free_memory(torch.device("cpu")) > 1 << 20


# Estimates


def test_an_estimate_counts_the_layouts_work_and_computes_nothing(monkeypatch, pair):
    made = plan(pair)
    monkeypatch.setattr(Walk, "__call__", None)
    estimate = made.estimate
    monkeypatch.undo()
    assert estimate.cells == 15 and estimate.cells_at_once == 15
    assert "15 cells" in str(estimate) and "MiB" in repr(made) and "resid_pre" in repr(made)
    job = made.jobs[0]
    work = job.executor.count(np.arange(15), job._touched(np.arange(15)))
    assert not job.executor.work, "counting is not working"
    got = made.run(check=0, progress=False)
    assert work == {name: count for name, count in got.work.items() if name != "unembedded rows"}
    cost = job.cost
    assert estimate.flops == pytest.approx(work["token_layers"] * cost.per_token("full")
                                           + work["key_value_token_layers"] * cost.per_token("keys")
                                           - work["reading_token_layers"] * cost.per_token("qkv"))  # fmt: skip


def test_an_estimate_of_a_larger_sweep_is_larger(pair):
    some, more = plan(pair), plan(pair, ["resid_pre", "z"], ("layer",))
    assert plan(pair, ["resid_pre", "attn_out"]).estimate.cells == 2 * some.estimate.cells
    assert more.estimate.flops > 0 and more.estimate.memory > 0 and more.estimate.seconds > 0
    tight = plan(pair, budget=least(pair) * 1.5).estimate
    assert tight.cells_at_once < some.estimate.cells_at_once and tight.memory <= least(pair) * 1.5
    assert plan(pair, exact="bitwise").estimate.flops > some.estimate.flops, "full forwards cost more"


def test_a_sweep_that_changes_nothing_can_be_estimated():
    pair = pair_of(Case(small()), ())
    assert plan(pair).estimate.flops == 0


# Interruption


def stopping(monkeypatch, after: int) -> list[int]:
    """The walk stops like Ctrl-C after so many chunks; what it was given."""
    given, original = [], Walk.__call__

    def walk(self, cells, touched):
        if len(given) == after:
            raise KeyboardInterrupt
        given.append(len(cells))
        return original(self, cells, touched)

    monkeypatch.setattr(Walk, "__call__", walk)
    return given


@pytest.mark.parametrize("where", ["memory", "file"])
@pytest.mark.parametrize("after", [0, 5])
def test_an_interrupted_sweep_goes_on_where_it_was(monkeypatch, tmp_path, pair, where, after):
    budget = least(pair) * 1.2
    options = {"sites": ["resid_pre", "ffn_out"], "budget": budget}
    whole = sweep(pair, check=0, **options)
    path = tmp_path / "part" / "sweep.safetensors" if where == "file" else None
    given = stopping(monkeypatch, after)
    with pytest.raises(SweepInterrupted, match="goes on") as stopped:
        sweep(pair, check=0, checkpoint=path, **options)
    assert isinstance(stopped.value, KeyboardInterrupt)
    monkeypatch.undo()
    kept = stopped.value.checkpoint
    finished = sum(int(done.sum()) for _, done in kept.parts.values())
    assert finished == sum(given) and (path is None or path.exists())
    rest = stopping(monkeypatch, -1)
    got = sweep(pair, check=0, checkpoint=path or kept, **options)
    assert sum(rest) == 30 - finished, "only what was missing"
    for site in whole.values:
        assert torch.equal(got.values[site], whole.values[site])
    rest.clear()
    again = sweep(pair, check=0, checkpoint=path or kept, **options)
    assert not rest and torch.equal(again.values["ffn_out"], whole.values["ffn_out"]), "finished: nothing is left to do"


def test_every_engine_can_be_interrupted(monkeypatch, pair):
    whole = sweep(pair, engine="reference")
    made, original = [], Job._reference

    def reference(self, cell):
        if len(made) == 7:
            raise KeyboardInterrupt
        made.append(cell)
        return original(self, cell)

    monkeypatch.setattr(Job, "_reference", reference)
    with pytest.raises(SweepInterrupted, match="stopped with 7 of 15 cells of resid_pre done") as stopped:
        sweep(pair, engine="reference")
    monkeypatch.setattr(Job, "_reference", original)
    got = sweep(pair, engine="reference", checkpoint=stopped.value.checkpoint)
    assert got.work["forwards"] == 8 and torch.equal(got.values["resid_pre"], whole.values["resid_pre"])


# The sampled check


class Careless(Metric):
    """Says that it reads the last position, and reads the one before."""

    def read(self, logits, inputs):
        return super().read(logits.roll(1, 1), inputs)


class Greedy(Metric):
    """Says that it reads two entries, and reads the whole vocabulary."""

    def read(self, logits, inputs):
        return super().read(logits, inputs) * (1 + logits[:, -1:].mean(-1, keepdim=True).square())


@pytest.mark.parametrize("kind", [Careless, Greedy])
def test_a_metric_that_reads_what_it_does_not_declare_is_noticed(pair, kind):
    metric = kind(READ.name, READ.function, READ.positions, READ.entries)
    with pytest.raises(SweepCheckError, match="does not declare, or give another value when it is called again"):
        patch_sweep(pair.model, pair.clean, pair.corrupted, metric, "resid_pre", ("layer", "position"))
    unchecked = patch_sweep(pair.model, pair.clean, pair.corrupted, metric, "resid_pre", check=0)
    assert (unchecked.checked, unchecked.checks) == (0.0, 0)
    patch_sweep(pair.model, pair.clean, pair.corrupted, metric, "resid_pre", engine="reference")


def test_the_check_looks_at_cells_that_change_and_keeps_the_largest_difference(monkeypatch, pair):
    checked, original = [], Job._full_values

    def values(self, pairs):
        checked.extend(pairs)
        return [value + 1e-11 for value in original(self, pairs)]

    monkeypatch.setattr(Job, "_full_values", values)
    got = sweep(pair, check=5)
    assert got.checks == 5 == len(set(checked))
    assert got.checked == pytest.approx(1e-11, rel=0.01)
    moved = (got.values["resid_pre"] != got.corrupted).flatten(0, 1)
    assert all(moved[cell, example] for cell, example in checked)
    checked.clear()
    sweep(pair, check=500)
    assert len(checked) == int(moved.sum()), "no more than there are"


def test_the_message_names_the_cell(monkeypatch, pair):
    monkeypatch.setattr(Job, "_full_values", lambda self, pairs: [1e6] * len(pairs))
    with pytest.raises(
        SweepCheckError, match=r"resid_pre, layer \d, position \d, example \d: .* full run gives 1e\+06"
    ):
        sweep(pair)


def test_a_nan_is_a_difference(monkeypatch, pair):
    monkeypatch.setattr(Job, "_full_values", lambda self, pairs: [float("nan")] * len(pairs))
    with pytest.raises(SweepCheckError):
        sweep(pair)


@pytest.mark.parametrize("check", [-1, True, 1.5, None])
def test_a_check_is_a_count(pair, check):
    with pytest.raises(SweepError, match="check="):
        sweep(pair, check=check)


@pytest.mark.parametrize("name", ["everything", "prefix, padded", "two stacks, padded"])
def test_checks_of_one_example_alone_agree(name):
    """A cell of a padded, segmented, prefixed or translated example is checked without the others."""
    pair = pair_of(CASES[name], (0, 1))
    stack = "decoder." if pair.model.encoder is not None else ""
    sites = [stack + "resid_pre", stack + "ffn_out"]
    got = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, sites, ("layer", "role"), check=20)
    assert got.checks > 4 and got.checked < 1e-13


def test_a_function_that_compares_examples_can_be_checked(pair):
    def centred(logits):
        return logits[:, -1, 3] - logits[:, -1, 3].mean()

    got = patch_sweep(pair.model, pair.clean, pair.corrupted, centred, "resid_pre", check=4)
    slow = patch_sweep(pair.model, pair.clean, pair.corrupted, centred, "resid_pre", engine="reference")
    assert_close(got.values["resid_pre"], slow.values["resid_pre"])


def test_half_precision_is_checked_with_its_own_tolerance(pair):
    half = replace(pair, model=Case(small(n_layers=3)).build()[0].bfloat16())
    got = sweep(half, check=4)
    assert got.checks == 4 and got.values["resid_pre"].dtype == torch.float32
    assert sweep(replace(pair, model=Case(small()).build()[0].float()), check=4).checked < 1e-4


def test_progress_counts_cells_that_were_done_before(capsys, pair):
    kept = Checkpoint()
    sweep(pair, checkpoint=kept, progress=True)
    assert "15/15" in capsys.readouterr().err
    sweep(pair, checkpoint=kept, progress=True)
    assert "15/15" in capsys.readouterr().err


def test_work_is_stated_for_every_engine(pair):
    slow = sweep(pair, engine="reference")
    assert slow.work == {"token_layers": 15 * 10 * 3, "forwards": 15} and slow.checks == 0
    full = run_many(pair.model, pair.clean, [Scale("0.z", 2.0)], READ, exact="bitwise")
    assert full.work["unembedded rows"] >= 10


# Not yet


@pytest.mark.parametrize("engine", ["fast", "reference"])
def test_a_plan_that_runs_twice_counts_each_runs_work(pair, engine):
    made = plan(pair, engine=engine)
    assert made.run(progress=False).work == made.run(progress=False).work


def test_embedding_keeps_to_the_budget(monkeypatch, pair):
    cells, budget = [Add("embed", 1.0 + i, at=4) for i in range(40)], least(pair) * 1.01
    seen, original = [], type(pair.model).embed
    monkeypatch.setattr(
        type(pair.model),
        "embed",
        lambda self, inputs, *rest: seen.append(inputs.tokens.numel()) or original(self, inputs, *rest),
    )
    run_many(pair.model, pair.clean, cells, READ, budget=budget, check=0)
    assert max(seen) <= pair.clean.tokens.numel()


def test_stopping_during_the_check_keeps_what_was_finished(monkeypatch, pair):
    def stop(self, pairs):
        raise KeyboardInterrupt

    monkeypatch.setattr(Job, "_full_values", stop)
    try:
        sweep(pair, ["resid_pre", "z"], ("layer",))
    except KeyboardInterrupt as stopped:
        assert isinstance(stopped, SweepInterrupted)
