"""What a sweep returns: tables on request, effects, and a result too large to be a table."""

from __future__ import annotations

import pandas as pd
import pytest
import torch
from strategies import Case, small
from sweep_cases import pair_of

from interp import Scale, SweepResult, ablation_sweep, logit_difference, patch_sweep, run_many

READ = logit_difference(1, 2)


def made(
    shape=(2, 3), axes=("layer", "position"), direction="denoising", corrupted=(1.0, 3.0), **options
) -> SweepResult:
    """A result of known numbers."""
    values = torch.arange(float(torch.tensor(shape).prod()) * 2).reshape(*shape, 2)
    return SweepResult(
        "m", "logits", direction, {"z": values}, {"z": axes}, {"z": tuple(list(range(n)) for n in shape)},
        torch.tensor([2.0, 6.0]), None if corrupted is None else torch.tensor(corrupted), **options,
    )  # fmt: skip


def test_effects_by_hand():
    value = float(torch.tensor([10.0, 11.0]).mean())  # the last cell
    assert made().effect()["z"][1, 2] == pytest.approx((value - 2) / (4 - 2))
    assert made(direction="noising").effect()["z"][1, 2] == pytest.approx((value - 4) / (2 - 4))
    assert made(direction="ablation (zero)", corrupted=None).effect()["z"][1, 2] == pytest.approx(value - 4)


def test_a_large_sweep_is_no_table_unless_asked():
    big = made((200, 150, 100), ("layer", "position", "neuron"))
    with pytest.raises(ValueError, match=r"6,000,000 rows, more than max_rows=5,000,000; allowed: \.values"):
        big.table()
    with pytest.raises(ValueError, match="max_rows=11"):
        made().table(max_rows=11)
    assert len(made().table(max_rows=12)) == 12 == len(made().table(max_rows=None))
    assert repr(big) == "SweepResult(m, denoising, 2 examples: z layer×position×neuron (200, 150, 100))"
    assert big.effect()["z"].shape == (200, 150, 100)


def test_a_real_sweep_of_neurons_stays_a_tensor(monkeypatch):
    pair = pair_of(Case(small(d_ff=300)), (1,))
    monkeypatch.setattr(pd, "DataFrame", None)
    got = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, "ffn_act", ("layer", "neuron"))
    assert got.values["ffn_act"].shape == (2, 300, 2) and "neuron" in repr(got)
    assert got.effect()["ffn_act"].shape == (2, 300)


def test_tables_have_the_axes_of_every_sweep():
    pair = pair_of(Case(small(n_layers=4)), (0, 2))
    ends = pair.model, pair.clean, pair.corrupted, READ
    table = patch_sweep(*ends, "z", ("window", "head"), window=3).table()
    columns = [
        "site",
        "layer",
        "head",
        "position",
        "window",
        "first_layer",
        "last_layer",
        "clipped",
        "example",
        "clean",
        "corrupted",
        "patched",
    ]
    assert list(table.columns) == columns
    one = table[(table["window"] == 3) & (table["head"] == 1)]
    assert one[["first_layer", "last_layer", "clipped"]].drop_duplicates().values.tolist() == [[2, 3, True]]
    assert table["position"].isna().all() and str(table["first_layer"].dtype) == "Int64"
    table = patch_sweep(*ends, "ffn_act", ("neuron", "role")).table()
    assert len(table) == 7 * 2 * 2 and table["layer"].isna().all()
    assert table["neuron"].tolist()[:4] == [0, 0, 0, 0] and table["role"].tolist()[:4] == ["late", "late", "own", "own"]
    table = run_many(pair.model, pair.clean, {"half": Scale("0.z", 0.5), "twice": Scale("0.z", 2.0)}, READ).table()
    assert table["cell"].tolist() == ["half", "half", "twice", "twice"] and "corrupted" not in table.columns
    table = ablation_sweep(pair.model, pair.clean, READ, "zero", "z", ("layer", "head")).table()
    assert len(table) == 16 and "corrupted" not in table.columns


def test_every_number_of_a_table_is_the_tensors():
    pair = pair_of(Case(small()), (0, 2))
    got = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, ["z", "ffn_act"], ("position", "layer"))
    for row in got.table().itertuples():
        assert row.patched == got.values[row.site][row.position, row.layer, row.example]
        assert (row.clean, row.corrupted) == (got.clean[row.example], got.corrupted[row.example])
    effect = got.effect()
    table = got.effect_table()
    assert len(table) == 2 * 10 and list(table.columns) == ["site", "position", "layer", "effect"]
    for row in table.itertuples():
        assert row.effect == effect[row.site][row.position, row.layer]


def test_joint_sites_share_one_name():
    pair = pair_of(Case(small()), (0, 2))
    got = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, [("attn_out", "ffn_out"), "z"], ("layer",))
    assert list(got.values) == ["attn_out+ffn_out", "z"]
    assert set(got.table()["site"]) == {"attn_out+ffn_out", "z"}


def test_a_result_says_how_it_was_computed():
    pair = pair_of(Case(small()), (1,))
    got = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, "z", check=3)
    assert (got.engine, got.exact, got.checks, got.metric, got.unit) == (
        "fast",
        "rounding",
        3,
        "logit_difference",
        "logits",
    )
    assert 0 <= got.checked < 1e-12 and got.work["token_layers"] > 0
