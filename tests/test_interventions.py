"""Each intervention against the same change written out in plain indexing."""

from __future__ import annotations

import pytest
import torch

from interp import Add, AddNoise, Freeze, Inputs, KnockOut, Mean, Project, Replace, Resample, Scale, Zero, run
from interp.at import SelectionError
from interp.interventions import InterventionError, derangement


@pytest.fixture(scope="module")
def other(tokens):
    return (tokens + 3) % 13


def after(model, tokens, change, site):
    return run(model, tokens, record=site, change=change).cache[site]


@pytest.mark.parametrize(
    ("site", "at", "index"),
    [
        ("0.z", (3, 2), (slice(None), 3, 2)),
        ("0.z", (-1, 2), (slice(None), 6, 2)),
        ("0.z", (slice(1, 4), -1), (slice(None), slice(1, 4), 3)),
        ("0.resid_mid", (), (slice(None),)),
        ("0.resid_mid", 2, (slice(None), 2)),
        ("0.resid_mid", ([0, 5],), (slice(None), [0, 5])),
        ("0.resid_mid", (range(2, 4),), (slice(None), [2, 3])),
        ("1.pattern", (1, 5, 2), (slice(None), 1, 5, 2)),
        ("1.k", (slice(None), 1), (slice(None), slice(None), 1)),
        ("0.ffn_act", (4, slice(0, 9, 2)), (slice(None), 4, slice(0, 9, 2))),
    ],
)
def test_at_means_what_indexing_means(model, tokens, site, at, index):
    plain = run(model, tokens, record=site).cache[site]
    expected = plain.clone()
    expected[index] = 7.0
    assert torch.equal(after(model, tokens, Replace(site, 7.0, at=at), site), expected)


def test_lists_on_two_axes_select_their_product(model, tokens):
    plain = run(model, tokens, record="0.z").cache["0.z"]
    expected = plain.clone()
    for position in (1, 4):
        for head in (0, 3):
            expected[:, position, head] = 0
    assert torch.equal(after(model, tokens, Zero("0.z", at=([1, 4], [0, 3])), "0.z"), expected)


def test_per_example_positions_and_roles(model, tokens):
    places = torch.tensor([0, 4, 6])
    expected = run(model, tokens, record="0.z").cache["0.z"].clone()
    for example, position in enumerate(places.tolist()):
        expected[example, position, 1] = 0
    assert torch.equal(after(model, tokens, Zero("0.z", at=(places, 1)), "0.z"), expected)
    named = Inputs(tokens, roles={"subject": places})
    assert torch.equal(after(model, named, Zero("0.z", at=("subject", 1)), "0.z"), expected)
    with_slice = after(model, named, Zero("0.z", at=("subject", slice(1, 2))), "0.z")
    assert torch.equal(with_slice, expected)


def test_negative_positions_count_from_the_last_real_token(model, tokens):
    mask = torch.ones(3, 7).bool()
    mask[1, 5:] = False
    padded = Inputs(tokens, mask=mask)
    got = after(model, padded, Replace("0.resid_mid", 5.0, at=-1), "0.resid_mid")
    plain = run(model, padded, record="0.resid_mid").cache["0.resid_mid"]
    changed = (got != plain).any(-1).nonzero().tolist()
    assert changed == [[0, 6], [1, 4], [2, 6]]


@pytest.mark.parametrize(
    ("site", "at", "words"),
    [
        ("0.z", (7,), "7 is out of range; allowed: 0 … 6"),
        ("0.z", (0, 4), "head of '0.z': 4 is out of range; allowed: 0 … 3"),
        ("0.k", (0, 2), "kv_head of '0.k': 2 is out of range; allowed: 0 … 1"),
        ("0.z", (slice(5, 5),), "selects nothing"),
        ("0.z", ([],), "selects nothing"),
        ("0.z", (0, 0, 0, 0), "has 4 entries, but '0.z' has 3 axes"),
        ("0.z", ("subject",), "unknown role 'subject'"),
        ("0.z", (torch.tensor([1, 2]),), r"int tensor \[3\]"),
        ("0.z", (torch.tensor([0, 1, 9]),), "out of range"),
        ("0.z", (torch.tensor([True, False, True]),), "int tensor"),
        ("0.z", (1.5,), "1.5"),
        ("0.z", (True,), "True"),
    ],
)
def test_an_index_that_selects_nothing_or_is_none_is_refused(model, tokens, site, at, words):
    with pytest.raises(SelectionError, match=words):
        run(model, tokens, change=Zero(site, at=at))


