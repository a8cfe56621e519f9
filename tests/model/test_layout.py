"""The sites that each kind of model reaches, in order, each once; every one matters; the sums between them hold."""

import itertools

import pytest
import strategies
import torch
from strategies import Case, small, translator

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
# The same of an encoder-decoder with one layer in each stack: the encoder's sites, then the decoder's.
ENCODER_PRE = """embed pos_embed
    0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
    0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
    0.resid_mid 0.norm2_scale 0.norm2_hat 0.norm2
    0.ffn_pre 0.ffn_act 0.ffn_out 0.resid_post
    final_scale final_hat final"""
DECODER_PRE = """embed pos_embed
    0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
    0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
    0.resid_mid 0.cross_norm_scale 0.cross_norm_hat 0.cross_norm
    0.cross_q 0.cross_k 0.cross_v 0.cross_scores 0.cross_pattern 0.cross_z 0.cross_head_out 0.cross_out
    0.resid_cross 0.norm2_scale 0.norm2_hat 0.norm2
    0.ffn_pre 0.ffn_act 0.ffn_out 0.resid_post
    final_scale final_hat final logits"""
ENCODER_POST = """embed pos_embed
    0.resid_pre 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
    0.resid_mid_sum 0.norm1_scale 0.norm1_hat 0.resid_mid
    0.ffn_pre 0.ffn_act 0.ffn_out
    0.resid_post_sum 0.norm2_scale 0.norm2_hat 0.resid_post
    final"""
DECODER_POST = """embed pos_embed
    0.resid_pre 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
    0.resid_mid_sum 0.norm1_scale 0.norm1_hat 0.resid_mid
    0.cross_q 0.cross_k 0.cross_v 0.cross_scores 0.cross_pattern 0.cross_z 0.cross_head_out 0.cross_out
    0.resid_cross_sum 0.cross_norm_scale 0.cross_norm_hat 0.resid_cross
    0.ffn_pre 0.ffn_act 0.ffn_out
    0.resid_post_sum 0.norm2_scale 0.norm2_hat 0.resid_post
    logits"""
