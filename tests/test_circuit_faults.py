"""The tests of circuits can fail: each deliberate fault of `circuit_faults.py` is caught by one of them."""

from __future__ import annotations

import pytest
import summary
from circuit_faults import CIRCUIT_FAULTS
from circuits import test_attribution as attribution
from circuits import test_edges as edges
from circuits import test_scrubbing as scrubbing

CAUGHT: list[str] = []

CHECKS = {
    "none and all": lambda: edges.test_no_edge_is_the_base_run_and_every_edge_the_other("grouped"),
    "none and all, biases": lambda: edges.test_no_edge_is_the_base_run_and_every_edge_the_other("plain"),
    "component": lambda: edges.test_all_edges_out_of_a_component_are_a_patch_of_that_component("grouped"),
    "path": lambda: edges.test_one_edge_is_a_patched_path("grouped"),
    "position": edges.test_a_mask_with_positions_patches_one_of_them,
    "ablations": edges.test_the_four_ablations_differ_and_do_what_they_say,
    "gradient of a dose": lambda: attribution.test_eap_is_the_gradient_of_an_edge_s_dose("grouped"),
    "formula": attribution.test_eap_is_the_published_formula,
    "sums": attribution.test_sums_that_the_scores_must_have,
    "exact": lambda: attribution.test_exact_scores_are_single_edge_patches("noising"),
    "scrubbing": scrubbing.test_the_planted_relay_is_accounted_for_by_its_program_and_by_nothing_less,
}


def first_failure():
    for name, check in CHECKS.items():
        try:
            check()
        except (AssertionError, StopIteration):
            return name
    return None


def test_all_checks_pass_without_a_fault():
    assert first_failure() is None


@pytest.mark.parametrize("name", CIRCUIT_FAULTS)
def test_fault_is_caught(name):
    with CIRCUIT_FAULTS[name]():
        assert first_failure() is not None, f"no check noticed: {name}"
    CAUGHT.append(name)


def test_report():
    summary.LINES.append(f"circuit faults: {len(CAUGHT)} of {len(CIRCUIT_FAULTS)} caught")
