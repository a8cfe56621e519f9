"""DAS on a planted model whose subspaces are known, and the controls that must fail there."""

from __future__ import annotations

import math

import pytest
import torch

from interp import Inputs, ModelConfig, Project, Replace, Transformer, run
from interp.analyses.das import DAS
from interp.analyses.interchange import DASError, Interchange, interchange
from interp.at import SelectionError
from interp.hookable import UnsupportedModelError

TURN = torch.linalg.qr(torch.randn(8, 8, generator=torch.Generator().manual_seed(7), dtype=torch.float64)).Q


@pytest.fixture(scope="module")
def planted():
    """Token 4a + b is R(e_a + f_b) and the answer the last token: `a` lies in the first four columns of R, `b` in the others."""
    config = ModelConfig(vocab=16, n_layers=1, n_heads=1, d_model=8, n_ctx=2, norm="none", final_norm=False, ffn="none",
                         positions="none", tied_embeddings=True)  # fmt: skip
    found = Transformer(config, seed=0).double()
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.zero_()
        for token in range(16):
            found.embedding.weight[token] = TURN[:, token // 4] + TURN[:, 4 + token % 4]
    return found


@pytest.fixture(scope="module")
def pairs():
    """Every ordered pair of different tokens; the counterfactual answer has `a` of the source and `b` of the base."""
    both = torch.cartesian_prod(torch.arange(16), torch.arange(16))
    base, source = both[both[:, 0] != both[:, 1]].T
    return base[:, None], source[:, None], source // 4 * 4 + base % 4


@pytest.fixture(scope="module")
def found(planted, pairs):
    return DAS.train(planted, *pairs, "0.resid_post", -1, dim=3, steps=85, learning_rate=5e-2, seed=2)


def test_the_planted_subspace_is_found_and_the_controls_fail(found):
    by = found.table().query("split == 'held_out'").groupby("arm")["accuracy"].mean()
    assert by["das"] == 1.0 and by["none"] < 0.3 and by["full"] < 0.3, "a whole vector brings the source's b along"
    assert by["random basis"] < 0.5 and by["placebo"] < 0.3 and by["random model"] < 0.5
    B = found.basis
    assert torch.allclose(B.T @ B, torch.eye(3, dtype=torch.float64), atol=1e-12)
    # What moves `a` are differences e_a − e_a', three directions; none of b's.
    moved = (TURN[:, 1:4] - TURN[:, :1]).T @ B
    other = (TURN[:, 5:] - TURN[:, 4:5]).T @ B
    assert moved.norm() / (TURN[:, 1:4] - TURN[:, :1]).norm() > 0.95 and other.norm() / moved.norm() < 0.2
    lowest = math.log((math.e**2 + 6 * math.e + 9) / math.e**2)  # logits 2, six times 1, nine times 0
    assert abs(found.history["loss"].iloc[-1] - lowest) < 0.02 and found.history["loss"].iloc[0] > lowest + 0.3


def test_the_table_says_what_was_counted(found, pairs):
    table = found.table()
    assert table.columns.tolist() == ["arm", "draw", "split", "dim", "n", "accuracy", "kept", "change_norm"]
    assert set(table.query("split == 'held_out'")["n"]) == {60} and len(found.held_out) == 60
    assert table.query("split == 'train'")[["arm", "n"]].values.tolist() == [["das", 180]]
    assert table["arm"].value_counts()[["random basis", "placebo"]].tolist() == [5, 5]
    by = table.query("split == 'held_out'").groupby("arm")
    assert by["change_norm"].first()["placebo"] == pytest.approx(by["change_norm"].first()["das"], rel=1e-12)
    assert by["kept"].first()["none"] == 1.0 and by["change_norm"].first()["none"] == 0.0
    base, source, labels = (one[found.held_out] for one in pairs)
    assert by["accuracy"].first()["none"] == pytest.approx(float((base[:, 0] == labels).double().mean()))
    assert by["accuracy"].first()["full"] == pytest.approx(float((source[:, 0] == labels).double().mean()))


def test_an_interchange_is_the_sum_of_two_projections(model, tokens):
    """base outside the span + source inside it, against `Project`; the whole basis is a patch, none of it nothing."""
    source = tokens.flip(0).flip(1)
    basis = torch.linalg.qr(torch.randn(16, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)).Q
    ours, theirs = (run(model, one, record="1.resid_pre").cache["1.resid_pre"] for one in (tokens, source))
    outside = run(model, tokens, record="1.resid_pre", change=Project("1.resid_pre", basis.T)).cache["1.resid_pre"]
    inside = run(model, source, record="1.resid_pre", change=Project("1.resid_pre", basis.T, keep=True)).cache[
        "1.resid_pre"
    ]
    got = interchange(model, tokens, source, "1.resid_pre", 3, basis, record="1.resid_pre")
    assert torch.allclose(got.cache["1.resid_pre"][:, 3], (outside + inside)[:, 3], atol=1e-12)
    rest = [0, 1, 2, 4, 5, 6]
    assert torch.equal(got.cache["1.resid_pre"][:, rest], ours[:, rest])
    whole = interchange(model, tokens, source, "1.resid_pre", 3, torch.eye(16)).logits
    patched = run(model, tokens, change=Replace("1.resid_pre", theirs[:, 3], at=3)).logits
    assert torch.allclose(whole, patched, atol=1e-12)


def test_roles_and_heads(model, tokens):
    """A role is looked up in each; a head's z is a vector like any other."""
    base = Inputs(tokens, roles={"subject": torch.tensor([1, 2, 3])})
    source = Inputs(tokens, roles={"subject": torch.tensor([4, 5, 6])})
    got = interchange(model, base, source, "0.z", ("subject", 2), torch.eye(4), record="0.z").cache["0.z"]
    z = run(model, tokens, record="0.z").cache["0.z"]
    for i in range(3):
        assert torch.allclose(got[i, i + 1, 2], z[i, i + 4, 2], atol=1e-12) and torch.equal(
            got[i, i + 1, 1], z[i, i + 1, 1]
        )
    moved = interchange(model, base, base, "0.z", ("subject", 2), torch.eye(4), source_at=(0, 2), record="0.z").cache[
        "0.z"
    ]
    assert torch.allclose(moved[1, 2, 2], z[1, 0, 2], atol=1e-12)


def test_equal_seeds_equal_bases_and_the_model_stays_as_it_was(planted, pairs):
    options = {"site": "0.resid_post", "at": -1, "dim": 2, "steps": 5, "draws": 1}
    before = {name: p.clone() for name, p in planted.named_parameters()}
    one, two = (DAS.train(planted, *pairs, seed=3, **options) for _ in range(2))
    other = DAS.train(planted, *pairs, seed=4, **options)
    assert (
        torch.equal(one.basis, two.basis)
        and one.table().equals(two.table())
        and not torch.equal(one.basis, other.basis)
    )
    assert not one.basis.requires_grad
    assert all(p.grad is None and p.requires_grad and torch.equal(p, before[n]) for n, p in planted.named_parameters())


def test_pairs_held_out_are_not_trained_on(planted, pairs):
    doubled = [torch.cat([one[:20], one[:20]]) for one in pairs]
    found = DAS.train(planted, *doubled, "0.resid_post", -1, dim=2, steps=1, draws=1, held_out=0.3)
    apart = set((found.held_out % 20).tolist())
    assert len(found.held_out) == 12 and len(apart) == 6, "equal pairs fall on the same side"
    chosen = DAS.train(planted, *pairs, "0.resid_post", -1, dim=2, steps=1, draws=1, held_out=[3, 5])
    assert chosen.held_out.tolist() == [3, 5]


def test_refusals(planted, pairs, model, tokens):
    base, source, labels = pairs
    for arguments, options, match in (
        ((base, source[:-1], labels), {}, "row i of both"),
        ((base, source, labels[:-1]), {}, "labels must be"),
        ((base, source, labels + 5), {}, r"0 … 15"),
        ((base, source, labels), {"dim": 9}, r"dim=9 .* 1 … 8"),
        ((base, source, labels), {"held_out": 1.5}, "held_out=1.5"),
        ((base, source, labels), {"held_out": list(range(240))}, "none trained on"),
    ):
        with pytest.raises(DASError, match=match):
            DAS.train(planted, *arguments, "0.resid_post", -1, **{"dim": 2, "steps": 1, **options})
    with pytest.raises(DASError, match="not orthonormal"):
        interchange(model, tokens, tokens, "0.resid_pre", 0, torch.ones(16, 2))
    with pytest.raises(DASError, match=r"\[16 dim\]"):
        run(model, tokens, change=Interchange("0.resid_pre", torch.zeros(16), torch.eye(4), at=0))
    with pytest.raises(DASError, match="last axis whole"):
        interchange(model, tokens, tokens, "0.resid_pre", (0, slice(4)), torch.eye(4))
    with pytest.raises(SelectionError, match="out of range"):
        interchange(model, tokens, tokens, "0.resid_pre", 9, torch.eye(16))

    class Foreign:
        def __getattr__(self, name):
            return getattr(planted, name)

        def __call__(self, inputs, tap=None):
            return planted(inputs, tap)

    with pytest.raises(UnsupportedModelError, match="random_model="):
        DAS.train(Foreign(), *pairs, "0.resid_post", -1, dim=2, steps=1)