TWO_STACKS = {
    "pre": (ENCODER_PRE, DECODER_PRE),
    "post": (ENCODER_POST, DECODER_POST),
    "pre rotary": (
        """embed
        0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
        0.q 0.k 0.v 0.q_rot 0.k_rot 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid 0.norm2_scale 0.norm2_hat 0.norm2
        0.ffn_pre 0.ffn_act 0.ffn_out 0.resid_post
        final_scale final_hat final""",
        """embed
        0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
        0.q 0.k 0.v 0.q_rot 0.k_rot 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid 0.cross_norm_scale 0.cross_norm_hat 0.cross_norm
        0.cross_q 0.cross_k 0.cross_v 0.cross_scores 0.cross_pattern 0.cross_z 0.cross_head_out 0.cross_out
        0.resid_cross 0.norm2_scale 0.norm2_hat 0.norm2
        0.ffn_pre 0.ffn_act 0.ffn_out 0.resid_post
        final_scale final_hat final logits""",
    ),
    "post gated": (
        """embed pos_embed
        0.resid_pre 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid_sum 0.norm1_scale 0.norm1_hat 0.resid_mid
        0.ffn_pre 0.ffn_up 0.ffn_act 0.ffn_out
        0.resid_post_sum 0.norm2_scale 0.norm2_hat 0.resid_post
        final""",
        """embed pos_embed
        0.resid_pre 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid_sum 0.norm1_scale 0.norm1_hat 0.resid_mid
        0.cross_q 0.cross_k 0.cross_v 0.cross_scores 0.cross_pattern 0.cross_z 0.cross_head_out 0.cross_out
        0.resid_cross_sum 0.cross_norm_scale 0.cross_norm_hat 0.resid_cross
        0.ffn_pre 0.ffn_up 0.ffn_act 0.ffn_out
        0.resid_post_sum 0.norm2_scale 0.norm2_hat 0.resid_post
        logits""",
    ),
    "pre attention-only": (
        """embed pos_embed
        0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
        0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out 0.resid_post
        final_scale final_hat final""",
        """embed pos_embed
        0.resid_pre 0.norm1_scale 0.norm1_hat 0.norm1
        0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid 0.cross_norm_scale 0.cross_norm_hat 0.cross_norm
        0.cross_q 0.cross_k 0.cross_v 0.cross_scores 0.cross_pattern 0.cross_z 0.cross_head_out 0.cross_out
        0.resid_post
        final_scale final_hat final logits""",
    ),
    "post attention-only": (
        """embed pos_embed
        0.resid_pre 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_post_sum 0.norm1_scale 0.norm1_hat 0.resid_post
        final""",
        """embed pos_embed
        0.resid_pre 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid_sum 0.norm1_scale 0.norm1_hat 0.resid_mid
        0.cross_q 0.cross_k 0.cross_v 0.cross_scores 0.cross_pattern 0.cross_z 0.cross_head_out 0.cross_out
        0.resid_post_sum 0.cross_norm_scale 0.cross_norm_hat 0.resid_post
        logits""",
    ),
    "pre no-norm": (
        """embed pos_embed
        0.resid_pre 0.norm1 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid 0.norm2 0.ffn_pre 0.ffn_act 0.ffn_out 0.resid_post
        final""",
        """embed pos_embed
        0.resid_pre 0.norm1 0.q 0.k 0.v 0.scores 0.pattern 0.z 0.head_out 0.attn_out
        0.resid_mid 0.cross_norm
        0.cross_q 0.cross_k 0.cross_v 0.cross_scores 0.cross_pattern 0.cross_z 0.cross_head_out 0.cross_out
        0.resid_cross 0.norm2 0.ffn_pre 0.ffn_act 0.ffn_out 0.resid_post
        logits""",
    ),
    "pre no-final": (
        ENCODER_PRE.replace("final_scale final_hat final", "final"),
        DECODER_PRE.replace("final_scale final_hat final ", ""),
    ),
    "post final": (
        ENCODER_POST.replace("final", "final_scale final_hat final"),
        DECODER_POST.replace("logits", "final_scale final_hat final logits"),
    ),
    "pre no-head": (ENCODER_PRE, DECODER_PRE.replace(" logits", "")),
    "post no-head": (ENCODER_POST, DECODER_POST.replace("logits", "")),
    "pre q/k-norm": (
        ENCODER_PRE.replace("0.v ", "0.v 0.q_rot 0.k_rot "),
        DECODER_PRE.replace("0.v ", "0.v 0.q_rot 0.k_rot "),
    ),
    "pre no-positions": (
        ENCODER_PRE.replace("embed pos_embed", "embed"),
        DECODER_PRE.replace("embed pos_embed", "embed"),
    ),
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
    make = translator if more.get("kind") == "encoder-decoder" else small
    return make(norm_position=position, **CHOICES.get(rest, {}), **more)


def translator_of(variant, **more):
    """The same for an encoder-decoder and a name of `TWO_STACKS`."""
    return choices_of(variant, kind="encoder-decoder", **more)


def stacks_of(model):
    """(the prefix of its sites, its blocks) of each stack."""
    if model.encoder is None:
        return [("", model.blocks)]
    return [("encoder.", model.encoder.blocks), ("decoder.", model.blocks)]


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


@pytest.mark.parametrize("variant", TWO_STACKS)
def test_ordered_sites_of_two_stacks(variant):
    model, inputs = Case(translator_of(variant, n_layers=1)).build()
    encoder, decoder = TWO_STACKS[variant]
    expected = [f"encoder.{name}" for name in encoder.split()] + [f"decoder.{name}" for name in decoder.split()]
    assert [str(site) for site in model.sites] == expected
    assert list(recorded(model, inputs))[:-1] == expected


def test_layers_of_two_stacks_follow_each_other():
    model, inputs = Case(translator(n_layers=2, n_encoder_layers=3)).build()
    expected = []
    for stack, text, n_layers in (("encoder", ENCODER_PRE, 3), ("decoder", DECODER_PRE, 2)):
        inner = [name.removeprefix("0.") for name in text.split() if name.startswith("0.")]
        layers = [f"{layer}.{name}" for layer in range(n_layers) for name in inner]
        end = ["final_scale", "final_hat", "final", *(["logits"] if stack == "decoder" else [])]
        expected += [f"{stack}.{name}" for name in ("embed", "pos_embed", *layers, *end)]
    assert [str(site) for site in model.sites] == expected == list(recorded(model, inputs))[:-1]


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


def test_shapes_of_two_stacks_follow_the_dictionary():
    """Keys of cross-attention are source positions, its queries target positions; keys of the encoder are its own."""
    choices = translator(n_heads=4, n_kv_heads=2, d_head=6, positions="rotary", ffn="swiglu")
    model, inputs = Case(choices, source_length=3).build()
    sizes = {"head": 4, "kv_head": 2, "d_head": 6, "d_model": 8, "d_ff": 7, "vocab": strategies.VOCAB, "one": 1}
    seen = recorded(model, inputs)
    for site in model.sites:
        own = 3 if site.stack == "encoder" else 5
        read = 3 if site.name.startswith("cross") else own
        held = 3 if site.name in ("cross_k", "cross_v") else own  # whose positions the site lists
        here = {**sizes, "position": held, "query": own, "key": read}
        assert seen[str(site)].shape == (2, *(here[axis] for axis in site.spec.axes)), site


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
    plain = model(inputs)
    largest = max(1.0, plain.abs().max().item())  # of a model without norms, hundreds
    torch.testing.assert_close(recorded(model, inputs)["output"], plain, rtol=0, atol=1e-12 * largest)


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


@pytest.mark.parametrize("variant", TWO_STACKS)
def test_noise_at_every_site_of_two_stacks_changes_the_output(variant):
    n_layers = 2 if variant in ("pre", "post") else 1
    check_noise(translator_of(variant, n_layers=n_layers))
    check_unchanged(translator_of(variant))


@pytest.mark.parametrize("variant", ["pre", "post", "pre rotary", "post gated", "pre no-final", "pre attention-only"])
def test_one_wanted_site_of_two_stacks_equals_all_wanted(variant):
    check_each_site_alone(translator_of(variant))


@pytest.mark.parametrize("variant", ["pre", "post", "pre everything", "pre rotary", "post gated"])
def test_one_wanted_site_equals_all_wanted(variant):
    check_each_site_alone(choices_of(variant))


@torch.no_grad()
def check_sums(choices):
    """Heads sum to attn_out; the stream is the sum of what was written to it (R1), or its norm. In every stack."""
    model, inputs = Case(choices).build()
    seen = recorded(model, inputs)
    for prefix, blocks in stacks_of(model):
        stream = seen[f"{prefix}0.resid_pre"]
        for layer, block in enumerate(blocks):

            def at(name, where=f"{prefix}{layer}."):
                return seen[where + name]

            torch.testing.assert_close(stream, at("resid_pre"), **EXACT)
            sublayers = [("attn_out", "resid_mid", "norm1")]
            check_heads(block.attention, at, "", "attn_out")
            if block.cross_attention is not None:
                check_heads(block.cross_attention, at, "cross_", "cross_out")
                sublayers.append(("cross_out", "resid_cross", "cross_norm"))
            if block.ffn is not None:
                sublayers.append(("ffn_out", "resid_post", "norm2"))
            for written, after, norm in sublayers:
                after = "resid_post" if (written, after, norm) == sublayers[-1] else after
                stream = stream + at(written)
                if model.config.norm_position == "post":
                    torch.testing.assert_close(stream, at(f"{after}_sum"), **EXACT)
                    stream = gain_and_offset(getattr(block, norm), at(f"{norm}_hat"))
                torch.testing.assert_close(stream, at(after), **EXACT)


def check_heads(attention, at, prefix, out):
    """Each head writes z W_O, and all of them with b_O are what the attention writes."""
    each = torch.einsum("bphd,hdm->bphm", at(f"{prefix}z"), attention.W_O)
    torch.testing.assert_close(each, at(f"{prefix}head_out"), **EXACT)
    b_O = 0 if attention.b_O is None else attention.b_O
    torch.testing.assert_close(at(f"{prefix}head_out").sum(2) + b_O, at(out), **EXACT)


def gain_and_offset(norm, x_hat):
    """γ x̂ + β (7.26)."""
    return norm.weight * x_hat + (0 if norm.bias is None else norm.bias)


@pytest.mark.parametrize("variant", ORDER)
def test_recorded_values_add_up(variant):
    check_sums(choices_of(variant))


@pytest.mark.parametrize("variant", TWO_STACKS)
def test_recorded_values_of_two_stacks_add_up(variant):
    check_sums(translator_of(variant))


def test_the_stream_of_an_encoder_decoder_is_the_sum_of_all_that_was_written():
    """R1 from end to end, in both stacks: embedding + every attention, cross-attention and FFN output."""
    model, inputs = Case(translator(n_layers=3, n_encoder_layers=2), source_padding=((0, 1), (2, 0))).build()
    seen = recorded(model, inputs)
    for stack, last in (("encoder", 1), ("decoder", 2)):
        outs = ("embed", "pos_embed", "attn_out", "cross_out", "ffn_out")
        written = [seen[str(s)] for s in model.sites if s.stack == stack and s.name in outs]
        assert len(written) == 2 + (2 * 2 if stack == "encoder" else 3 * 3)
        torch.testing.assert_close(sum(written), seen[f"{stack}.{last}.resid_post"], **EXACT)


@pytest.mark.parametrize("variant", ["pre", "pre no-final", "post", "post final"])
def test_cross_attention_of_every_layer_reads_what_encoder_final_holds(variant):
    """Writing encoder.final decides every layer's cross keys and values: nothing else of the encoder is read."""
    model, inputs = Case(translator_of(variant)).build()
    memory = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    seen = {}

    def tap(site, value):
        seen[str(site)] = value
        return memory if str(site) == "encoder.final" else value

    model(inputs, tap)
    for layer, block in enumerate(model.blocks):
        a = block.cross_attention
        for name, W, b in (("cross_k", a.W_K, a.b_K), ("cross_v", a.W_V, a.b_V)):
            for head in range(W.shape[0]):
                wanted = memory @ W[head] + b[head]
                torch.testing.assert_close(seen[f"decoder.{layer}.{name}"][:, :, head], wanted, **EXACT)


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