def test_a_position_on_padding_is_refused(model, tokens):
    mask = torch.ones(3, 7).bool()
    mask[2, :2] = False
    with pytest.raises(SelectionError, match=r"padding in example\(s\) \[2\]"):
        run(model, Inputs(tokens, mask=mask), change=Zero("0.resid_mid", at=1))


def test_replace_from_a_run_takes_the_same_site_and_index(model, tokens, other):
    source = run(model, other, record="0.z")
    expected = run(model, tokens, record="0.z").cache["0.z"].clone()
    expected[:, 3, 2] = source.cache["0.z"][:, 3, 2]
    assert torch.equal(after(model, tokens, Replace("0.z", source, at=(3, 2)), "0.z"), expected)
    assert torch.equal(after(model, tokens, Freeze("0.z", source, at=(3, 2)), "0.z"), expected)


def test_freezing_undoes_an_upstream_change(model, tokens):
    plain = run(model, tokens, record=["1.attn_out", "1.ffn_out", "0.resid_post"])
    frozen = [Freeze(f"1.{name}", plain) for name in ("attn_out", "ffn_out")]
    got = run(model, tokens, change=[Add("0.resid_post", 1.0), *frozen], record="1.resid_post")
    expected = run(model, tokens, record="1.resid_post").cache["1.resid_post"] + 1.0
    assert torch.allclose(got.cache["1.resid_post"], expected, atol=1e-12)


def test_patching_attn_out_equals_adding_the_difference_to_the_stream(model, tokens, other):
    """TRAPS: resid_pre + attn_out = resid_mid, so both patches are the same."""
    source = run(model, other, record="1.attn_out")
    plain = run(model, tokens, record=["1.attn_out"])
    difference = source.cache["1.attn_out"] - plain.cache["1.attn_out"]
    a = run(model, tokens, change=Replace("1.attn_out", source)).logits
    b = run(model, tokens, change=Add("1.resid_mid", difference)).logits
    assert torch.allclose(a, b, atol=1e-12)


def test_scale_add_mean_noise(model, tokens, other):
    plain = run(model, tokens, record="0.ffn_out").cache["0.ffn_out"]
    assert torch.equal(after(model, tokens, Scale("0.ffn_out", 0.5), "0.ffn_out"), plain * 0.5)
    assert torch.equal(
        after(model, tokens, Add("0.ffn_out", torch.arange(16.0)), "0.ffn_out"), plain + torch.arange(16.0)
    )
    reference = run(model, other, record="0.ffn_out")
    mean = reference.cache["0.ffn_out"].mean(0, keepdim=True).expand(3, 7, 16)
    assert torch.equal(after(model, tokens, Mean("0.ffn_out", reference), "0.ffn_out"), mean)
    noisy = after(model, tokens, AddNoise("0.ffn_out", 0.1, seed=3), "0.ffn_out")
    assert torch.equal(noisy, after(model, tokens, AddNoise("0.ffn_out", 0.1, seed=3), "0.ffn_out"))
    assert not torch.equal(noisy, after(model, tokens, AddNoise("0.ffn_out", 0.1, seed=4), "0.ffn_out"))
    assert 0.08 < (noisy - plain).std() < 0.12


def test_mean_at_roles_averages_each_examples_own_position(model, tokens):
    places = torch.tensor([0, 4, 6])
    inputs = Inputs(tokens, roles={"subject": places})
    reference = run(model, inputs, record="0.ffn_out")
    mean = reference.cache["0.ffn_out"][torch.arange(3), places].mean(0)
    got = after(model, inputs, Mean("0.ffn_out", reference, at="subject"), "0.ffn_out")
    assert torch.allclose(got[torch.arange(3), places], mean.expand(3, 16), atol=1e-14)


def test_resample_gives_every_example_anothers_value(model, tokens):
    plain = run(model, tokens, record="0.ffn_out").cache["0.ffn_out"]
    got = after(model, tokens, Resample("0.ffn_out", seed=0), "0.ffn_out")
    assert torch.equal(got, plain[derangement(3, 0)])
    with pytest.raises(InterventionError, match="at least 2 examples"):
        run(model, tokens[:1], change=Resample("0.ffn_out"))


@pytest.mark.parametrize("n", [2, 3, 7])
def test_a_derangement_has_no_fixed_point(n):
    for seed in range(30):
        order = derangement(n, seed)
        assert sorted(order.tolist()) == list(range(n)) and not (order == torch.arange(n)).any()


