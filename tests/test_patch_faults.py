"""The tests of patching and reading can fail: each deliberate fault of `patch_faults.py` is caught by one of them."""

from __future__ import annotations

import pytest
import summary
import test_interventions as interventions
import test_metrics as metrics
import test_run as runs
import torch
from analyses import test_ffn_memory as memory
from analyses import test_logit_lens as lens
from patch_faults import PATCH_FAULTS
from sweep import test_patch as sweeps

from interp.at import SelectionError

CAUGHT: list[str] = []


@pytest.fixture(scope="module")
def checks(model, tokens):
    """Name -> call; each is a test of the suite, called as a plain function."""
    other, changed = (tokens + 3) % 13, tokens.clone()
    changed[:, 3] = (changed[:, 3] + 5) % 13
    pair = (tokens, changed)
    return {
        "at": lambda: interventions.test_at_means_what_indexing_means(
            model, tokens, "0.resid_mid", 2, (slice(None), 2)
        ),
        "from a run": lambda: interventions.test_replace_from_a_run_takes_the_same_site_and_index(model, tokens, other),
        "whole site": lambda: interventions.test_patching_attn_out_equals_adding_the_difference_to_the_stream(
            model, tokens, other
        ),
        "mean": lambda: interventions.test_scale_add_mean_noise(model, tokens, other),
        "resample": lambda: interventions.test_resample_gives_every_example_anothers_value(model, tokens),
        "knock-out": lambda: interventions.test_knock_out_cuts_the_edge_and_renormalises(model, tokens),
        "negative positions": lambda: interventions.test_negative_positions_count_from_the_last_real_token(
            model, tokens
        ),
        "sources unwritten": lambda: interventions.test_the_given_tensor_and_the_source_run_are_never_written(
            model, tokens, other
        ),
        "order": lambda: runs.test_a_site_is_recorded_after_its_changes_in_list_order(model, tokens),
        "cache": lambda: runs.test_cached_tensors_never_change(model, tokens),
        "in place": lambda: check_no_write_in_place(model, tokens),
        "metrics": lambda: metrics.test_values_by_definition(model, tokens),
        "denoising": lambda: sweeps.test_every_cell_equals_a_patch_by_hand(model, pair, "denoising"),
        "effect": lambda: sweeps.test_effect_is_a_ratio_of_means(model, pair),
        "triggers": lambda: memory.test_triggers_never_stand_on_padding(model),
        "lens": lambda: lens.test_early_rows_recompute_the_norm(model, tokens),
    }


def check_no_write_in_place(model, tokens):
    """A value handed to an intervention is the same after it."""
    from interp import Inputs, Zero

    value = torch.ones(3, 7, 16)
    Zero("0.resid_mid", at=2).apply(value, Inputs(tokens))
    assert torch.equal(value, torch.ones(3, 7, 16))


def first_failure(checks):
    for name, check in checks.items():
        try:
            check()
        except (AssertionError, SelectionError):  # a position that a fault moved onto padding is refused by name
            return name
    return None


def test_all_checks_pass_without_a_fault(checks):
    assert first_failure(checks) is None


@pytest.mark.parametrize("name", PATCH_FAULTS)
def test_fault_is_caught(checks, name):
    with PATCH_FAULTS[name]():
        assert first_failure(checks) is not None, f"no check noticed: {name}"
    CAUGHT.append(name)


def test_report():
    summary.LINES.append(f"patching faults: {len(CAUGHT)} of {len(PATCH_FAULTS)} caught")
