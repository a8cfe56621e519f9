"""The sites that each kind of model reaches, in order, each once; every one matters; the sums between them hold."""

import itertools

import pytest
import strategies
import torch
from strategies import Case, small

from interp.model import Inputs

EXACT = {"rtol": 0.0, "atol": 1e-12}

# The exact ordered sites of a one-layer model, written out, per norm position and variant (see `CHOICES`).
PRE = """embed pos_embed
0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
0.resid_mid 0.norm2_scale 0.norm2_hat 0.norm2
0.ffn_pre 0.ffn_act 0.ffn_out 0.resid_post
final_scale final_hat final logits"""
POST = """embed pos_embed
0.resid_pre 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
0.resid_mid_sum 0.norm1_scale 0.norm1_hat 0.resid_mid
0.ffn_pre 0.ffn_act 0.ffn_out
0.resid_post_sum 0.norm2_scale 0.norm2_hat 0.resid_post
logits"""
ORDER = {
    "pre": PRE,
    "post": POST,
    "pre rotary": """embed
        0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
        0.q 0.k 0.v 0.q_rot 0.k_rot 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid 0.norm2_scale 0.norm2_hat 0.norm2
        0.ffn_pre 0.ffn_act 0.ffn_out 0.resid_post
        final_scale final_hat final logits""",
    "post rotary": """embed
        0.resid_pre 0.q 0.k 0.v 0.q_rot 0.k_rot 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid_sum 0.norm1_scale 0.norm1_hat 0.resid_mid
        0.ffn_pre 0.ffn_act 0.ffn_out
        0.resid_post_sum 0.norm2_scale 0.norm2_hat 0.resid_post
        logits""",
    "pre gated": """embed pos_embed
        0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
        0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid 0.norm2_scale 0.norm2_hat 0.norm2
        0.ffn_pre 0.ffn_up 0.ffn_act 0.ffn_out 0.resid_post
        final_scale final_hat final logits""",
    "post gated": """embed pos_embed
        0.resid_pre 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid_sum 0.norm1_scale 0.norm1_hat 0.resid_mid
        0.ffn_pre 0.ffn_up 0.ffn_act 0.ffn_out
        0.resid_post_sum 0.norm2_scale 0.norm2_hat 0.resid_post
        logits""",
    "pre attention-only": """embed pos_embed
        0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
        0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out 0.resid_post
        final_scale final_hat final logits""",
    "post attention-only": """embed pos_embed
        0.resid_pre 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_post_sum 0.norm1_scale 0.norm1_hat 0.resid_post
        logits""",
    "pre no-norm": """embed pos_embed
        0.resid_pre 0.norm1 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid 0.norm2 0.ffn_pre 0.ffn_act 0.ffn_out 0.resid_post
        logits""",
    "pre no-final": PRE.replace("final_scale final_hat final ", ""),
    "post final": POST.replace("logits", "final_scale final_hat final logits"),
    "pre no-head": PRE.replace(" logits", ""),
    "post no-head": POST.replace("logits", ""),
    "pre q/k-norm": PRE.replace("0.v ", "0.v 0.q_rot 0.k_rot "),
    "pre no-positions": PRE.replace("embed pos_embed", "embed"),
    "pre everything": PRE.replace("0.v ", "0.v 0.q_rot 0.k_rot ").replace("0.ffn_pre", "0.ffn_pre 0.ffn_up"),
}
CHOICES = {
    "rotary": {"positions": "rotary"},
    "gated": {"ffn": "swiglu"},
    "attention-only": {"ffn": "none"},
    "no-norm": {"norm": "none"},
    "no-final": {"final_norm": False},
    "final": {"final_norm": True},
    "no-head": {"head": False},
    "q/k-norm": {"qk_norm": True},
    "no-positions": {"positions": "none"},
    "everything": {"qk_norm": True, "ffn": "geglu", "embedding_norm": True, "n_segments": 2, "tied_embeddings": True,
                   "norm": "rmsnorm", "positions": "sinusoidal", "n_kv_heads": 1, "window": 2},
}  # fmt: skip
KINDS = ("decoder", "encoder", "prefix-decoder")


