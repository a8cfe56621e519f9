"""Finished cells on disk: another sweep's are refused, files that were cut off too, and a crash leaves the older file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from strategies import Case, random_model, small
from sweep_cases import pair_of

from interp import Freeze, Replace, Scale, Zero, logit_difference, patch_sweep, run, run_many
from interp.sweep import Checkpoint, SweepError, path_patch
from interp.sweep.checkpoint import mark_of

READ = logit_difference(1, 2)


@pytest.fixture(scope="module")
def pair():
    return pair_of(Case(small(), length=6), (1,))


def sweep(pair, checkpoint, metric=READ, sites="resid_pre", by=("layer", "position"), **options):
    return patch_sweep(
        pair.model, pair.clean, pair.corrupted, metric, sites, by, checkpoint=checkpoint, check=0, **options
    )


OTHERS = {
    "model": lambda pair: {"pair": replace(pair, model=random_model(small(), 99))},
    "base inputs": lambda pair: {"pair": replace(pair, corrupted=pair.clean)},
    "source inputs": lambda pair: {"pair": replace(pair, clean=replace(pair.clean, tokens=pair.clean.tokens.flip(0)))},
    "metric": lambda pair: {"metric": logit_difference(1, 3)},
    "metric's position": lambda pair: {"metric": logit_difference(1, 2, position=4)},
    "axes": lambda pair: {"by": ("layer",)},
    "axes in another order": lambda pair: {"by": ("position", "layer")},
    "positions": lambda pair: {"positions": [0, 2, 3, 1, 4, 5]},
    "direction": lambda pair: {"direction": "noising"},
    "exactness": lambda pair: {"exact": "bitwise"},
    "engine": lambda pair: {"engine": "reference"},
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("where", ["memory", pytest.param("file", marks=pytest.mark.slow)])
def test_another_sweeps_checkpoint_is_refused(tmp_path, pair, what, where):
    kept = Checkpoint() if where == "memory" else tmp_path / "kept"
    sweep(pair, kept)
    with pytest.raises(
        SweepError, match=r"holds another sweep of 'resid_pre': model, inputs, metric, changes or cells differ"
    ):
        sweep(**{"pair": pair, "checkpoint": kept, **OTHERS[what](pair)})
    sweep(pair, kept)


def test_a_metric_with_the_same_base_value_is_another(pair):
    """|x| and x agree where the base run's x is positive."""
    base = run(pair.model, pair.corrupted).logits[:, -1]
    plain = logit_difference(base.argmax(-1), base.argmin(-1))
    kept = Checkpoint()
    sweep(pair, kept, plain)
    with pytest.raises(SweepError, match="another sweep"):
        sweep(pair, kept, replace(plain, name="size", function=lambda x: plain.function(x).abs()))


def test_cells_of_another_list_are_refused(pair):
    kept, held = Checkpoint(), run(pair.model, pair.clean, record="0.z")
    other = run(pair.model, pair.corrupted, record="0.z")
    cells = [Zero("1.z"), Replace("0.z", held, at=2)]
    run_many(pair.model, pair.corrupted, cells, READ, checkpoint=kept)
    run_many(pair.model, pair.corrupted, cells, READ, checkpoint=kept)
    for changed in (
        [Zero("1.z", at=3), cells[1]],
        [Zero("0.z"), cells[1]],
        [cells[0], Replace("0.z", held, at=3)],
        [cells[0], Replace("0.z", other, at=2)],
        [cells[0], Freeze("0.z", held, at=2)],
        [[*cells[:1], Scale("1.z", 2.0)], cells[1]],
        [*cells, Zero("0.ffn_out")],
        cells[::-1],
    ):
        with pytest.raises(SweepError, match="another sweep"):
            run_many(pair.model, pair.corrupted, changed, READ, checkpoint=kept)
    with pytest.raises(SweepError, match="another sweep"):
        run_many(pair.model, pair.corrupted, cells, READ, checkpoint=kept, change=Scale("embed", 2.0))


