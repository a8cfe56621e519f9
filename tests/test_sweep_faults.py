"""The sweep tests can fail: each deliberate fault of `sweep_faults.py` is caught by one of these checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import summary
import torch
from strategies import Case, small
from sweep import test_checkpoint as checkpoints
from sweep import test_execute as execution
from sweep import test_full as full
from sweep import test_paths as paths
from sweep import test_result as results
from sweep_cases import CASES, Pair, assert_close, by_hand, grid_cells, joint, metric_of, pair_of, values_of
from sweep_faults import SWEEP_FAULTS

from interp import Add, Freeze, Replace, Resample, Scale, Zero, patch_sweep, run, run_many
from interp.metrics import evaluate
from interp.sweep import SweepCheckError, SweepError

CAUGHT: list[str] = []
# Where a fault shows first, so that the others need not be run; elsewhere in the whole stream's sweep.
SOONER = {
    "the encoder's states are the base run's": "source",
    "half a block's rows not fed": "windows",
    "changed queries reach nothing": "queries",
    "one head's difference is overlooked": "heads",
    "a joint patch's later sites left out": "cells",
    "the base run's changes left out of the cells": "cells on changes",
    "a chunk's cells change each other": "windows",
    "a window is cut off at its centre": "windows",
    "the canary is ignored": "canary",
    "every cell of a batch has the first one's changes": "full",
    "a forward resumes a layer late": "full",
    "a budget is not looked at": "budget",
    "rows of a cell are underestimated": "budget",
    "the sampled check finds nothing": "metric",
    "a checkpoint of another sweep is taken": "other cells",
    "a checkpoint forgets what is done": "going on",
    "finished cells are lost when stopped": "going on",
    "the metric's slice of another position": "paths",
    "a table's axes are swapped": "table",
    "a path takes what is sent twice": "paths",
    "other components respond to a sender": "paths",
    "a receiver passes on what it did not receive": "paths",
    "full forwards of the cells before": "full",
}


@dataclass
class Known:
    """A sweep whose values were worked out by hand before any fault is made."""

    pair: Pair
    site: str
    by: tuple[str, ...]
    metric: Any
    window: int = 1

    def __post_init__(self) -> None:
        values = values_of(self.pair.model, self.pair.clean)
        by = tuple("layer" if axis == "window" else axis for axis in self.by)
        cells = grid_cells(self.pair.model, self.site, by, values, self.pair.clean)
        if self.window > 1:
            n = self.pair.model.config.n_layers
            each = [cells[i * len(cells) // n : (i + 1) * len(cells) // n] for i in range(n)]
            spans = [range(max(0, i - 1), min(n, i + 2)) for i in range(n)]
            cells = [joint(each[layer][i] for layer in span) for span in spans for i in range(len(each[0]))]
        self.expected = by_hand(self.pair, cells, self.metric)
        self.scale = float(values["logits" if "logits" in values else "decoder.logits"].abs().max())

    def check(self) -> None:
        """The fast engine gives these values, and most of them are not the base run's."""
        got = patch_sweep(self.pair.model, self.pair.clean, self.pair.corrupted, self.metric, self.site, self.by, check=0,
                          window=self.window)  # fmt: skip
        assert_close(got.values[self.site].flatten(0, -2), self.expected, self.scale)
        assert got.values[self.site].shape[:-1] == tuple(len(one) for one in got.coordinates[self.site])


@dataclass
class Cells:
    """Cells of interventions whose values are single runs', made before any fault."""

    pair: Pair
    metric: Any
    change: list

    def __post_init__(self) -> None:
        clean = run(self.pair.model, self.pair.clean, record="resid_pre")
        base = run(self.pair.model, self.pair.corrupted, record="ffn_out", change=self.change)
        self.cells = [
            [Replace("1.resid_pre", clean, at=1), Freeze("1.ffn_out", base, at=1), Freeze("2.ffn_out", base, at=1)],
            [Zero("0.q", at=(4, 1)), Add("1.ffn_act", 1.0, at=(slice(3, 5), 2))],
            Add("1.scores", 2.0, at=(0, 4, 1)),
            Zero("2.ffn_out", at=4),
        ]
        many = [cell if isinstance(cell, list) else [cell] for cell in self.cells]
        logits = [run(self.pair.model, self.pair.corrupted, change=[*self.change, *cell]).logits for cell in many]
        self.expected = torch.stack([evaluate(self.metric, one, self.pair.corrupted) for one in logits])

    def check(self) -> None:
        """All at once they are what they are one by one."""
        got = run_many(self.pair.model, self.pair.corrupted, self.cells, self.metric, change=self.change, check=0)
        assert_close(got.values["cells"], self.expected)


