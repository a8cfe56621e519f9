"""Low-rank products against dense ones, circuits against the model's own scores and heads, nulls against brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from interp import ModelConfig, Transformer, center, fold_norm, run
from interp.analyses.circuits import Factored, HeadCircuitError, ov_circuit, qk_circuit
from interp.analyses.composition import (
    composition_scores,
    haar_corners,
    read_write_overlaps,
    subspace_overlap,
)
from interp.analyses.norm_reading import norm_readings
from interp.hookable import UnsupportedModelError

SIZES = {"vocab": 13, "n_layers": 2, "n_heads": 2, "d_model": 12, "n_ctx": 16, "ffn": "none"}


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.fixture(scope="module")
@torch.no_grad()
def absolute():
    """LayerNorm with gains off 1, learned positions, no biases in attention."""
    model = Transformer(ModelConfig(**SIZES, bias=False), seed=2).double()
    for i, norm in enumerate((*(block.norm1 for block in model.blocks), model.final_norm)):
        norm.weight.add_(0.4 * normal(12, seed=i))
    return model


def test_a_product_is_its_dense_matrix():
    a, b, c = normal(9, 3), normal(3, 9, seed=1), normal(9, 5, seed=2)
    product, dense = Factored(a, b), a @ b
    wide = Factored(normal(9, 4, seed=3), normal(4, 7, seed=4))
    for ours, theirs in [
        (product.dense(), dense), (product.T.dense(), dense.T), ((product @ c).dense(), dense @ c),
        ((c.T @ product).dense(), c.T @ dense), ((product @ wide).dense(), dense @ wide.dense()),
        ((wide.T @ product).dense(), wide.dense().T @ dense), (product @ c[:, 0], dense @ c[:, 0]),
        (c[:, 0] @ product, c[:, 0] @ dense), (product.norm(), dense.norm()), (product.rows([2, 4]), dense[[2, 4]]),
        (product.singular_values(), torch.linalg.svdvals(dense)[:3]), (product.rows(1), dense[1]),
    ]:  # fmt: skip
        assert torch.allclose(ours, theirs, atol=1e-10)
    assert (product @ wide).A.shape[1] == (wide.T @ product).A.shape[1] == 3 and product.shape == (9, 9)
    whole = torch.linalg.eigvals(dense)
    whole = whole[whole.abs() > 1e-9]
    assert torch.allclose(sorted_complex(product.eigenvalues()), sorted_complex(whole), atol=1e-9)
    with pytest.raises(HeadCircuitError, match=r"\(9, 7\)"):
        wide.eigenvalues()
    with pytest.raises(HeadCircuitError, match=r"\(9, 3\) and \(4, 7\)"):
        Factored(a, wide.B)


def sorted_complex(values):
    order = np.lexsort((values.imag.numpy().round(9), values.real.numpy().round(9)))
    return values[torch.tensor(order)]


def test_qk_and_ov_give_the_models_own_scores_and_heads(model, tokens, absolute):
    """Without biases: score_ij = scale x̂_i QK x̂_j and head_out_i = Σ_j α_ij x̂_j OV; rotary by offset, grouped heads."""
    for one in (model, absolute):
        rotates = one.config.positions == "rotary"
        one = fold_free(one)
        cache = run(one, tokens, record=["norm1_hat", "scores", "pattern", "head_out"]).cache
        for layer in range(2):
            hat = cache[f"{layer}.norm1_hat"]
            for head in range(one.config.n_heads):
                for back in (0, 2, 5):
                    qk = qk_circuit(one, layer, head, back if rotates else None).dense()
                    hand = one.config.attention_scale * (hat[:, 6] @ qk * hat[:, 6 - back]).sum(-1)
                    found = cache[f"{layer}.scores"][:, head, 6, 6 - back]
                    assert torch.allclose(hand, found, atol=1e-10), (layer, head, back)
                moved = cache[f"{layer}.pattern"][:, head] @ hat @ ov_circuit(one, layer, head).dense()
                assert torch.allclose(moved, cache[f"{layer}.head_out"][:, :, head], atol=1e-10)


@torch.no_grad()
def fold_free(model):
    """The model without attention biases, gains random."""
    import copy

    new = copy.deepcopy(model)
    for i, block in enumerate(new.blocks):
        if block.attention.qkv.bias is not None:
            block.attention.qkv.bias.zero_()
        block.norm1.weight.add_(0.3 * normal(*block.norm1.weight.shape, seed=i))
    return new


def test_circuits_between_tokens_carry_embedding_and_unembedding(absolute):
    gain, final = (torch.diag(norm.weight) for norm in (absolute.blocks[1].norm1, absolute.final_norm))
    centre = torch.eye(12).double() - 1 / 12
    attention = absolute.blocks[1].attention
    reads = absolute.W_E @ centre @ gain
    ov = reads @ attention.W_V[1] @ attention.W_O[1] @ centre @ final @ absolute.W_U
    assert torch.allclose(ov_circuit(absolute, 1, 1, "vocab").dense(), ov, atol=1e-10)
    qk = reads @ attention.W_Q[0] @ attention.W_K[0].T @ reads.T
    assert torch.allclose(qk_circuit(absolute, 1, 0, ends="vocab").dense(), qk, atol=1e-10)


@pytest.mark.parametrize("options", [
    {}, {"norm": "rmsnorm"}, {"norm": "none"}, {"kind": "encoder-decoder"}, {"final_norm": False}, {"kind": "encoder"}
])  # fmt: skip
def test_norms_are_read_off_by_writing_to_them(options):
    one = Transformer(ModelConfig(**SIZES, **options), seed=1).double()
    norms = [block.norm1 for block in one.blocks] + [one.final_norm]
    with torch.no_grad():
        for i, norm in enumerate(norms):
            if norm is not None and norm.weight is not None:
                norm.weight.add_(normal(12, seed=i))
                if norm.bias is not None:
                    norm.bias.add_(normal(12, seed=9 + i))
    found = [*norm_readings(one, "norm1"), *norm_readings(one, "final")]
    for norm, reading in zip(norms, found, strict=True):
        kept = norm is not None and norm.weight is not None
        assert reading.exists == kept
        weight = norm.weight if kept else torch.ones(12).double()
        offset = norm.bias if kept and norm.bias is not None else torch.zeros(12).double()
        assert torch.allclose(reading.gain, weight, atol=1e-12) and torch.allclose(reading.offset, offset, atol=1e-12)
        assert reading.centred == (kept and one.config.norm == "layernorm")


@torch.no_grad()
def test_composition_is_the_dense_ratio(absolute):
    table = composition_scores(absolute)
    centre = torch.eye(12).double() - 1 / 12
    one, two = absolute.blocks[0], absolute.blocks[1]
    gains = [centre @ torch.diag(block.norm1.weight) for block in (one, two)]
    for row in table.itertuples():
        a = gains[0] @ one.attention.W_V[row.earlier_head] @ one.attention.W_O[row.earlier_head] @ centre
        w, h = two.attention, row.head
        qk = gains[1] @ w.W_Q[h] @ w.W_K[h].T @ gains[1].T
        b = {"q": qk, "k": qk.T, "v": gains[1] @ w.W_V[h] @ w.W_O[h] @ centre}[row.kind]
        assert row.score == pytest.approx(float((a @ b).norm() / (a.norm() * b.norm())), abs=1e-10)
    assert len(table) == 3 * 4 and table["offset"].isna().all() and "null_mean" not in table


def test_folding_and_centring_a_model_change_no_score(absolute):
    for simple in (fold_norm(absolute), center(absolute), center(fold_norm(absolute))):
        for measure, value in ((composition_scores, "score"), (read_write_overlaps, "overlap")):
            assert np.allclose(measure(absolute)[value], measure(simple)[value], atol=1e-9)


def test_rotary_scores_have_one_row_per_offset(model):
    table = composition_scores(model, offsets=(0, 3))
    counts = table.groupby("kind")["offset"].value_counts(dropna=False)
    assert counts["q", 0] == counts["k", 3] == 16 and table[table["kind"] == "v"]["offset"].isna().all()
    wide = table[table["kind"] == "k"].pivot(index=["head", "earlier_head"], columns="offset", values="score")
    assert (wide[0] - wide[3]).abs().max() > 1e-3


def test_the_null_is_that_of_brute_force_rotations(absolute):
    """‖A Q B‖/(‖A‖‖B‖) for whole Haar matrices, drawn by QR in numpy, against the corners: the same distribution."""
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(9, 3)) @ rng.normal(size=(3, 9)), rng.normal(size=(9, 2)) @ rng.normal(size=(2, 9))
    brute = []
    for _ in range(1500):
        q, r = np.linalg.qr(rng.normal(size=(9, 9)))
        brute.append(np.linalg.norm(a @ (q * np.sign(np.diag(r))) @ b) / np.linalg.norm(a) / np.linalg.norm(b))
    spectra = [np.linalg.svd(one)[1][:n] ** 2 for one, n in ((a, 3), (b, 2))]
    corners = haar_corners(9, 3, 2, 4000, seed=1).numpy()
    fast = np.sqrt(np.einsum("i,nij,j->n", spectra[0], corners, spectra[1]) / spectra[0].sum() / spectra[1].sum())
    assert stats.ks_2samp(brute, fast).pvalue > 0.01
    flat = np.sqrt(corners.sum((1, 2)) / 6)
    assert stats.ks_2samp(brute, flat).pvalue < 1e-3, "other spectra are seen to differ"
    table = composition_scores(absolute, null=4000)
    assert (
        np.allclose(corners.mean(0), 1 / 9, atol=0.01) and haar_corners(5, 5, 5, 3, 0).sum(1).sub(1).abs().max() < 1e-9
    )
    assert table["null_mean"].between(0.9 / np.sqrt(11), 1 / np.sqrt(11)).all(), (
        "E score² = 1/(d − 1), less its variance"
    )
    assert (table["null_999"] > table["null_mean"]).all() and table["draws"].eq(4000).all()
    again = composition_scores(absolute, null=4000)
    assert again.equals(table) and not composition_scores(absolute, null=4000, seed=1).equals(table)


@torch.no_grad()
def test_a_planted_composition_is_the_only_one_above_its_null(absolute):
    """The keys of head 1.0 read exactly what head 0.1 writes."""
    one = Transformer(
        ModelConfig(**{**SIZES, "d_model": 24, "n_heads": 6}, bias=False, norm="rmsnorm"), seed=2
    ).double()
    one.blocks[1].attention.W_K[0] = one.blocks[0].attention.W_O[1].T
    table = composition_scores(one, null=10_000)
    best = table.sort_values("score").iloc[-1]
    assert (best["kind"], best["head"], best["earlier_head"]) == ("k", 0, 1)
    assert best["percentile"] == 100 and best["score"] > best["null_999"]
    rest = table.drop(best.name)
    assert (rest["score"] < rest["null_999"]).mean() > 0.98 and 35 < rest["percentile"].mean() < 65


def test_overlap_is_one_zero_or_what_dimensions_give():
    q = torch.linalg.qr(normal(10, 10)).Q
    assert subspace_overlap(q[:, :3], q[:, :3] @ normal(3, 3)).value == pytest.approx(1)
    assert subspace_overlap(q[:, :3], q[:, 3:5]).value == pytest.approx(0)
    inside = subspace_overlap(q[:, 1:3] @ normal(2, 5), q[:, :4])
    assert inside.value == pytest.approx(1) and inside.expected == pytest.approx(4 / 10), "rank 2 of 5 columns"
    drawn = [subspace_overlap(normal(10, 2, seed=i), normal(10, 3, seed=-1 - i)) for i in range(600)]
    assert np.mean([one.value for one in drawn]) == pytest.approx(drawn[0].expected, abs=0.015)
    with pytest.raises(HeadCircuitError, match=r"\(10, 10\) and \(9, 2\)"):
        subspace_overlap(q, normal(9, 2))
    with pytest.raises(HeadCircuitError, match="rank 0"):
        subspace_overlap(q, torch.zeros(10, 2).double())


def test_reads_and_writes_of_every_head(absolute):
    table = read_write_overlaps(absolute).set_index(["spaces", "layer", "head", "other_head"])
    assert len(table) == 2 * (2 + 1) and np.allclose(table["expected"], 6 / 11)
    centre = torch.eye(12).double() - 1 / 12
    attention = absolute.blocks[1].attention
    reads = (centre @ torch.diag(absolute.blocks[1].norm1.weight) @ attention.W_V[0]).detach().numpy()
    writes = [(attention.W_O[h] @ centre).T.detach().numpy() for h in (0, 1)]
    project = [one @ np.linalg.pinv(one) for one in (reads, *writes)]
    assert table.loc[("read-write", 1, 0, 0), "overlap"] == pytest.approx(np.trace(project[0] @ project[1]) / 6)
    assert table.loc[("write-write", 1, 0, 1), "overlap"] == pytest.approx(np.trace(project[1] @ project[2]) / 6)
    random = Transformer(ModelConfig(**{**SIZES, "d_model": 64, "n_heads": 8}, norm="rmsnorm"))
    mean = read_write_overlaps(random).groupby("spaces")["excess"].mean()
    assert mean.abs().max() < 0.01, "an untrained model overlaps as dimensions say"


def test_refusals(model, absolute):
    with pytest.raises(HeadCircuitError, match="there is no one QK matrix"):
        qk_circuit(model, 0, 0)
    with pytest.raises(HeadCircuitError, match="offset=2 goes with rotary"):
        qk_circuit(absolute, 0, 0, 2)
    with pytest.raises(HeadCircuitError, match="head=2 is not allowed; allowed: 0 … 1"):
        ov_circuit(absolute, 0, 2)
    with pytest.raises(HeadCircuitError, match="layer=2 is not allowed; allowed: 0 … 1"):
        ov_circuit(absolute, 2, 0)
    with pytest.raises(HeadCircuitError, match="ends='tokens'"):
        ov_circuit(absolute, 0, 0, "tokens")
    with pytest.raises(HeadCircuitError, match="offsets="):
        composition_scores(absolute, offsets=(0, 1))
    with pytest.raises(HeadCircuitError, match="kinds="):
        composition_scores(absolute, ["o"])
    with pytest.raises(HeadCircuitError, match="earlier and a later head"):
        composition_scores(Transformer(ModelConfig(**{**SIZES, "n_layers": 1})))
    with pytest.raises(UnsupportedModelError, match="qk_norm"):
        qk_circuit(Transformer(ModelConfig(**SIZES, qk_norm=True)), 0, 0, 0)
    with pytest.raises(UnsupportedModelError, match="norms the stream itself"):
        ov_circuit(Transformer(ModelConfig(**SIZES, norm_position="post")), 0, 0)
