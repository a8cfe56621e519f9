"""Arithmetic: parameter shares and the additive stream."""

from __future__ import annotations

import pytest

from interp import ModelConfig, Transformer
from interp.analyses import parameter_table, stream_identity
from interp.hookable import UnsupportedModelError


def test_shares_of_a_gpt2_like_block_are_two_thirds():
    model = Transformer(ModelConfig(vocab=10, n_layers=3, n_heads=2, d_model=32, n_ctx=8, bias=False))
    table = parameter_table(model).set_index("group")
    assert abs(table.loc["ffn", "share_blocks"] - 2 / 3) < 1e-12
    assert table["parameters"].sum() == sum(p.numel() for p in model.parameters())
    assert table.loc["embeddings", "parameters"] == 2 * 10 * 32 + 8 * 32


def test_tied_embeddings_count_once():
    model = Transformer(ModelConfig(vocab=10, n_layers=1, n_heads=2, d_model=8, n_ctx=8, tied_embeddings=True))
    table = parameter_table(model).set_index("group")
    assert table["parameters"].sum() == sum(p.numel() for p in model.parameters())
    assert table.loc["embeddings", "parameters"] == 10 * 8 + 8 * 8


def test_the_stream_is_a_sum_pre_norm_and_refused_post_norm(model, tokens):
    assert stream_identity(model, tokens) < 1e-14
    post = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8, norm_position="post"))
    with pytest.raises(UnsupportedModelError, match="post-norm"):
        stream_identity(post, tokens)