def choices_of(variant, **more):
    """ModelConfig's arguments for a name of `ORDER`."""
    position, _, rest = variant.partition(" ")
    return small(norm_position=position, **CHOICES.get(rest, {}), **more)


def recorded(model, inputs):
    """Every site's value in the order reached; fails when one is reached twice."""
    seen = {}

    def tap(site, value):
        assert str(site) not in seen, f"{site} reached twice"
        seen[str(site)] = value
        return value

    seen["output"] = model(inputs, tap)
    return seen


@pytest.mark.parametrize(("kind", "variant"), list(itertools.product(KINDS, ORDER)))
def test_ordered_sites(kind, variant):
    model, inputs = Case(choices_of(variant, kind=kind, n_layers=1)).build()
    expected = ORDER[variant].split()
    assert [str(site) for site in model.sites] == expected
    assert list(recorded(model, inputs))[:-1] == expected


def test_layers_follow_each_other():
    model, inputs = Case(small(n_layers=3)).build()
    inner = [site.removeprefix("0.") for site in PRE.split() if site.startswith("0.")]
    layers = [f"{layer}.{name}" for layer in range(3) for name in inner]
    expected = ["embed", "pos_embed", *layers, "final_scale", "final_hat", "final", "logits"]
    assert [str(site) for site in model.sites] == expected == list(recorded(model, inputs))[:-1]


def test_shapes_follow_the_dictionary():
    """Every recorded value has the axes that `SITES` promises."""
    model, inputs = Case(small(n_heads=4, n_kv_heads=2, d_head=6, positions="rotary", ffn="swiglu")).build()
    sizes = {"position": 5, "query": 5, "key": 5, "head": 4, "kv_head": 2, "d_head": 6, "d_model": 8, "d_ff": 7,
             "vocab": strategies.VOCAB, "one": 1}  # fmt: skip
    seen = recorded(model, inputs)
    for site in model.sites:
        assert seen[str(site)].shape == (2, *(sizes[axis] for axis in site.spec.axes)), site


@torch.no_grad()
def check_noise(choices):
    """Noise written to any site changes the output."""
    model, inputs = Case(choices).build()
    generator = torch.Generator().manual_seed(3)
    plain = recorded(model, inputs)["output"]
    for target in model.sites:

        def tap(site, value, target=target):
            return value + torch.randn(value.shape, generator=generator) if site == target else value

        assert not torch.allclose(model(inputs, tap), plain, atol=1e-6), f"noise at {target} changed nothing"


@torch.no_grad()
def check_unchanged(choices):
    """A tap that returns what it is given leaves the output within rounding of tap=None."""
    model, inputs = Case(choices).build()
    torch.testing.assert_close(recorded(model, inputs)["output"], model(inputs), **EXACT)


@pytest.mark.parametrize(("kind", "variant"), list(itertools.product(KINDS[:2], ORDER)))
def test_noise_at_every_site_changes_the_output(kind, variant):
    check_noise(choices_of(variant, kind=kind))
    check_unchanged(choices_of(variant, kind=kind))


@torch.no_grad()
def check_each_site_alone(choices):
    """A tap that wants a single site reaches it once and leaves the output within rounding."""
    model, inputs = Case(choices).build()
    plain = model(inputs)
    every = recorded(model, inputs)
    for site in model.sites:
        seen = []

        class Tap:
            def wants(self, other, site=site):
                return other == site

            def __call__(self, other, value, site=site, seen=seen):
                if other == site:
                    seen.append(value)
                return value

        torch.testing.assert_close(model(inputs, Tap()), plain, **EXACT)
        assert len(seen) == 1, f"{site} reached {len(seen)} times"
        torch.testing.assert_close(seen[0], every[str(site)], **EXACT)


@pytest.mark.parametrize("variant", ["pre", "post", "pre everything", "pre rotary", "post gated"])
def test_one_wanted_site_equals_all_wanted(variant):
    check_each_site_alone(choices_of(variant))


