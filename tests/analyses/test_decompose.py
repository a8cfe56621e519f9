"""The stream's parts: their sum against the stream, each against the site or the edit that shows it alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from stream_cases import CASES, case

from interp import ModelConfig, Transformer, Zero, run
from interp.analyses.decompose import DecompositionError, decompose
from interp.at import SelectionError
from interp.hookable import UnsupportedModelError

SPLITS = {"heads": {}, "layers": {"heads": False}, "sources": {"sources": True}}


def streams(model):
    return [site for site in model.sites if site.name.startswith("resid_")]


@pytest.mark.parametrize("dtype, limit", [(torch.float32, 1e-5), (torch.float64, 1e-12)])
@pytest.mark.parametrize("name", CASES)
def test_the_parts_add_up_to_every_stream(name, dtype, limit):
    model, inputs = case(name, dtype)
    cache = run(model, inputs, record=streams(model)).cache
    for site in streams(model):
        who = inputs.encoder if site.stack == "encoder" else inputs
        for options in SPLITS.values():
            found = decompose(model, inputs, site, **options)
            recorded = cache[site][torch.arange(3), who.last()]
            miss = (found.vectors.sum(0) - recorded).abs().max() / recorded.abs().max()
            assert miss < limit and found.error < limit, (site, options)
            assert found.vectors.shape == (len(found.components), 3, 16)


def test_each_part_is_what_its_site_holds():
    model, inputs = case("encoder-decoder")
    names = [
        "decoder.embed",
        "decoder.pos_embed",
        "decoder.0.head_out",
        "decoder.1.cross_head_out",
        "decoder.0.ffn_out",
    ]
    cache = run(model, inputs, record=names).cache
    found = decompose(model, inputs, "1.resid_cross", "subject")
    parts = dict(zip(found.components["component"], found.vectors, strict=True))
    at = (torch.arange(3), inputs.roles["subject"])
    block = model.blocks[0]
    expected = {
        "embed": model.W_E[inputs.tokens[at]],
        "pos_embed": cache["decoder.pos_embed"][at],
        "0.head2": cache["decoder.0.head_out"][at][:, 2],
        "1.cross_head3": cache["decoder.1.cross_head_out"][at][:, 3],
        "0.b_O": block.attention.b_O.expand(3, -1),
        "0.cross_b_O": block.cross_attention.b_O.expand(3, -1),
        "0.b_out": block.ffn.b_out.expand(3, -1),
        "0.ffn": cache["decoder.0.ffn_out"][at] - block.ffn.b_out,
    }
    for name, value in expected.items():
        assert torch.allclose(parts[name], value, atol=1e-13), name
    kinds = dict(zip(found.components["component"], found.components["kind"], strict=True))
    assert kinds["1.cross_head3"] == "cross head" and kinds["0.cross_b_O"] == "cross attention bias"
    assert not any(name.startswith("1.ffn") for name in parts), "the FFN writes after resid_cross"


@pytest.mark.parametrize("name", ["grouped, rotary, rmsnorm, gated", "encoder-decoder"])
def test_a_heads_part_by_source_is_what_it_loses_with_that_value(name):
    """In the first layer the pattern does not depend on v: a value of zeros takes away exactly what was read there."""
    model, inputs = case(name)
    cross = "cross_" if name == "encoder-decoder" else ""
    stack = "decoder." if cross else ""
    out, v = f"{stack}0.{cross}head_out", f"{stack}0.{cross}v"
    whole = run(model, inputs, record=out).cache[out]
    found = decompose(model, inputs, "0.resid_cross" if cross else "0.resid_mid", "subject", sources=True)
    table = found.components
    at = int(inputs.roles["subject"][0])
    for j in (0, 1):
        without = run(model, inputs.select([0]), record=out, change=Zero(v, at=(j,))).cache[out][0]
        for head in range(4):
            chosen = (table["kind"] == f"{'cross ' if cross else ''}head") & (table["head"] == head)
            [row] = table.index[chosen & (table["source"] == j)]
            lost = whole[0, at, head] - without[at, head]
            assert lost.norm() > 1e-3 and torch.allclose(found.vectors[row, 0], lost, atol=1e-12)


def test_the_table_has_shares_that_sum_to_one_and_names_what_was_read():
    model, inputs = case("encoder-decoder")
    words = [f"w{i}" for i in range(13)]
    found = decompose(model, inputs, "decoder.1.resid_post", "subject", sources=True, tokenizer=words)
    table = found.table()
    assert np.allclose(table.groupby("example")["share"].sum(), 1, atol=1e-12)
    length = found.stream.norm(dim=-1)
    assert np.allclose(table.groupby("example")["dot"].sum(), length, atol=1e-12)
    assert table["position"].unique().tolist() == [1, 3, 2] and set(table["role"]) == {"subject"}
    row = table[(table["component"] == "0.cross_head1[2]") & (table["example"] == 1)].iloc[0]
    assert row["source_token"] == f"w{int(inputs.source[1, 2])}" and row["token"] == f"w{int(inputs.tokens[1, 3])}"
    own = table[(table["component"] == "1.head0[3]") & (table["example"] == 2)].iloc[0]
    assert own["source_token"] == f"w{int(inputs.tokens[2, 3])}" and own["norm"] == 0, "a later token is not read"
    assert "source_token" not in decompose(model, inputs, "decoder.1.resid_post").table()


def test_padding_changes_nothing_but_positions():
    model, inputs = case("layernorm, b_U")
    padded = decompose(model, inputs, "1.resid_post")
    alone = decompose(model, inputs.tokens[1:2, 2:], "1.resid_post")
    assert torch.allclose(padded.vectors[:, 1], alone.vectors[:, 0], atol=1e-12)
    by_source = decompose(model, inputs, "1.resid_post", sources=True)
    on_padding = by_source.components["source"].isin([0, 1]).to_numpy()
    assert on_padding.any() and not by_source.vectors[:, 1][torch.tensor(on_padding)].any()


@pytest.mark.parametrize("options", [{"norm_position": "post"}, {"embedding_norm": True}])
def test_a_stream_that_is_no_sum_is_refused_with_the_reason(options, tokens):
    model = Transformer(ModelConfig(vocab=13, n_layers=1, n_heads=2, d_model=8, n_ctx=8, **options))
    with pytest.raises(UnsupportedModelError, match="a norm sits on the stream"):
        decompose(model, tokens, "0.resid_post")


def test_other_places_are_refused(model, tokens):
    with pytest.raises(DecompositionError, match=r"'0\.attn_out' is not the stream"):
        decompose(model, tokens, "0.attn_out")
    with pytest.raises(SelectionError, match="position 9"):
        decompose(model, tokens, "0.resid_post", 9)
    with pytest.raises(SelectionError, match="unknown role"):
        decompose(model, tokens, "0.resid_post", "subject")


class Wrapped:
    """A model with some of its sites hidden, or weights that are not what it computes with."""

    def __init__(self, model, hidden=(), factor=1.0) -> None:
        self.model, self.factor = model, factor
        self.sites = tuple(site for site in model.sites if site.name not in hidden)
        self.config, self.can_resume, self.additive_stream = model.config, False, True

    def __call__(self, inputs, tap=None):
        return self.model(inputs, tap)

    def unembed(self, stream):
        return self.model.unembed(stream)

    def weight(self, kind, layer=None, stack=None):
        found = self.model.weight(kind, layer, stack)
        return found * self.factor if kind == "W_O" else found


def test_what_a_model_lacks_is_named_and_a_sum_that_fails_is_never_returned(model, tokens):
    partial = Wrapped(model, hidden=("head_out",))
    with pytest.raises(UnsupportedModelError, match=r"site\(s\) 0\.head_out.*allowed: heads=False"):
        decompose(partial, tokens, "1.resid_post")
    assert decompose(partial, tokens, "1.resid_post", heads=False).error < 1e-12
    with pytest.raises(UnsupportedModelError, match="allowed: sources=False"):
        decompose(Wrapped(model, hidden=("pattern",)), tokens, "1.resid_post", sources=True)
    with pytest.raises(DecompositionError, match=r"the parts of '1\.resid_post' miss it"):
        decompose(Wrapped(model, factor=1.001), tokens, "1.resid_post")