def test_paths_of_other_receivers_are_refused(pair):
    kept = Checkpoint()
    ends = pair.model, pair.clean, pair.corrupted, READ
    path_patch(*ends, {"a": ("1.q", (2,))}, checkpoint=kept)
    path_patch(*ends, {"a": ("1.q", (2,))}, checkpoint=kept)
    for receivers in ({"a": ("1.q", (3,))}, {"a": ("1.k", (2,))}, {"a": ("1.q", (2,)), "b": ("1.v", ())}):
        with pytest.raises(SweepError, match="another sweep"):
            path_patch(*ends, receivers, checkpoint=kept)


@pytest.mark.parametrize("share", [0.0, 0.3, 0.99])
def test_a_truncated_file_is_refused(tmp_path, pair, share):
    path = tmp_path / "kept"
    sweep(pair, path)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(SweepError, match="no checkpoint of a sweep, or a truncated one"):
        sweep(pair, path)


def test_a_file_that_is_something_else_is_refused(tmp_path, pair):
    path = tmp_path / "kept"
    path.write_text("values: 3")
    with pytest.raises(SweepError, match="no checkpoint"):
        Checkpoint(path)
    save_file({"weight": torch.zeros(2)}, path)
    with pytest.raises(SweepError, match="no checkpoint"):
        Checkpoint(path)
    with pytest.raises(SweepError, match="no checkpoint"):
        Checkpoint(tmp_path)


def test_a_file_holds_what_was_finished_and_nothing_is_left_beside_it(tmp_path, pair):
    path = tmp_path / "kept"
    got = sweep(pair, path, sites=["resid_pre", "z"])
    assert [one.name for one in tmp_path.iterdir()] == ["kept"]
    kept = Checkpoint(path)
    assert repr(kept) == f"Checkpoint({path}: resid_pre 12 of 12, z 12 of 12)"
    assert torch.equal(kept.parts["z"][0].unflatten(0, (2, 6)), got.values["z"])
    assert repr(Checkpoint()) == "Checkpoint(in memory: nothing yet)"


def test_a_write_that_fails_leaves_the_older_file(tmp_path, monkeypatch, pair):
    path = tmp_path / "kept"
    sweep(pair, path)
    before = path.read_bytes()

    def full_disk(*arguments, **named):
        raise OSError("No space left on device")

    monkeypatch.setattr("interp.sweep.checkpoint.save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        sweep(pair, path, sites=["resid_pre", "z"])
    assert path.read_bytes() == before


def test_files_are_written_now_and_then(tmp_path, monkeypatch):
    kept, made = Checkpoint(tmp_path / "kept"), []
    monkeypatch.setattr(
        "interp.sweep.checkpoint.save_file", lambda tensors, to, metadata: made.append(Path(to).touch())
    )
    kept.part("a", "mark", torch.zeros(3, 2))
    kept.save()
    assert not made, "just made"
    monkeypatch.setattr("interp.sweep.checkpoint._EVERY", 0.0)
    kept.save()
    monkeypatch.setattr("interp.sweep.checkpoint._EVERY", 1e9)
    kept.save()
    kept.save(now=True)
    assert len(made) == 2


def test_marks_tell_values_apart():
    held = torch.arange(4.0)
    different = [
        (held,), (held.double(),), (held.view(2, 2),), (held + 0,), (Zero("0.z"),), (Zero("1.z"),), (Zero("0.z", at=1),),
        (Zero("0.z", at=(1,)),), (Replace("0.z", held),), (Freeze("0.z", held),), ([1, 2],), ([[1], 2],), ({"a": 1},),
        ("a",), (1,), (1.0,), (None,), (), (held.numpy(),), (held.numpy().astype("int64"),), ("a", "b"), ("ab",),
    ]  # fmt: skip
    marks = [mark_of(*things) for things in different]
    assert marks[0] == marks[3] and len(set(marks)) >= len(marks) - 2
    assert mark_of({"a": 1, "b": 2}) == mark_of({"b": 2, "a": 1})
