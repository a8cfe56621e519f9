"""The fast engine: equal to patches by hand at every site of every kind of model, and only the work that the mask asks for."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies import Case, cases, small, translator
from sweep_cases import (
    CASES,
    FEW,
    METRICS,
    Pair,
    able_axes,
    assert_close,
    by_hand,
    grid_cells,
    logits_by_hand,
    metric_of,
    pair_of,
    sites_of,
    values_of,
)

from interp import Replace, Zero, logit_difference, patch_sweep, run, run_many
from interp.model.block import Block
from interp.sweep import SweepCheckError
from interp.sweep.layout import Reach
from interp.sweep.live import Live


def check_sites(
    pair: Pair, chosen: dict[str, tuple[str, ...]], metric: str, direction: str, positions=None
) -> list[str]:
    """Sweep each site over its axes and compare every cell with a patch by hand; the sites that had an effect."""
    read = metric_of(metric, pair)
    source, base = pair.ends(direction)
    values, unpatched = values_of(pair.model, source), float(logits_by_hand(pair.model, base, [[]]).abs().max())
    cells = {
        site: grid_cells(pair.model, site, by, values, pair.clean, positions if "position" in by else None)
        for site, by in chosen.items()
    }
    expected = by_hand(pair, [cell for many in cells.values() for cell in many], read, direction)
    expected = dict(zip(cells, expected.split([len(many) for many in cells.values()]), strict=True))
    moved = []
    for by in dict.fromkeys(chosen.values()):
        sites = [site for site in chosen if chosen[site] == by]
        only = positions if "position" in by else None
        got = patch_sweep(pair.model, pair.clean, pair.corrupted, read, sites, by, direction, check=0, positions=only)  # type: ignore[arg-type]
        start = got.corrupted if direction == "denoising" else got.clean
        assert start is not None
        for site in sites:
            assert got.axes[site] == by
            assert_close(got.values[site].flatten(0, -2), expected[site], unpatched, f"{site} by {by}, {metric}")
            if float((expected[site] - start).abs().max()) > 1e-9:
                moved.append(site)
    return moved


def rotated(pair: Pair, turn: int) -> dict[str, tuple[str, ...]]:
    """Every site of the model with one of its combinations of axes."""
    chosen = {}
    for i, site in enumerate(sites_of(pair.model, ())):
        able = able_axes(pair, site)
        if able:
            chosen[site] = able[(i + turn) % len(able)]
    return chosen


def metric_for(pair: Pair, turn: int) -> str:
    """One that these inputs allow: not on padding."""
    mask = pair.clean.mask
    names = METRICS if mask is None else ("last", "role", "kl", "loss")[: 4 if int(mask.sum(1).min()) > 1 else 3]
    return names[turn % len(names)]


@pytest.mark.parametrize("name", FEW)
def test_every_site_equals_a_patch_by_hand(name):
    pair, turn = pair_of(CASES[name], (0, 1, 3)), FEW.index(name)
    chosen = rotated(pair, turn)
    moved = check_sites(pair, chosen, metric_for(pair, turn), ("denoising", "noising")[turn % 2])
    assert len(moved) > 0.7 * len(chosen), "most patches must have an effect, or this test could not fail"


@pytest.mark.slow
@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize("name", CASES)
def test_every_site_over_all_of_its_axes(name, direction):
    pair = pair_of(CASES[name], (0, 1, 3))
    moved = set()
    for turn in range(max(len(able_axes(pair, site)) for site in sites_of(pair.model, ()))):
        moved |= set(check_sites(pair, rotated(pair, turn), metric_for(pair, turn), direction))
    idle = set(sites_of(pair.model, ())) - moved
    # Without common positions a source's embeddings are swept by role only, and no role need stand where the sources differ.
    unreached = {"pos_embed", "embed"} if pair.clean.source_mask is not None else {"pos_embed"}
    assert {site.split(".")[-1] for site in idle} <= unreached, idle


@st.composite
def sweeps(draw):
    """A valid model and pair with a few sites, their axes, a metric and a direction."""
    case = draw(cases())
    case = replace(case, choices={**case.choices, "head": True}, padding=(*case.padding, (0, 0)))
    if case.prefixes is not None:
        case = replace(case, prefixes=(*case.prefixes, 2))
    if case.source_padding is not None:
        case = replace(case, source_padding=(*case.source_padding, (0, 0)))
    pair = pair_of(case, tuple(sorted(draw(st.sets(st.integers(0, case.length - 1), min_size=1)))))
    names = draw(st.sets(st.sampled_from(sites_of(pair.model, ())), min_size=1, max_size=4))
    chosen = {site: draw(st.sampled_from(able)) for site in sorted(names) if (able := able_axes(pair, site))}
    return pair, chosen, metric_for(pair, draw(st.integers(0, 6))), draw(st.sampled_from(["denoising", "noising"]))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(sweeps())
def test_any_sweep_of_any_model_equals_patches_by_hand(sweep):
    check_sites(*sweep)


@pytest.mark.slow
@settings(max_examples=1500, deadline=None)
@given(sweeps())
def test_many_sweeps_of_any_model_equal_patches_by_hand(sweep):
    check_sites(*sweep)


def test_positions_counted_from_the_end_of_padded_prompts():
    pair = pair_of(CASES["left padding"], (3, 5))
    check_sites(
        pair, {"resid_pre": ("layer", "position"), "z": ("head", "position")}, "last", "denoising", [-1, -2, -3]
    )


# Work: counted by hand

LAYERS, LENGTH = 3, 6


def causal(differ, sites, by=("layer", "position"), at=-1, base: dict | None = None, length=LENGTH, **choices):
    """A sweep of one pair of prompts in a causal decoder, which differ at `differ`; its counters."""
    case = Case(small(n_layers=LAYERS, **choices), ((0, 0),), length=length, **(base or {}))
    pair = pair_of(case, differ)
    return patch_sweep(pair.model, pair.clean, pair.corrupted, logit_difference(1, 2, at), sites, by, check=0)


def test_the_stream_of_the_differing_token_moves_what_comes_after_it():
    """Denoising resid_pre at (layer, position ≥ m): positions from there on, but only the last in the last block."""
    m = 2
    got = causal((m,), "resid_pre")
    rows = keys = cells = 0
    for layer in range(LAYERS):
        for position in range(LENGTH):
            # Layer 0 differs only at m; later layers at every token from m on.
            if position < m or (layer == 0 and position != m):
                continue
            # The last block has one needed row, so that earlier changed tokens are only keys there.
            count = LENGTH - position
            rows += count * (LAYERS - 1 - layer) + 1
            keys += count - 1 if layer < LAYERS - 1 else position < LENGTH - 1
            cells += 1
    assert got.work["token_layers"] == rows
    assert got.work["key_value_token_layers"] == keys
    assert got.work["unembedded rows"] == cells
    assert not got.work.get("ffn_token_layers") and not got.work.get("memory_token_layers")


def test_a_patch_in_the_second_half_of_a_block_skips_attention_there():
    """ffn_out at the last token: half a block where it is written, whole ones after it, nothing where nothing differs."""
    m = 4
    got = causal((m,), "ffn_out", ("layer", "position"))
    half = rows = keys = 0
    for layer in range(LAYERS):
        for position in range(m, LENGTH):
            if layer == LAYERS - 1 and position < LENGTH - 1:
                continue  # nobody reads it any more
            if layer == 0 and position > m:
                pass  # attention has carried the difference on already
            half += 1
            later = LAYERS - 1 - layer
            rows += (LENGTH - position) * (later - 1) + 1 if later else 0
            keys += (LENGTH - position - 1) if later else 0
    assert got.work["ffn_token_layers"] == half
    assert got.work["token_layers"] == rows
    assert got.work["key_value_token_layers"] == keys


def test_a_patch_of_whole_layers_starts_at_the_first_difference():
    got = causal((3,), "z", ("layer", "head"))
    after = LENGTH - 3
    # From z's own block on: `after` tokens in each block, in the last only the one that is read, with the others as keys.
    heads = 2
    assert got.work["token_layers"] == heads * sum(after * (LAYERS - 1 - layer) + 1 for layer in range(LAYERS))
    assert got.work["key_value_token_layers"] == heads * (after - 1) * (LAYERS - 1)
    assert got.work["unembedded rows"] == heads * LAYERS


def test_patches_that_change_nothing_run_nothing(monkeypatch):
    ran = calls(monkeypatch)
    got = causal((), "resid_pre")
    assert sum(got.work.values()) == 0
    assert torch.equal(got.values["resid_pre"], got.corrupted.expand(LAYERS, LENGTH, 1))
    assert set(ran) <= {"forward"}, "only the two unpatched runs"


def test_a_metric_in_the_middle_needs_no_later_token():
    got = causal((1,), "resid_pre", at=2)
    assert got.work["unembedded rows"] == 1 + 2 * (LAYERS - 1)
    assert float(got.values["resid_pre"][:, 3:].sub(got.corrupted).abs().max()) == 0
    late = causal((4,), "resid_pre", at=2)
    assert sum(late.work.values()) == 0


def test_a_window_moves_only_what_is_near():
    """Window 2: a change at p reaches p … p + layers; the metric at the last token is out of reach of far ones."""
    got = causal((0,), "resid_pre", ("position",), window=2, base={}, length=LENGTH)
    assert sum(got.work.values()) == 0, "position 0 cannot reach position 5 in three layers"
    got = causal((2,), "embed", ("position",), window=2)
    # needed: before block 0 tokens 2 … 5, then 3 … 5, 4 … 5, and 5. So only one token a layer, its left neighbour as a key.
    assert got.work["token_layers"] == 3
    assert got.work["key_value_token_layers"] == 3


def test_an_encoder_moves_every_token():
    case = Case(small(n_layers=LAYERS, kind="encoder"), ((0, 0), (0, 1)), length=LENGTH)
    pair = pair_of(case, (1,))
    got = patch_sweep(
        pair.model, pair.clean, pair.corrupted, logit_difference(1, 2), "resid_pre", ("layer", "role"), check=0
    )
    whole, short = LENGTH, LENGTH - 1
    # Role "own" stands at 1 and 2, "late" at the ends. Layer 0: only example 0's own token differs.
    first = whole * (LAYERS - 1) + 1
    rest = sum((one * (LAYERS - 1 - layer) + 1) * 2 for one in (whole, short) for layer in range(1, LAYERS))
    assert got.work["token_layers"] == first + rest


def test_cross_attention_reads_only_the_changed_source_tokens():
    pair = pair_of(Case(translator(n_layers=2, n_encoder_layers=2), ((0, 0),), source_length=4), (1,))
    clean, corrupted = (replace(one, tokens=pair.clean.tokens) for one in (pair.clean, pair.corrupted))
    metric = logit_difference(1, 2)
    got = patch_sweep(pair.model, clean, corrupted, metric, "encoder.resid_post", ("layer", "role"), check=0)
    # After encoder block 0 every source token may differ, so its patch runs the last encoder block on all four and changes
    # four memory tokens; the last block's patch changes one. Both reach every target token: five, then one.
    assert got.work["token_layers"] == 4 + 2 * (5 + 1)
    assert got.work["memory_token_layers"] == 2 * (4 + 1)
    assert got.work["unembedded rows"] == 2
    target = patch_sweep(pair.model, clean, corrupted, metric, "decoder.resid_pre", ("layer", "role"), check=0)
    # The target's own tokens are the same before the first block; later they have read the source.
    assert target.work["token_layers"] == 2 and not target.work.get("memory_token_layers")


def calls(monkeypatch) -> Counter:
    """Counts the parts of blocks that run, by part and by (part, layer)."""
    counted: Counter = Counter()
    for kind in Block.__subclasses__():
        for part in ("mix", "feed", "keys_values"):
            original = getattr(kind, part)

            def counting(self, x, *arguments, original=original, part=part):
                counted[part, self.sites.resid_pre.layer] += 1
                return original(self, x, *arguments)

            monkeypatch.setattr(kind, part, counting)
    original = Block.forward

    def forward(self, *arguments):
        before = counted.copy()
        value = original(self, *arguments)
        counted.clear()
        counted.update(before)
        counted["forward"] += 1
        return value

    monkeypatch.setattr(Block, "forward", forward)
    return counted


def test_blocks_before_a_patch_are_not_run(monkeypatch):
    pair = pair_of(Case(small(n_layers=4), length=LENGTH), (1,))
    held = run(pair.model, pair.clean, record="resid_mid")
    ran = calls(monkeypatch)
    got = run_many(pair.model, pair.corrupted, [Replace("2.resid_mid", held), Replace("2.resid_mid", held, at=4)],
                   logit_difference(1, 2), check=0)  # fmt: skip
    assert ran.pop("forward") == 4, "the unchanged run"
    assert ran == {("feed", 2): 1, ("keys_values", 3): 1, ("mix", 3): 1, ("feed", 3): 1}, "all cells in one pass"
    assert got.work["ffn_token_layers"] == 2 * (5 + 1)


# Exactly nothing, and faults that the sampled check sees


def test_a_patch_out_of_reach_is_exactly_the_base_run():
    pair = pair_of(CASES["window"], (6,))
    got = patch_sweep(pair.model, pair.clean, pair.corrupted, logit_difference(1, 2, position=5), "resid_pre", check=3)
    assert torch.equal(got.values["resid_pre"], got.corrupted.expand(3, 7, 2))
    assert got.checked < 1e-14 and got.checks == 3


def test_tokens_that_nothing_needs_do_not_settle_a_layout():
    """Two changed tokens, one behind the position that is read: as many rows as before, but not the same ones."""
    pair = pair_of(Case(small(n_layers=4, window=2), length=7), (2,))
    change = Zero("embed", at=([2, 6],))
    got = run_many(pair.model, pair.clean, [change], logit_difference(1, 2, position=4), check=0)
    expected = run(pair.model, pair.clean, change=change).logits[:, 4]
    assert float((got.values["cells"][0] - got.clean).abs().max()) > 1e-6
    assert_close(got.values["cells"][0], expected[:, 1] - expected[:, 2])


def test_a_broken_walk_is_noticed_by_the_sampled_check(monkeypatch):
    pair = pair_of(CASES["modern"], (1,))
    original = Live.gather

    def shifted(self, rows, base):
        return original(self, replace(rows, position=np.maximum(rows.position - 1, 0)), base)

    monkeypatch.setattr(Live, "gather", shifted)
    with pytest.raises(SweepCheckError, match="full run gives"):
        patch_sweep(pair.model, pair.clean, pair.corrupted, logit_difference(1, 2), "resid_pre")


def test_a_layout_that_forgets_readers_is_noticed_by_the_sampled_check(monkeypatch):
    pair = pair_of(CASES["modern"], (1,))
    monkeypatch.setattr(Reach, "readers", lambda self, live, example: live)
    with pytest.raises(SweepCheckError, match="resid_pre, layer"):
        patch_sweep(pair.model, pair.clean, pair.corrupted, logit_difference(1, 2), "resid_pre", check=8)
