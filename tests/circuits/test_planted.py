"""Planted programs run, and the methods find them and nothing in a null model."""

from __future__ import annotations

import pytest
import torch

from interp import run
from interp.circuits import CircuitError, Graph
from interp.circuits.planted import auc, planted, recovery

PROGRAMS = ("induction", "previous", "relay")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_planted_model_runs_its_program_and_a_null_model_does_not(program):
    found = planted(program, seed=2)
    right = found.metric(found.metric.read(run(found.model, found.clean).logits, _inputs(found.clean)))
    wrong = found.metric(found.metric.read(run(found.model, found.corrupted).logits, _inputs(found.corrupted)))
    assert bool((right > 0).double().mean() > 0.95) and bool((wrong < 0).double().mean() > 0.95)
    null = planted(program, seed=2, null=True)
    none = null.metric(null.metric.read(run(null.model, null.clean).logits, _inputs(null.clean)))
    assert bool((none.abs() < 1).all())


def _inputs(tokens):
    from interp import Inputs

    return Inputs(tokens)


def test_exact_effects_and_integrated_gradients_find_the_programs():
    table = recovery(methods=("eap-ig", "exact"), ablations=("corrupted",), seeds=(0,))
    aucs = {(bool(row.null), str(row.method), i): float(row.auc) for i, row in enumerate(table.itertuples())}  # type: ignore[arg-type]
    assert min(value for (null, _, _), value in aucs.items() if not null) > 0.9
    real, none = table[~table["null"]], table[table["null"]]
    assert (real[real["method"] == "exact"]["found"] == real[real["method"] == "exact"]["of_program"]).all()
    assert none["found"].sum() == none["false"].sum() == 0  # nothing is there to be found


def test_acdc_finds_a_program_by_its_thresholds():
    table = recovery(("previous",), ("acdc",), ("corrupted",), (0,), thresholds=(1e-2, 0.1, 0.5))
    assert table.set_index("null").loc[False, "auc"] > 0.95


def test_auc_is_the_chance_of_a_larger_score():
    admitted = torch.tensor([[True, True, True], [True, False, True]])
    scores = torch.tensor([[3.0, 1.0, 2.0], [2.0, 9.0, 0.0]])
    true = torch.tensor([[True, False, True], [False, False, False]])
    wanted = [(a > b) + 0.5 * (a == b) for a in (3.0, 2.0) for b in (1.0, 2.0, 0.0)]
    assert auc(scores, true, admitted) == pytest.approx(sum(wanted) / 6)


def test_what_counts_as_the_program_depends_on_the_ablation():
    found = planted("relay")
    assert int(found.edges("corrupted").sum()) == 3 and int(found.edges("zero").sum()) == 7
    assert Graph.of(found.model).admitted.shape == found.edges("zero").shape
    with pytest.raises(CircuitError, match="program='sort' is not allowed; allowed: 'induction', 'previous', 'relay'"):
        planted("sort")  # type: ignore[arg-type]