@torch.no_grad()
def check_sums(choices):
    """Heads sum to attn_out; the stream is the sum of what was written to it (R1), or its norm."""
    model, inputs = Case(choices).build()
    seen = recorded(model, inputs)
    stream = seen["0.resid_pre"]
    for layer in range(model.config.n_layers):

        def at(name, layer=layer):
            return seen[f"{layer}.{name}"]

        b_O = model.blocks[layer].attention.b_O
        heads = at("head_out").sum(2) + (0 if b_O is None else b_O)
        torch.testing.assert_close(heads, at("attn_out"), **EXACT)
        each = torch.einsum("bphd,hdm->bphm", at("z"), model.blocks[layer].attention.W_O)
        torch.testing.assert_close(each, at("head_out"), **EXACT)
        torch.testing.assert_close(stream, at("resid_pre"), **EXACT)
        if model.config.norm_position == "pre":
            stream = stream + at("attn_out")
            if model.config.ffn != "none":
                torch.testing.assert_close(stream, at("resid_mid"), **EXACT)
                stream = stream + at("ffn_out")
        else:
            stream = post_norm_stream(model, layer, at)
        torch.testing.assert_close(stream, at("resid_post"), **EXACT)


def post_norm_stream(model, layer, at):
    """The recorded sums of a post-norm block and the norms that follow them; returns the block's output."""
    block, mid = model.blocks[layer], at("resid_pre") + at("attn_out")
    if model.config.ffn == "none":
        torch.testing.assert_close(mid, at("resid_post_sum"), **EXACT)
        return gain_and_offset(block.norm1, at("norm1_hat"))
    torch.testing.assert_close(mid, at("resid_mid_sum"), **EXACT)
    torch.testing.assert_close(gain_and_offset(block.norm1, at("norm1_hat")), at("resid_mid"), **EXACT)
    torch.testing.assert_close(at("ffn_out") + at("resid_mid"), at("resid_post_sum"), **EXACT)
    return gain_and_offset(block.norm2, at("norm2_hat"))


def gain_and_offset(norm, x_hat):
    """γ x̂ + β (7.26)."""
    return norm.weight * x_hat + (0 if norm.bias is None else norm.bias)


@pytest.mark.parametrize("variant", ORDER)
def test_recorded_values_add_up(variant):
    check_sums(choices_of(variant))


@pytest.mark.parametrize("norm", ["layernorm", "rmsnorm"])
def test_normalised_vectors(norm):
    """N1: before gain and offset, mean 0 and standard deviation 1 (RMSNorm: root mean square 1)."""
    model, inputs = Case(small(norm=norm, norm_eps=0)).build()
    seen = recorded(model, inputs)
    for name in ("0.norm1_hat", "1.norm2_hat", "final_hat"):
        x_hat = seen[name]
        torch.testing.assert_close(x_hat.square().mean(-1), torch.ones(2, 5, dtype=x_hat.dtype), **EXACT)
        if norm == "layernorm":
            torch.testing.assert_close(x_hat.mean(-1), torch.zeros(2, 5, dtype=x_hat.dtype), **EXACT)


def test_replacing_a_site_decides_what_follows():
    """Writing attn_out of another run equals adding the difference to the stream."""
    model, inputs = Case(small()).build()
    other = recorded(model, Inputs(inputs.tokens.flip(0)))

    def replace(site, value):
        return other["0.attn_out"] if str(site) == "0.attn_out" else value

    def add(site, value):
        return value + other["0.attn_out"] - own["0.attn_out"] if str(site) == "0.resid_mid" else value

    own = recorded(model, inputs)
    torch.testing.assert_close(model(inputs, replace), model(inputs, add), **EXACT)


def test_head_false_returns_the_last_stream():
    model, inputs = Case(small(head=False)).build()
    seen = recorded(model, inputs)
    torch.testing.assert_close(seen["output"], seen["final"], **EXACT)
