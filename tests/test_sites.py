"""Names of places: text to site and back, and what a wrong name is told."""

import pytest

from interp.model import ModelConfig, Transformer
from interp.sites import (
    SITES,
    Site,
    UnknownSiteError,
    expand,
    layer_sites,
    model_sites,
    output_sites,
    resolve,
    symbol_table,
)

AVAILABLE = Transformer(ModelConfig(vocab=5, n_layers=3, n_heads=2, d_model=4, n_ctx=4)).sites


@pytest.mark.parametrize(
    ("text", "site"),
    [
        ("3.pattern", Site("pattern", 3)),
        ("0.attn_out", Site("attn_out", 0)),
        ("12.resid_post", Site("resid_post", 12)),
        ("embed", Site("embed")),
        ("logits", Site("logits")),
        ("encoder.3.pattern", Site("pattern", 3, "encoder")),
        ("decoder.3.cross_pattern", Site("cross_pattern", 3, "decoder")),
        ("encoder.embed", Site("embed", None, "encoder")),
        ("encoder.final", Site("final", stack="encoder")),
    ],
)
def test_text_and_back(text, site):
    assert Site.parse(text) == site
    assert str(site) == text
    assert Site.parse(site) is site


def test_every_name_reads_back():
    for name, spec in SITES.items():
        for stack in (None, "encoder", "decoder"):
            site = Site(name, 2 if spec.per_layer else None, stack)
            assert Site.parse(str(site)) == site
            assert site.spec is spec
    assert len({str(site) for site in AVAILABLE}) == len(AVAILABLE)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("0.attn_ou", "unknown site 'attn_ou', did you mean 'attn_out'"),
        ("0.patern", "did you mean 'pattern'"),
        ("0.resid_pst", "did you mean 'resid_post'"),
        ("logit", "did you mean 'logits'"),
        ("0.hook_q", "unknown site 'hook_q'"),
        ("blocks.0.hook_resid_pre", "not a layer"),
        ("0.xyzzy", "allowed: embed, pos_embed, resid_pre"),
        ("first.attn_out", "'first' is not a layer"),
        ("-1.attn_out", "'-1' is not a layer"),
        ("1.5.attn_out", "unknown site"),
        ("attn_out", "needs a layer"),
        ("2.embed", "has no layer"),
        ("0.encoder.q", "unknown site 'encoder.q'"),
        ("", "unknown site"),
        (3, "int"),
        (None, "NoneType"),
    ],
)
def test_a_wrong_name_is_refused(text, said):
    with pytest.raises(UnknownSiteError) as caught:
        Site.parse(text)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    "arguments", [("q",), ("q", -1), ("q", 1.0), ("q", True), ("q", "0"), ("embed", 0), ("q", 0, "middle"), ("qq", 0)]
)
def test_a_wrong_site_cannot_be_made(arguments):
    with pytest.raises(UnknownSiteError):
        Site(*arguments)


def test_unknown_site_is_a_value_error():
    assert issubclass(UnknownSiteError, ValueError)


def test_resolve():
    assert resolve("1.attn_out", AVAILABLE) == Site("attn_out", 1)
    assert resolve(Site("embed"), AVAILABLE) == Site("embed")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("3.attn_out", "this model has no site '3.attn_out'; it has 0.attn_out … 2.attn_out (3 sites)"),
        ("0.q_rot", "this model has no site 'q_rot' (asked for '0.q_rot'); it has embed, pos_embed"),
        ("0.ffn_up", "no site 'ffn_up'"),
        ("encoder.embed", "no site 'encoder.embed'; it has embed"),
        ("0.resid_mid_sum", "no site 'resid_mid_sum'"),
    ],
)
def test_a_site_that_this_model_lacks(text, said):
    for function in (resolve, expand):
        with pytest.raises(UnknownSiteError) as caught:
            function(text, AVAILABLE)
        assert said in str(caught.value)


def test_expand():
    assert expand("resid_post", AVAILABLE) == [Site("resid_post", layer) for layer in range(3)]
    assert expand("1.resid_post", AVAILABLE) == [Site("resid_post", 1)]
    assert expand("embed", AVAILABLE) == [Site("embed")]
    assert expand(Site("q", 2), AVAILABLE) == [Site("q", 2)]
    for name in ("cross_q", "resid_pos", "q_rot"):
        with pytest.raises(UnknownSiteError):
            expand(name, AVAILABLE)


def test_attribute_access():
    assert layer_sites(2).attn_out == Site("attn_out", 2)
    assert layer_sites(0, "encoder").q == Site("q", 0, "encoder")
    assert model_sites().embed == Site("embed")
    assert not hasattr(layer_sites(0), "embed")
    assert not hasattr(model_sites(), "q")


def test_symbol_table_has_one_row_per_name():
    table = symbol_table().splitlines()
    assert len(table) == len(SITES) + 2
    for name in SITES:
        assert sum(f"| `{name}` |" in row for row in table) == 1


PAIR = Transformer(ModelConfig(kind="encoder-decoder", vocab=5, n_layers=2, n_heads=2, d_model=4, n_ctx=4)).sites


def test_two_stacks():
    assert resolve("encoder.1.q", PAIR) == Site("q", 1, "encoder")
    assert resolve("0.cross_q", PAIR) == Site("cross_q", 0, "decoder")  # only one stack has it
    assert resolve("logits", PAIR) == Site("logits", stack="decoder")
    for ambiguous in ("0.q", "final", "embed"):
        with pytest.raises(UnknownSiteError, match=r"can mean 'encoder.*' or 'decoder.*'; say which"):
            resolve(ambiguous, PAIR)
    assert expand("q", PAIR) == [Site("q", layer, stack) for stack in ("encoder", "decoder") for layer in range(2)]
    assert expand("encoder.q", PAIR) == [Site("q", layer, "encoder") for layer in range(2)]
    assert expand("cross_pattern", PAIR) == [Site("cross_pattern", layer, "decoder") for layer in range(2)]
    for absent in ("encoder.cross_q", "encoder.0.cross_q", "encoder.logits", "encoder.2.q", "q_rot"):
        with pytest.raises(UnknownSiteError, match="this model has no site"):
            expand(absent, PAIR)
    assert output_sites("resid_post", PAIR) == [Site("resid_post", layer, "decoder") for layer in range(2)]
    assert output_sites("resid_post", AVAILABLE) == [Site("resid_post", layer) for layer in range(3)]
