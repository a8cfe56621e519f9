"""Head scores: against patterns read edge by edge, heads built to do one thing, and eigenvalues of the whole matrix."""

from __future__ import annotations

import pytest
import torch

from interp import ModelConfig, Transformer, run
from interp.analyses.heads import HeadScoreError, head_scores, repeated_tokens
from interp.hookable import UnsupportedModelError
from interp.model.inputs import InputsError

ATTENTION = ("previous token", "duplicate token", "induction")
SIZES = {"vocab": 11, "n_layers": 2, "n_heads": 2, "d_model": 8, "n_ctx": 21}


def values(table, score, convention="mean"):
    chosen = table[(table["score"] == score) & (table["convention"] == convention)]
    return dict(zip(zip(chosen["layer"], chosen["head"], strict=True), chosen["value"], strict=True))


def test_every_convention_edge_by_edge():
    model = Transformer(ModelConfig(**SIZES), seed=3).double()
    table = head_scores(model, lengths=(4, 6), n=3, bos=2, seed=5)
    found = {(score, convention): [] for score in ATTENTION for convention in ("mean", "mul", "abs")}
    for i, length in enumerate((4, 6)):
        for row in repeated_tokens(11, length, 3, 2, 5 + i):
            alpha = run(model, row[None], record="1.pattern").cache["1.pattern"][0, 1].tolist()
            size, tokens = len(row), row.tolist()
            edges = {score: [] for score in ATTENTION}
            for q in range(size):
                for k in range(q + 1):
                    if k == q - 1:
                        edges["previous token"].append((q, k))
                    if k < q and tokens[k] == tokens[q]:
                        edges["duplicate token"].append((q, k))
                    if 0 < k <= q and tokens[k - 1] == tokens[q] and k - 1 < q:
                        edges["induction"].append((q, k))
            for score, pairs in edges.items():
                assert len(pairs) == (size - 1 if score == "previous token" else length)
                on = sum(alpha[q][k] for q, k in pairs)
                total = sum(map(sum, alpha))
                off = total - on
                found[score, "mean"].append(on / len(pairs))
                found[score, "mul"].append(on / total)
                found[score, "abs"].append(1 - (off + sum(1 - alpha[q][k] for q, k in pairs)) / size)
    for (score, convention), each in found.items():
        assert values(table, score, convention)[1, 1] == pytest.approx(sum(each) / 6, abs=1e-12), (score, convention)
    attention = table[table["score"] != "copying"]
    assert attention["n_sequences"].eq(6).all() and attention["seed"].eq(5).all()
    assert len(table) == 3 * 3 * 4 + 4 and list(table.columns) == [
        "score", "convention", "layer", "head", "value", "n_sequences", "seed"
    ]  # fmt: skip


@torch.no_grad()
def built(offset: int, copies: float) -> Transformer:
    """One head without norms: it reads `offset` positions back, and writes `copies` times the token that it reads.

    Stream: 9 entries for the token, 21 for the position.
    """
    config = ModelConfig(vocab=9, n_layers=1, n_heads=1, d_model=30, n_ctx=21, norm="none", ffn="none", bias=False)
    model = Transformer(config)
    for parameter in model.parameters():
        parameter.zero_()
    model.embedding.weight[:, :9] = torch.eye(9)
    model.unembedding.weight[:, :9] = torch.eye(9)
    model.W_pos[:, 9:] = torch.eye(21)
    attention = model.blocks[0].attention
    place = torch.arange(21)
    attention.W_Q[0, 9 + place, place] = 1e3
    attention.W_K[0, 9 + place, (place + offset) % 21] = 1.0
    attention.W_V[0, :9, :9] = torch.eye(9)
    attention.W_O[0, :9, :9] = copies * torch.eye(9)
    return model


