"""Which tokens a layer computes, against paths through the mask followed one edge at a time."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import small, translator

from interp import ModelConfig, Site
from interp.model.layout import ordered_sites
from interp.sweep.cells import Rows
from interp.sweep.layout import Reach, lay_out, middle_of, parts


def reachable(edges: np.ndarray, start: set[int], layers: int) -> list[set[int]]:
    """The positions that a change at `start` can reach after each layer, by walking."""
    found = [start]
    for _ in range(layers):
        last = found[-1]
        found.append(last | {query for query in range(len(edges)) for key in last if edges[query, key]})
    return found


def positions(rows: Rows, sequence: int) -> set[int]:
    """The positions of one sequence."""
    return set(rows.position[rows.sequence == sequence].tolist())


@st.composite
def masks(draw):
    """Random edges of a few examples, what is read at the end, and what is changed at the start."""
    batch, length, layers = draw(st.integers(1, 3)), draw(st.integers(1, 6)), draw(st.integers(1, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    edges = rng.random((draw(st.sampled_from([1, batch])), length, length)) < draw(st.sampled_from([0.15, 0.4, 0.8]))
    last = rng.random((batch, length)) < 0.3
    example = rng.integers(batch, size=draw(st.integers(1, 7)))
    start = rng.random((len(example), length)) < 0.3
    return edges, layers, last, example, start


@settings(max_examples=40, deadline=None, derandomize=True)
@given(masks())
def test_layers_compute_what_is_reached_and_read(case):
    edges, layers, last, example, live = case
    reach, cell = Reach(edges, layers, last), np.arange(len(example))
    length = edges.shape[1]
    starts = [set(np.flatnonzero(one).tolist()) for one in live]
    needed = []
    for row in range(len(last)):
        mask = edges[row if len(edges) > 1 else 0]
        wanted = set(np.flatnonzero(last[row]).tolist())
        before = [wanted]
        for _ in range(layers):
            before.insert(0, before[0] | {key for query in before[0] for key in range(length) if mask[query, key]})
        needed.append(before)
        assert [set(np.flatnonzero(one[row]).tolist()) for one in reach.needed] == before
    live = live & reach.needed[0][example]
    for layer in range(layers):
        found = lay_out(reach, layer, live, {}, cell, example)
        after = np.zeros_like(live)
        for sequence, row in enumerate(example):
            mask = edges[row if len(edges) > 1 else 0]
            moved = reachable(mask, starts[sequence] & needed[row][0], layers)
            assert positions(found.rows, sequence) >= moved[layer + 1] & needed[row][layer + 1], "a change is forgotten"
            # Nothing else is computed: each row is live or reads a live token, and is needed.
            alive = set(np.flatnonzero(live[sequence]).tolist())
            readers = {query for query in range(length) if any(mask[query, key] for key in alive)}
            assert positions(found.rows, sequence) == (alive | readers) & needed[row][layer + 1]
            if positions(found.rows, sequence):
                assert positions(found.extra, sequence) == alive - needed[row][layer + 1]
            after[sequence, list(positions(found.rows, sequence))] = True
        assert not len(found.late) and not len(found.memory)
        assert (found.rows.example == example[found.rows.sequence]).all()
        assert (found.rows.cell == cell[found.rows.sequence]).all()
        live = after


def test_rows_of_different_patterns_are_complete_and_unique():
    rng = np.random.default_rng(0)
    edges = np.tril(np.ones((1, 8, 8), dtype=bool))
    example = rng.integers(3, size=40)
    live = rng.random((40, 8)) < 0.3
    found = lay_out(Reach(edges, 2, np.ones((3, 8), dtype=bool)), 0, live, {}, np.arange(40), example)
    pairs = list(zip(found.rows.sequence.tolist(), found.rows.position.tolist(), strict=True))
    expected = {(s, p) for s in range(40) if live[s].any() for p in range(np.flatnonzero(live[s])[0], 8)}
    assert len(set(pairs)) == len(pairs) and set(pairs) == expected


def test_half_a_block_and_keys_without_queries():
    edges = np.tril(np.ones((1, 4, 4), dtype=bool))
    last = np.zeros((1, 4), dtype=bool)
    last[0, 3] = True
    reach, live = Reach(edges, 2, last), np.zeros((1, 4), dtype=bool)
    at = np.zeros((1, 4), dtype=bool)
    at[0, 1] = True
    zero = np.zeros(1, dtype=np.int64)
    half = lay_out(reach, 0, live, {"late": at}, zero, zero)
    assert positions(half.late, 0) == {1} and not len(half.rows) and not len(half.extra)
    assert not len(lay_out(reach, 1, live, {"late": at}, zero, zero).late), "nothing reads token 1 after the last block"
    spread = lay_out(reach, 1, live, {"spread": at}, zero, zero)
    assert positions(spread.rows, 0) == {3} and positions(spread.extra, 0) == {1}
    row = lay_out(reach, 0, live, {"row": at}, zero, zero)
    assert positions(row.rows, 0) == {1} and not len(row.extra)
    both = lay_out(reach, 0, live, {"row": at, "late": np.ones_like(at)}, zero, zero)
    assert positions(both.rows, 0) == {1} and positions(both.late, 0) == {0, 2, 3}


def test_a_changed_source_token_reaches_every_target_token_that_is_needed():
    edges = np.tril(np.ones((1, 3, 3), dtype=bool))
    last = np.zeros((2, 3), dtype=bool)
    last[:, 1] = True
    readable = np.array([[True, False], [True, True]])
    memory = np.array([[False, True], [False, True]])
    zero, nothing = np.zeros(2, dtype=np.int64), np.zeros((2, 3), dtype=bool)
    found = lay_out(Reach(edges, 1, last), 0, nothing, {}, zero, np.array([0, 1]), memory, readable)
    assert not positions(found.rows, 0), "its token is padding, which nobody reads"
    assert positions(found.rows, 1) == {1} and positions(found.memory, 1) == {1}


REACHES = {
    "spread": ["resid_pre", "norm1_scale", "norm1_hat", "norm1", "k", "v", "k_rot"],
    "row": ["q", "q_rot", "scores", "pattern", "z", "head_out", "attn_out"],
    "late": ["resid_mid", "norm2_scale", "norm2_hat", "norm2", "ffn_pre", "ffn_act", "ffn_out", "resid_post"],
}


def test_how_far_each_site_reaches():
    config = ModelConfig(**small(positions="rotary"))
    found = parts(ordered_sites(config), 1, None, middle_of(config))
    assert {reach: [site.name for site in found if found[site] == reach] for reach in REACHES} == REACHES
    config = ModelConfig(**small(ffn="none"))
    assert "late" not in parts(ordered_sites(config), 1, None, middle_of(config)).values()
    config = ModelConfig(**translator())
    found = parts(ordered_sites(config), 0, "decoder", middle_of(config))
    assert {site.name for site in found if found[site] == "memory"} == {"cross_k", "cross_v"}
    assert found[Site("cross_q", 0, "decoder")] == "row" and found[Site("resid_mid", 0, "decoder")] == "row"
    assert found[Site("resid_cross", 0, "decoder")] == "late"


@pytest.mark.parametrize("kind", ["pre", "post"])
def test_every_site_of_a_block_has_a_reach(kind):
    config = ModelConfig(**translator(norm_position=kind))
    sites = ordered_sites(config)
    found = parts(sites, 0, "decoder", middle_of(config))
    assert set(found) == {site for site in sites if (site.layer, site.stack) == (0, "decoder")}
