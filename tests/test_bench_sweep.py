"""What experiments/bench/sweep.py compares with is itself right: the operations that no sweep can avoid, by hand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pandas as pd
import pytest

BENCH = Path(__file__).parents[1] / "experiments" / "bench"
TINY = {"n_layers": 2, "d_model": 2, "n_heads": 1, "d_head": 2, "n_kv_heads": 1, "d_ff": 3, "gated": False,
        "prompts": 1, "length": 3, "changed": (1,)}  # fmt: skip


@pytest.fixture
def floor(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    from sweeps import floor  # type: ignore[import-not-found]

    return floor


def test_floor_of_a_tiny_sweep_is_the_one_worked_by_hand(floor):
    s = floor.Shape(**TINY)
    # per token: q = W_O = 2·2·2, k and v = 2·8, FFN = 2·(2·2·3); attention at position p: 4·2·(p + 1); unembedding 2·(2·2)
    assert (s.q, s.kv, s.ffn, s.attention(range(3))) == (8, 16, 24, 8 + 16 + 24)
    block = 3 * (8 + 16 + 8 + 24) + 48
    assert floor.runs(s) == 2 * (2 * block + 8)
    cells = {
        (0, 1): (8 + 16)
        + (16 + 24)
        + 2 * 32
        + 2 * 16
        + 8
        + 24
        + 32
        + 8,  # block 0: one new q, k, v; block 1: two new k, v
        (0, 2): (8 + 16) + 24 + 32 + 16 + 8 + 24 + 32 + 8,
        (1, 1): 16 + 24 + 32 + 8,  # only k and v are new, read by the last query, which is the base's
        (1, 2): (8 + 16) + 24 + 32 + 8,
    }
    assert {cell: floor.stream_cell(s, *cell) for cell in cells} == cells
    seen = sum(cells.values()) - cells[0, 2]  # there the two runs' embeddings are the same
    assert floor.cells(s, "resid_pre") == seen and floor.floor(s, "resid_pre") == floor.runs(s) + seen
    heads = {(0, 1): 8 + 24 + cells[1, 1], (0, 2): 8 + 24 + cells[1, 2], (1, 1): 0, (1, 2): 8 + 24 + 8}
    assert {cell: floor.head_cell(s, *cell) for cell in heads} == heads
    assert floor.floor(s, "z") == floor.runs(s) + sum(heads.values())


def test_floor_counts_prompts_heads_and_gates(floor):
    one = floor.Shape(**TINY)
    assert floor.floor(floor.Shape(**TINY | {"prompts": 5}), "resid_pre") == 5 * floor.floor(one, "resid_pre")
    gated = floor.Shape(**TINY | {"gated": True})
    assert gated.ffn == 3 * one.ffn // 2
    assert floor.counted(
        one, {"token_layers": 2, "key_value_token_layers": 3, "ffn_token_layers": 4, "forwards": 9}
    ) == (2 * (8 + 16 + 8 + 24) + 3 * 16 + 4 * 24)
    two = floor.Shape(**TINY | {"n_heads": 2, "d_head": 1, "n_kv_heads": 1})
    assert (two.q, two.kv) == (one.q, one.kv // 2)  # the same queries, one key-value head of half the width
    assert floor.head_cell(two, 1, 2) == 2 * 1 * 2 + 24 + 8


@pytest.mark.slow
def test_the_program_runs_and_every_toolkit_finds_the_same_values(floor, tmp_path, capsys):
    program = runpy.run_path(
        str(BENCH / "sweep.py")
    )  # not imported: to the tests, `sweep` is the folder of tests beside this file
    rows = ["resid16", "heads", "floor", "curves", "equality"]
    program["main"](["--quick", "--repeats", "1", "--threads", "1", "--folder", str(tmp_path), "--rows", *rows])
    speed, equality = (pd.read_csv(tmp_path / f"{name}.csv") for name in ("speed", "equality"))
    assert len(speed) == 3 and (speed["difference / metric"] < 2e-5).all() and (speed["effect / metric"] > 0.01).all()
    assert len(equality) == 8 and equality["equal"].all()
    names = {
        "speed.csv",
        "floor.csv",
        "curves.csv",
        "slopes.csv",
        "equality.csv",
        "curves_seconds.png",
        "curves_work_gflop.png",
    }
    assert {path.name for path in tmp_path.iterdir()} == names
    assert "| resid16 | resid_pre | TransformerLens 4.3 |" in capsys.readouterr().out
