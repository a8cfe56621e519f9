"""The tests can fail: under every deliberate fault of `faults.py` some check fails, and without one all pass."""

import time

import pytest
import summary
from faults import FAULTS, FaultNeverReached, make_fault
from model import test_layout as layout
from model import test_model as behaviour
from model import test_oracle
from strategies import small

from interp.model import block

# Plain functions, each a check of the suite; a fault is caught when one raises.
ORACLE = {f"oracle: {name}": (test_oracle.check_case, case) for name, case in test_oracle.NAMED.items()}
IDENTITIES = {
    **{f"sums: {v}": (layout.check_sums, layout.choices_of(v)) for v in ("pre", "post", "post attention-only")},
    "noise": (layout.check_noise, small(n_layers=1)),
    "one site at a time": (layout.check_each_site_alone, small(n_layers=1, ffn="swiglu")),
    "routes agree": (layout.check_unchanged, small(window=2)),
    **{f"edges: {name}": (behaviour.check_edges, name) for name in behaviour.EDGES},
    "edges, explicit": (behaviour.check_edges, "decoder", behaviour.everything),
    "causality": (behaviour.check_causality, small()),
    **{f"padding: {n}": (behaviour.check_padding, behaviour.KINDS[n]) for n in ("learned", "rotary", "prefix")},
    "padding, explicit": (behaviour.check_padding, small(), behaviour.everything),
    **{f"cache: {n}": (behaviour.check_cache, behaviour.KINDS[n], ((0, 0),), (3, 2)) for n in ("learned", "rotary")},
    "views": (behaviour.check_views, small(n_heads=4, n_kv_heads=2, d_head=3, ffn="swiglu")),
}
SUITES = {"the oracle": ORACLE, "the identities": IDENTITIES}
CAUGHT: dict[str, set[str]] = {}
# What the oracle cannot see, with the reason; it must notice every other fault.
NO_ORACLE = {
    "an edit of the pattern changes nothing": "the oracle edits nothing",
    "position ids restart after the cache": "the oracle has no cache",
    "the cache forgets": "the oracle has no cache",
}


def first_failure(suite):
    """The first check of the suite that fails, with its error; None when all pass.

    Only a failed assertion counts: any other exception is a broken fault, and passes through.
    """
    for name, (check, *arguments) in suite.items():
        try:
            check(*arguments)
        except AssertionError as error:
            return name, error
    return None


@pytest.mark.parametrize("suite", SUITES)
def test_all_checks_pass_without_a_fault(suite):
    assert first_failure(SUITES[suite]) is None


@pytest.mark.parametrize("name", FAULTS)
def test_fault_is_caught(name):
    caught = set()
    with FAULTS[name]():
        for suite, checks in SUITES.items():
            if first_failure(checks) is not None:
                caught.add(suite)
    assert caught, f"no check noticed: {name}"
    CAUGHT[name] = caught
    if name not in NO_ORACLE:
        assert "the oracle" in caught, f"the oracle did not notice: {name}"


def test_report():
    """The counts at the end of the run (of the faults that ran)."""
    counts = ", ".join(f"{sum(suite in by for by in CAUGHT.values())} by {suite}" for suite in SUITES)
    summary.LINES.append(f"faults: {len(CAUGHT)} of {len(FAULTS)} caught ({counts})")


def test_there_are_faults():
    assert len(FAULTS) >= 14


def test_a_fault_that_patches_nothing_is_noticed():
    unused = make_fault("unused", lambda original, *a, **k: original(*a, **k), (time, "sleep"))
    with pytest.raises(FaultNeverReached, match="unused"), unused():
        assert first_failure({"sums": IDENTITIES["sums: pre"]}) is None


def test_a_fault_that_changes_nothing_is_not_caught():
    """The harness reports a failure only when a check fails, not because something was patched."""
    original = block.attention_edges
    idle = make_fault("idle", lambda original, *a, **k: original(*a, **k), (block, "attention_edges"))
    with idle() as calls:
        assert block.attention_edges is not original
        assert all(first_failure({name: suite[name]}) is None for suite in SUITES.values() for name in list(suite)[:3])
    assert calls.count > 0
    assert block.attention_edges is original


def test_a_fault_that_crashes_is_not_caught():
    with pytest.raises(TypeError), make_fault("broken", lambda original: None, (block, "attention_edges"))():
        first_failure(ORACLE)


def test_a_fault_is_undone_after_an_exception():
    original = block.attention_edges
    with pytest.raises(KeyError), FAULTS["causal mask removed"]():
        raise KeyError
    assert block.attention_edges is original


def test_a_fault_of_a_name_that_does_not_exist_is_an_error():
    with pytest.raises(KeyError), make_fault("gone", lambda original: None, (block, "no_such_function"))():
        pass