def test_knock_out_cuts_the_edge_and_renormalises(model, tokens):
    plain = run(model, tokens, record="0.pattern").cache["0.pattern"]
    got = run(model, tokens, record="0.pattern", change=KnockOut("0.scores", at=(1, 5, 2))).cache["0.pattern"]
    row = plain[:, 1, 5].clone()
    row[:, 2] = 0
    assert torch.allclose(got[:, 1, 5], row / row.sum(-1, keepdim=True), atol=1e-14)
    untouched = torch.ones(4, 7).bool()
    untouched[1, 5] = False
    assert torch.equal(got[:, untouched], plain[:, untouched])
    with pytest.raises(InterventionError, match=r"'L\.scores'"):
        KnockOut("0.pattern")


def test_a_query_without_edges_reads_zero(model, tokens):
    got = run(model, tokens, record=["0.z", "0.pattern"], change=KnockOut("0.scores", at=(slice(None), 4)))
    assert torch.equal(got.cache["0.z"][:, 4], torch.zeros(3, 4, 4).double())
    assert torch.isfinite(got.logits).all()


def test_project_removes_or_keeps_a_subspace(model, tokens):
    basis = torch.randn(3, 16, generator=torch.Generator().manual_seed(0)).double()
    plain = run(model, tokens, record="0.resid_mid").cache["0.resid_mid"]
    gone = after(model, tokens, Project("0.resid_mid", basis), "0.resid_mid")
    kept = after(model, tokens, Project("0.resid_mid", basis, keep=True), "0.resid_mid")
    assert (gone @ basis.T).abs().max() < 1e-12
    assert torch.allclose(gone + kept, plain, atol=1e-12)
    for bad, words in ((basis[:, :5], r"\[k 16\]"), (basis[[0, 0]], "span only 1 dimensions")):
        with pytest.raises(InterventionError, match=words):
            run(model, tokens, change=Project("0.resid_mid", bad))


def test_values_that_do_not_fit_are_refused(model, tokens, other):
    with pytest.raises(InterventionError, match="does not broadcast"):
        run(model, tokens, change=Replace("0.z", torch.zeros(5), at=(3, 2)))
    shorter = run(model, other[:, :5], record="0.z")
    with pytest.raises(InterventionError, match="same batch and length"):
        run(model, tokens, change=Replace("0.z", shorter))
    with pytest.raises(KeyError, match=r"'0\.z' was not recorded"):
        run(model, tokens, change=Replace("0.z", run(model, other)))


def test_the_given_tensor_and_the_source_run_are_never_written(model, tokens, other):
    value = torch.zeros(16).double()
    source = run(model, other, record="0.resid_mid")
    copy = source.cache["0.resid_mid"].clone()
    changes = [Replace("0.resid_mid", source), Replace("0.resid_mid", value, at=2), Add("0.resid_mid", 1.0, at=3)]
    got = run(model, tokens, record="0.resid_mid", change=changes)
    got.cache["0.resid_mid"].add_(1)
    assert torch.equal(value, torch.zeros(16).double()) and torch.equal(source.cache["0.resid_mid"], copy)


def test_gradients_reach_a_replaced_value(model, tokens):
    value = torch.zeros(16, dtype=torch.float64, requires_grad=True)
    got = run(model, tokens, change=Replace("0.resid_mid", value, at=3), grad=True)
    (gradient,) = torch.autograd.grad(got.logits.sum(), value)
    assert gradient.abs().sum() > 0


def test_lists_and_slices_under_a_mask(model, tokens):
    mask = torch.ones(3, 7).bool()
    mask[1, 4:] = False
    padded = Inputs(tokens, mask=mask)
    plain = run(model, padded, record="0.z").cache["0.z"]
    got = after(model, padded, Zero("0.z", at=([0, 2],)), "0.z")
    assert (got != plain).any(-1).any(-1).nonzero().tolist() == [[e, p] for e in range(3) for p in (0, 2)]
    for at, words in (([0, 5], "padding"), ([-1, 0], "counts from the end"), (slice(-2, None), "counts from the end")):
        with pytest.raises(SelectionError, match=words):
            run(model, padded, change=Zero("0.z", at=(at,)))


def test_averages_and_exchanges_never_read_padding(model, tokens):
    mask = torch.ones(3, 7).bool()
    mask[1, 4:] = False
    padded = Inputs(tokens, mask=mask, roles={"here": torch.tensor([0, 3, 5])})
    reference = run(model, padded, record="0.ffn_out")
    for change in (Mean("0.ffn_out", reference), Resample("0.ffn_out"), Resample("0.scores")):
        with pytest.raises(InterventionError, match="would read padding"):
            run(model, padded, change=change)
    run(model, padded, change=[Mean("0.ffn_out", reference, at="here"), Resample("0.ffn_out", at=-1)])