@pytest.mark.parametrize("score, offset", [("previous token", 1), ("duplicate token", 6), ("induction", 5)])
def test_a_head_built_for_one_score_has_one_there_and_nothing_elsewhere(score, offset):
    """Queries whose key would stand before the sequence attend to all alike, which the previous token's mean sees."""
    table = head_scores(built(offset, 1.0), lengths=(6,), n=4)
    assert values(table, score)[0, 0] == pytest.approx(1, abs=1e-6)
    for other in set(ATTENTION) - {score}:
        assert values(table, other)[0, 0] < (0.13 if other == "previous token" else 1e-6)


@pytest.mark.parametrize("copies", [2.0, -0.5])
def test_copying_is_one_for_a_copier_and_minus_one_for_its_opposite(copies):
    table = head_scores(built(1, copies), scores=["copying"])
    assert values(table, "copying", "eigenvalues")[0, 0] == pytest.approx(1.0 if copies > 0 else -1.0)


@torch.no_grad()
def test_copying_is_the_positivity_of_the_whole_matrix():
    config = ModelConfig(**{**SIZES, "n_heads": 4, "n_kv_heads": 2})
    model = Transformer(config, seed=1).double()
    generator = torch.Generator().manual_seed(0)
    for norm in (*(block.norm1 for block in model.blocks), model.final_norm):
        norm.weight.add_(0.5 * torch.randn(8, generator=generator))
        norm.bias.add_(1.0)  # an offset is no part of a circuit
    found = values(head_scores(model, scores=["copying"]), "copying", "eigenvalues")
    centre = torch.eye(8).double() - 1 / 8
    for (layer, head), value in found.items():
        block = model.blocks[layer]
        ov = block.attention.W_V[head // 2] @ block.attention.W_O[head]
        gains = torch.diag(block.norm1.weight), torch.diag(model.final_norm.weight)
        whole = torch.linalg.eigvals(model.W_E @ centre @ gains[0] @ ov @ centre @ gains[1] @ model.W_U)
        assert value == pytest.approx(float(whole.sum().real / whole.abs().sum()), abs=1e-6)


def test_sequences_are_bos_and_one_random_order_twice():
    tokens = repeated_tokens(9, 8, 50, bos=3, seed=1)
    assert tokens.shape == (50, 17) and (tokens[:, 0] == 3).all() and torch.equal(tokens[:, 1:9], tokens[:, 9:])
    assert (tokens[:, 1:9].sort(1).values == torch.tensor([0, 1, 2, 4, 5, 6, 7, 8])).all()
    assert torch.equal(tokens, repeated_tokens(9, 8, 50, bos=3, seed=1)) and not torch.equal(tokens[0], tokens[1])


def test_given_tokens_are_used_as_they_are():
    model = Transformer(ModelConfig(**SIZES), seed=3)
    drawn, given = head_scores(model, lengths=(5,), n=4), head_scores(model, repeated_tokens(11, 5, 4))
    assert drawn["value"].tolist() == given["value"].tolist() and given["seed"].isna().all()


def test_refusals():
    model = Transformer(ModelConfig(**SIZES))
    with pytest.raises(HeadScoreError, match="length=11 is not allowed"):
        head_scores(model, lengths=(11,))
    with pytest.raises(HeadScoreError, match="bos=11"):
        head_scores(model, bos=11)
    with pytest.raises(HeadScoreError, match="example 1 is not"):
        head_scores(model, [[0, 1, 2, 1, 2], [0, 1, 2, 1, 3]])
    with pytest.raises(InputsError, match=r"shape \(1, 4\)"):
        head_scores(model, [[0, 1, 2, 1]])
    with pytest.raises(HeadScoreError, match=r"scores=\['prefix'\]"):
        head_scores(model, scores=["prefix"])
    with pytest.raises(HeadScoreError, match="conventions='mean' is not allowed"):
        head_scores(model, conventions="mean")
    two = Transformer(ModelConfig(**SIZES, kind="encoder-decoder"))
    with pytest.raises(UnsupportedModelError, match="one stack"):
        head_scores(two)
    bare = Transformer(ModelConfig(**SIZES, head=False))
    with pytest.raises(UnsupportedModelError, match="no unembedding"):
        head_scores(bare, scores=["copying"])
