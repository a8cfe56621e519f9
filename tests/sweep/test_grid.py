"""Axes, windows, joint patches, positions by role, and the refusals of what no grid can be."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from strategies import Case, small, translator
from sweep_cases import CASES, assert_close, by_hand, grid_cells, joint, pair_of, values_of

from interp import AddNoise, Replace, Transformer, logit_difference, patch_sweep, run_many
from interp.hookable import UnsupportedModelError
from interp.model import ModelConfig
from interp.sites import UnknownSiteError
from interp.sweep import SweepError
from interp.sweep.grid import layer_spans

READ = logit_difference(1, 2)


@pytest.fixture(scope="module")
def pair():
    return pair_of(Case(small(n_layers=4), ((0, 0),) * 3), (0, 2))


def joined(pair, site, layers, by, direction="denoising"):
    """The cells of each layer that is patched together with others, as one list of writes a cell."""
    source = values_of(pair.model, pair.ends(direction)[0])
    each = grid_cells(pair.model, site, ("layer", *by), source, pair.clean)
    per_layer = len(each) // pair.model.config.n_layers
    return [joint(each[layer * per_layer + i] for layer in layers) for i in range(per_layer)]


@pytest.mark.parametrize("direction", ["denoising", "noising"])
@pytest.mark.parametrize(
    ("site", "by"), [("attn_out", ("position",)), ("z", ("head",)), ("ffn_act", ("neuron", "role")), ("k", ())]
)
def test_a_window_patches_its_layers_jointly(pair, site, by, direction):
    got = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, site, ("window", *by), direction, window=3)
    windows = {0: [0, 1], 1: [0, 1, 2], 2: [1, 2, 3], 3: [2, 3]}
    cells = [cell for layers in windows.values() for cell in joined(pair, site, layers, by, direction)]
    expected = by_hand(pair, cells, READ, direction)
    assert_close(got.values[site].flatten(0, -2), expected)
    start = got.corrupted if direction == "denoising" else got.clean
    assert float((expected - start).abs().max()) > 1e-6
    assert got.spans[site] == {0: (0, 1, True), 1: (0, 2, False), 2: (1, 3, False), 3: (2, 3, True)}


def test_windows_wider_than_the_model_and_of_one_layer(pair):
    ends = pair.model, pair.clean, pair.corrupted, READ, "ffn_out"
    wide = patch_sweep(*ends, ("window", "position"), window=9)
    every = patch_sweep(*ends, ("position",))
    for centre in range(4):
        assert_close(wide.values["ffn_out"][centre], every.values["ffn_out"])
    assert all(span == (0, 3, True) for span in wide.spans["ffn_out"].values())
    one = patch_sweep(*ends, ("window", "position"), window=1)
    assert_close(one.values["ffn_out"], patch_sweep(*ends).values["ffn_out"])
    assert not any(cut for _, _, cut in one.spans["ffn_out"].values())
    assert layer_spans((0, 1, 2), ("position",), 1) == ((0, 1, 2),)


def test_sites_patched_jointly(pair):
    source = values_of(pair.model, pair.clean)
    got = patch_sweep(
        pair.model, pair.clean, pair.corrupted, READ, [("attn_out", "ffn_out"), ("q", "k", "v")], ("layer", "position")
    )
    for names in (("attn_out", "ffn_out"), ("q", "k", "v")):
        each = [grid_cells(pair.model, name, ("layer", "position"), source, pair.clean) for name in names]
        cells = [joint(many) for many in zip(*each, strict=True)]
        expected = by_hand(pair, cells, READ)
        assert_close(got.values["+".join(names)].flatten(0, -2), expected)
        assert float((expected - got.corrupted).abs().max()) > 1e-6
    window = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, [("z", "ffn_out")], ("window", "role"), window=3)
    cells = []
    for layers in ([0, 1], [0, 1, 2], [1, 2, 3], [2, 3]):
        each = [joined(pair, site, layers, ("role",)) for site in ("z", "ffn_out")]
        cells += [joint(many) for many in zip(*each, strict=True)]
    assert_close(window.values["z+ffn_out"].flatten(0, -2), by_hand(pair, cells, READ))


def test_heads_of_queries_and_of_keys_jointly_need_as_many_of_each():
    pair = pair_of(CASES["modern"], (1,))
    with pytest.raises(SweepError, match=r"\[2, 4\] entries on the axis 'head'"):
        patch_sweep(pair.model, pair.clean, pair.corrupted, READ, [("q", "k")], ("layer", "head"))
    got = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, [("k", "v")], ("layer", "head"))
    assert got.values["k+v"].shape == (3, 2, 2)


def test_roles_of_the_source_name_the_encoders_positions():
    pair = pair_of(CASES["two stacks, padded"], (1, 2))
    got = patch_sweep(
        pair.model, pair.clean, pair.corrupted, READ, ["encoder.resid_post", "cross_v"], ("layer", "role")
    )
    assert got.coordinates["encoder.resid_post"][1] == ["word"] == got.coordinates["cross_v"][1]
    assert got.table()["role"].unique().tolist() == ["word"]
    for site in ("encoder.resid_post", "cross_v"):
        source = values_of(pair.model, pair.clean)
        expected = by_hand(pair, grid_cells(pair.model, site, ("layer", "role"), source, pair.clean), READ)
        assert_close(got.values[site].flatten(0, -2), expected)


def test_one_position_of_the_list_twice(pair):
    got = patch_sweep(pair.model, pair.clean, pair.corrupted, READ, "z", positions=[3, -2, 3])
    assert got.coordinates["z"][1] == [3, -2, 3]
    for other in (1, 2):
        assert_close(got.values["z"][:, other], got.values["z"][:, 0])


TRANSLATOR = pair_of(Case(translator(n_layers=2, n_encoder_layers=2)), (1,))


@pytest.mark.parametrize(
    ("sites", "options", "words"),
    [
        ("z", {"by": ("layer", "window")}, "layer or window"),
        ("z", {"by": ("head", "neuron")}, "head or neuron"),
        ("z", {"by": ("layer", "edge")}, "by="),
        ("z", {"by": ("window",), "window": 2}, "an odd number of layers"),
        ("z", {"by": ("window",), "window": 0}, "window=0"),
        ("z", {"by": ("window",), "window": True}, "window=True"),
        ("z", {"window": 3}, "needs 'window' in by"),
        ("ffn_act", {"by": ("layer", "head")}, "cannot be swept by 'head'"),
        ("z", {"by": ("layer", "neuron")}, "cannot be swept by 'neuron'"),
        ("pattern", {"by": ("layer", "position")}, "has axes head, query, key"),
        ("final", {"by": ("window",), "window": 3}, "has no layer"),
        (["z", "z"], {}, "'z' twice"),
        ([()], {}, "an empty tuple"),
        ([("z", "embed")], {"by": ("position",)}, "do not lie in the same layers"),
        ([3], {}, "names without a layer"),
        (["0.z"], {}, "names without a layer"),
        ("z", {"positions": "last"}, "a list of ints"),
        ("z", {"exact": "roughly"}, "exact='roughly'"),
        ("z", {"positions": [0], "by": ("layer", "role")}, "needs 'position'"),
    ],
)
def test_what_is_no_grid_is_refused(pair, sites, options, words):
    with pytest.raises(SweepError, match=words):
        patch_sweep(pair.model, pair.clean, pair.corrupted, READ, sites, **options)


def test_a_stack_must_be_named_where_both_have_the_site():
    ends = TRANSLATOR.model, TRANSLATOR.clean, TRANSLATOR.corrupted, READ
    with pytest.raises(SweepError, match=r"'encoder\.z', 'decoder\.z'"):
        patch_sweep(*ends, "z", ("layer",))
    with pytest.raises(SweepError, match="count positions of different sequences"):
        patch_sweep(*ends, [("encoder.z", "decoder.z")], ("layer", "position"))
    with pytest.raises(UnknownSiteError):
        patch_sweep(*ends, "decoder.k_rot", ("layer",))
    assert patch_sweep(*ends, "cross_z", ("layer",)).values["cross_z"].shape == (2, 2)


def test_pairs_may_differ_in_their_tokens_only():
    def refused(case, words, **change):
        pair = pair_of(case, (1,))
        with pytest.raises(SweepError, match=words):
            patch_sweep(pair.model, pair.clean, replace(pair.corrupted, **change), READ, "logits", ("role",))

    refused(Case(small(n_segments=3), segments=True), "differ in segments", segments=torch.zeros(2, 5).long())
    refused(
        Case(small(kind="prefix-decoder"), prefixes=(1, 2)),
        "differ in prefix_length",
        prefix_length=torch.tensor([1, 1]),
    )
    refused(Case(translator()), r"sources have shape \(2, 4\)", source=torch.zeros(2, 3).long())
    refused(
        Case(translator()), r"sources of pair\(s\) \[1\]", source_mask=torch.tensor([[True] * 4, [True] * 3 + [False]])
    )
    refused(Case(small()), "role 'late' stands at different positions", roles={"late": torch.tensor([0, 1])})
    refused(Case(small()), "role 'late' stands at different", roles={})


@pytest.mark.parametrize("direction", ["denoising", "noising"])
def test_a_metric_at_a_role_that_moves_between_the_prompts(pair, direction):
    """Either it is refused, or every cell reads the role of the run that it changes, as the reference does."""
    moved = replace(pair.corrupted, roles={**pair.corrupted.roles, "own": torch.tensor([4, 4, 4])})
    read = logit_difference(1, 2, position="own")
    try:
        got = patch_sweep(pair.model, pair.clean, moved, read, "resid_pre", ("layer", "position"), direction, check=0)
    except SweepError:
        return
    source, base = (pair.clean, moved) if direction == "denoising" else (moved, pair.clean)
    held = values_of(pair.model, source)
    cells = [Replace(f"{layer}.resid_pre", held[f"{layer}.resid_pre"][:, position], at=position)
             for layer in range(4) for position in range(5)]  # fmt: skip
    expected = run_many(pair.model, base, cells, read, engine="reference").values["cells"]
    assert_close(got.values["resid_pre"].flatten(0, 1), expected)


def test_a_model_without_logits_is_refused():
    model = Transformer(ModelConfig(vocab=9, n_layers=1, n_heads=1, d_model=8, n_ctx=8, head=False)).double()
    tokens = torch.zeros(1, 4).long()
    with pytest.raises(UnsupportedModelError, match="no unembedding"):
        patch_sweep(model, tokens, tokens, READ)


def test_corruptions_are_inputs_or_interventions(pair):
    with pytest.raises(SweepError, match="beside interventions"):
        patch_sweep(pair.model, pair.clean, [AddNoise("embed", 1.0), pair.corrupted], READ)
    with pytest.raises(UnknownSiteError):
        patch_sweep(pair.model, pair.clean, AddNoise("7.z", 1.0), READ)
