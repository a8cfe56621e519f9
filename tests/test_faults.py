"""The tests can fail: under every deliberate fault of `faults.py` some check fails, and without one all pass."""

import time
from functools import cache

import pytest
import strategies
import summary
import torch
from faults import FAULTS, FaultNeverReached, make_fault
from model import test_layout as layout
from model import test_model as behaviour
from model import test_oracle
from strategies import small, translator

from interp.model import block


@pytest.fixture(autouse=True, scope="module")
def models_are_built_once():
    """The checks share their models, whose building costs more than a check: so a fault may not act in a constructor."""
    build, built = strategies.random_model, {}

    def once(choices, seed=0, dtype=torch.float64):
        key = repr((sorted(choices.items()), seed, dtype))
        if key not in built:
            built[key] = build(choices, seed, dtype)
        return built[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategies, "random_model", once)
        yield


@cache
def wanted_of(name):
    """The oracle's answer for a named case: the same under every fault, since it shares no code with the package."""
    return test_oracle.wanted_of(test_oracle.NAMED[name])


def check_named(name):
    """A named case against the oracle's answer, which must have been computed before a fault is made."""
    test_oracle.check_case(test_oracle.NAMED[name], wanted_of(name))


# Plain functions, each a check of the suite; a fault is caught when one raises. The broadest cases come first.
ORACLE = {f"oracle: {name}": (check_named, name) for name in reversed(test_oracle.NAMED)}
IDENTITIES = {
    **{f"sums: {v}": (layout.check_sums, layout.choices_of(v)) for v in ("pre", "post", "post attention-only")},
    **{f"sums of two stacks: {v}": (layout.check_sums, layout.translator_of(v)) for v in ("pre", "post")},
    "noise": (layout.check_noise, small(n_layers=1)),
    "noise in two stacks": (layout.check_noise, translator(n_layers=1, ffn="none", norm="none")),
    "one site at a time": (layout.check_each_site_alone, small(n_layers=1, ffn="swiglu")),
    "routes agree": (layout.check_unchanged, small(window=2)),
    **{f"edges: {name}": (behaviour.check_edges, name) for name in behaviour.EDGES},
    "edges, explicit": (behaviour.check_edges, "decoder", behaviour.everything),
    **{
        f"edges of two stacks: {name}": (behaviour.check_two_stack_edges, name)
        for name in ("source, right padding", "target, right padding", "window of 2")
    },
    "edges of two stacks, explicit": (behaviour.check_two_stack_edges, "source, left padding", behaviour.everything),
    "only attention mixes": (behaviour.check_only_attention_mixes, translator(n_layers=1)),
    "causality": (behaviour.check_causality, small()),
    **{
        f"padding: {n}": (behaviour.check_padding, behaviour.KINDS[n])
        for n in ("learned", "rotary", "prefix", "encoder-decoder")
    },
    "padding, explicit": (behaviour.check_padding, small(), behaviour.everything),
    **{f"cache: {n}": (behaviour.check_cache, behaviour.KINDS[n], ((0, 0),), (3, 2)) for n in ("learned", "rotary")},
    "cache: encoder-decoder": (behaviour.check_cache, translator(), ((0, 0),), (3, 2)),
    "teacher forcing": (behaviour.check_teacher_forcing, translator(n_layers=1)),
    "views": (behaviour.check_views, small(n_heads=4, n_kv_heads=2, d_head=3, ffn="swiglu")),
    "views of cross-attention": (behaviour.check_cross_views, translator(n_heads=4, n_kv_heads=2, d_head=3)),
    **{
        f"view {where}": (behaviour.check_two_stack_view, *where)
        for where in (("encoder", 2, "W_out"), ("decoder", 1, "cross_W_O"))
    },
}
SUITES = {"the oracle": ORACLE, "the identities": IDENTITIES}
CAUGHT: dict[str, set[str]] = {}
# What the oracle cannot see, with the reason; it must notice every other fault.
NO_ORACLE = {
    "an edit of the pattern changes nothing": "the oracle edits nothing",
    "position ids restart after the cache": "the oracle has no cache",
    "the cache forgets": "the oracle has no cache",
    "the source is encoded again at every step": "the oracle has no cache",
    "cross-attention reads the cached keys of another layer": "the oracle has no cache",
    "an edit of encoder.final changes nothing": "the oracle edits nothing",
    "weight reads the decoder for the encoder": "the oracle reads the blocks' own views",
    "weight gives self-attention's for cross-attention's": "the oracle reads the blocks' own views",
    **{
        f"teacher forcing {how}": "the oracle is given inputs"
        for how in (
            "shifts the wrong way",
            "does not shift",
            "without BOS",
            "puts BOS before left padding",
            "loses the source",
        )
    },
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
    for case in test_oracle.NAMED:
        wanted_of(case)
    with FAULTS[name]():
        for suite, checks in SUITES.items():
            if (suite != "the oracle" or name not in NO_ORACLE) and first_failure(checks) is not None:
                caught.add(suite)
    assert caught, f"no check noticed: {name}"
    CAUGHT[name] = caught
    if name not in NO_ORACLE:
        assert "the oracle" in caught, f"the oracle did not notice: {name}"


def test_report():
    """The counts at the end of the run (of the faults that ran)."""
    assert set(NO_ORACLE) <= set(FAULTS)
    counts = ", ".join(f"{sum(suite in by for by in CAUGHT.values())} by {suite}" for suite in SUITES)
    summary.LINES.append(f"faults: {len(CAUGHT)} of {len(FAULTS)} caught ({counts})")


def test_no_check_changes_a_shared_model():
    before = {}
    for round_of in (before, after := {}):
        for name, case in test_oracle.NAMED.items():
            model, _ = case.build()
            round_of[name] = [p.sum().item() for p in model.parameters()] + [p.grad for p in model.parameters()]
        if round_of is before:
            assert all(first_failure(checks) is None for checks in SUITES.values())
    assert after == before


def test_there_are_faults():
    assert len(FAULTS) >= 75


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