def check_full(pair: Pair) -> None:
    """Full forwards of changes that mix examples, against the reference."""
    cells = [Resample("1.z", 1), Resample("0.ffn_out", 2), Zero("2.z", at=3)]
    fast, slow = (run_many(pair.model, pair.corrupted, cells, metric_of("last", pair), engine=engine, check=0).values["cells"]
                  for engine in ("fast", "reference"))  # fmt: skip
    assert_close(fast, slow)


def with_patches(test: Any, *arguments: Any) -> None:
    """A test that needs a monkeypatch."""
    with pytest.MonkeyPatch.context() as patch:
        test(patch, *arguments)


@pytest.fixture(scope="module")
def checks(tmp_path_factory):
    """Name -> call."""
    modern, window = (pair_of(CASES[name], (0, 1, 3)) for name in ("modern", "window"))
    three = pair_of(Case(small(n_layers=3, n_heads=2), ((0, 0),) * 3), (1, 3))
    padded, two, post = (
        pair_of(CASES[name], (0, 1, 3)) for name in ("left padding", "two stacks, padded", "post-norm")
    )
    wide = pair_of(Case(small(n_layers=3), ((0, 0),) * 2, length=5), (1,))
    kept = pair_of(Case(small(), length=6), (1,))
    known = {
        "stream": Known(modern, "resid_pre", ("layer", "position"), metric_of("last", modern)),
        "heads": Known(modern, "z", ("head", "layer"), metric_of("all", modern)),
        "windows": Known(window, "ffn_out", ("window", "position"), metric_of("last", window), 3),
        "neurons": Known(post, "ffn_act", ("layer", "neuron"), metric_of("last", post)),
        "keys": Known(three, "k", ("layer", "position"), metric_of("middle", three)),
        "padding": Known(padded, "resid_pre", ("layer", "role"), metric_of("kl", padded)),
        "queries": Known(padded, "q", ("layer", "head"), metric_of("last", padded)),
        "source": Known(two, "encoder.resid_post", ("layer", "role"), metric_of("last", two)),
    }
    always = [Scale("0.q", 2.0, at=(4, 0)), Add("1.ffn_act", 1.0, at=(slice(3, 5), 3))]
    listed = {
        "cells": Cells(three, metric_of("last", three), []),
        "cells on changes": Cells(three, metric_of("last", three), always),
    }
    path = tmp_path_factory.mktemp("faults")
    names = iter(range(1000))
    return {
        **{name: one.check for name, one in {**known, **listed}.items()},
        "full": lambda: check_full(modern),
        "canary": lambda: with_patches(
            full.test_cells_share_a_forward_only_where_the_canary_has_the_single_runs_bits, 1
        ),
        "table": results.test_every_number_of_a_table_is_the_tensors,
        "paths": lambda: paths.check(three, {"v": ("2.v", ()), "out": ("logits", ())}, "z"),
        "two paths": lambda: paths.check(post, {"v": ("1.v", ())}, "attn_out", ("layer", "position")),
        "behind": paths.test_a_path_from_behind_has_no_effect_at_all,
        "out of memory": lambda: with_patches(execution.test_a_chunk_that_does_not_fit_is_halved, wide),
        "budget": lambda: with_patches(execution.test_a_chunk_takes_no_more_rows_than_the_budget_allows, "modern"),
        "refused budget": lambda: execution.test_a_budget_smaller_than_a_cell_is_refused_with_both_numbers(wide),
        "metric": lambda: execution.test_a_metric_that_reads_what_it_does_not_declare_is_noticed(
            wide, execution.Careless
        ),
        "other cells": lambda: checkpoints.test_another_sweeps_checkpoint_is_refused(
            path / str(next(names)), kept, "direction", "memory"
        ),
        "going on": lambda: with_patches(
            execution.test_an_interrupted_sweep_goes_on_where_it_was, path, wide, "memory", 2
        ),
    }


def first_failure(checks):
    """The first check that fails; anything but a failed check is a broken fault, and passes through."""
    for name, check in checks.items():
        try:
            check()
        except (AssertionError, SweepCheckError, SweepError, pytest.fail.Exception):
            return name
    return None


def test_all_checks_pass_without_a_fault(checks):
    assert first_failure(checks) is None


@pytest.mark.parametrize("name", SWEEP_FAULTS)
def test_fault_is_caught(checks, name):
    likely = SOONER.get(name, "stream")
    with SWEEP_FAULTS[name]():
        found = first_failure({likely: checks[likely], **checks})
    assert found is not None, f"no check noticed: {name}"
    CAUGHT.append(name)


def test_report():
    assert len(SWEEP_FAULTS) >= 40
    summary.LINES.append(f"sweep faults: {len(CAUGHT)} of {len(SWEEP_FAULTS)} caught")
