"""A config that contradicts itself is refused by name; defaults are the book's; a config survives JSON."""

import json
import math

import pytest
import strategies
from hypothesis import given, settings
from strategies import small

from interp.model.config import ConfigError, ModelConfig

LINEAR = {"type": "linear", "factor": 2.0}
# (choices, what the message must contain: the field with the value received, and what is allowed)
REFUSED = [
    ({"kind": "transformer"}, "kind='transformer'", "'prefix-decoder'"),
    ({"norm": "batchnorm"}, "norm='batchnorm'", "'rmsnorm'"),
    ({"norm_position": "sandwich"}, "norm_position='sandwich'", "'post'"),
    ({"ffn": "mish"}, "ffn='mish'", "'swiglu'"),
    ({"positions": "alibi"}, "positions='alibi'", "'rotary'"),
    *[({name: 0}, f"{name}=0", "> 0") for name in ("vocab", "n_layers", "n_heads", "d_model", "n_ctx")],
    *[({name: 2.0}, f"{name}=2.0", "integer") for name in ("vocab", "n_layers", "n_heads", "d_model", "n_ctx")],
    *[({name: -1}, f"{name}=-1", "None") for name in ("d_ff", "d_head", "n_kv_heads", "window")],
    ({"n_layers": True}, "n_layers=True", "integer"),
    ({"n_layers": "2"}, "n_layers='2'", "integer"),
    ({"n_encoder_layers": 0, "kind": "encoder-decoder"}, "n_encoder_layers=0", "integer"),
    *[({name: 1}, f"{name}=1", "True or False") for name in ("qk_norm", "embedding_norm", "tied_embeddings", "head")],
    ({"final_norm": "yes"}, "final_norm='yes'", "None"),
    ({"n_segments": -1}, "n_segments=-1", ">= 0"),
    ({"n_heads": 3}, "n_heads=3", "divisor of d_model=8"),
    ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads=3", "divisor of n_heads=4"),
    ({"bias": "qkv"}, "bias='qkv'", "'attn_out'"),
    ({"bias": {"keys"}}, "bias={'keys'}", "'qkv'"),
    ({"norm_eps": -1e-5}, "norm_eps=-1e-05", ">= 0"),
    ({"norm_eps": math.nan}, "norm_eps=nan", ">= 0"),
    ({"attention_scale": 0}, "attention_scale=0", "not 0"),
    ({"attention_scale": math.inf}, "attention_scale=inf", "finite"),
    ({"ffn": "swiglu", "swish_beta": "free"}, "swish_beta='free'", "'learned'"),
    ({"ffn": "relu", "swish_beta": 1.7}, "swish_beta=1.7", "1.0 for ffn='relu'"),
    ({"ffn": "geglu", "swish_beta": "learned"}, "swish_beta='learned'", "1.0 for ffn='geglu'"),
    ({"rotary_base": 0}, "rotary_base=0", "> 0"),
    ({"positions": "rotary", "rotary_fraction": 0.0}, "rotary_fraction=0.0", "(0, 1]"),
    ({"positions": "rotary", "rotary_fraction": 1.5}, "rotary_fraction=1.5", "(0, 1]"),
    ({"positions": "rotary", "d_head": 3}, "rotary_fraction=1.0", "even"),
    ({"positions": "rotary", "d_head": 8, "rotary_fraction": 0.4}, "rotary_fraction=0.4", "even"),
    ({"rotary_fraction": 0.5}, "rotary_fraction=0.5", "positions='rotary'"),
    ({"rotary_scaling": LINEAR}, "rotary_scaling=", "positions='rotary'"),
    ({"positions": "rotary", "rotary_scaling": "linear"}, "rotary_scaling='linear'", "'llama3'"),
    ({"positions": "rotary", "rotary_scaling": {"type": "yarn"}}, "'yarn'", "'linear'"),
    ({"positions": "rotary", "rotary_scaling": {"type": "linear"}}, "rotary_scaling=", "factor"),
    (
        {"positions": "rotary", "rotary_scaling": {**LINEAR, "low_freq_factor": 1}},
        "low_freq_factor",
        "'linear', factor",
    ),
    ({"positions": "rotary", "rotary_scaling": {**LINEAR, "type": "llama3"}}, "rotary_scaling=", "original_n_ctx"),
    ({"positions": "sinusoidal", "d_model": 9, "n_heads": 3}, "d_model=9", "even"),
    ({"norm": "none", "final_norm": True}, "final_norm=True", "norm='none'"),
    ({"norm": "none", "embedding_norm": True}, "embedding_norm=True", "norm='none'"),
    ({"norm": "none", "norm_position": "post"}, "norm_position='post'", "'pre'"),
    ({"head": False, "tied_embeddings": True}, "tied_embeddings=True", "head=False"),
    ({"head": False, "bias": {"unembed"}}, "bias={'unembed'}", "head=False"),
    ({"n_encoder_layers": 2}, "n_encoder_layers=2", "None for kind='decoder'"),
    ({"kind": "encoder", "n_encoder_layers": 2}, "n_encoder_layers=2", "None for kind='encoder'"),
]


@pytest.mark.parametrize(("choices", "received", "allowed"), REFUSED, ids=lambda value: str(value)[:40])
def test_contradictions_are_refused_by_name(choices, received, allowed):
    with pytest.raises(ConfigError) as caught:
        ModelConfig(**small(**choices))
    message = str(caught.value)
    assert received in message.split("; allowed: ")[0]
    assert allowed in message.split("; allowed: ")[1]


def test_positional_and_unknown_arguments_are_refused():
    with pytest.raises(TypeError):
        ModelConfig("decoder", 9)  # type: ignore[misc]
    with pytest.raises(TypeError, match="n_layer"):
        ModelConfig(**small(n_layer=2))


def config(**choices):
    return ModelConfig(vocab=9, n_layers=2, n_heads=4, d_model=24, n_ctx=8, **choices)


def test_defaults_are_the_books():
    made = config()
    assert (made.kind, made.norm, made.norm_position, made.ffn, made.positions) == (
        "decoder", "layernorm", "pre", "relu", "learned")  # fmt: skip
    assert (made.norm_eps, made.bias, made.tied_embeddings, made.head) == (
        1e-5, frozenset({"qkv", "attn_out", "ffn"}), False, True)  # fmt: skip
    assert made.d_ff == 96  # 4 d
    assert made.d_head == 6
    assert made.n_kv_heads == 4
    assert made.attention_scale == pytest.approx(1 / math.sqrt(6), abs=1e-16)
    assert made.swish_beta == 1.0
    assert (made.rotary_base, made.rotary_fraction, made.rotary_scaling) == (10000.0, 1.0, None)
    assert (made.window, made.n_segments, made.qk_norm, made.embedding_norm) == (None, 0, False, False)


@pytest.mark.parametrize("ffn", ["swiglu", "geglu", "reglu", "bilinear"])
def test_gated_width_matches_the_parameters(ffn):
    assert config(ffn=ffn).d_ff == 64  # 8 d / 3
    assert ModelConfig(**{**small(), "d_ff": None, "ffn": ffn}).d_ff == round(64 / 3)
    assert config(ffn=ffn, d_ff=10).d_ff == 10
    assert config(ffn=ffn).gated
    assert 3 * 64 * 24 == 2 * 96 * 24


@pytest.mark.parametrize(
    ("choices", "final"),
    [
        ({}, True),
        ({"norm": "rmsnorm"}, True),
        ({"norm_position": "post"}, False),
        ({"norm": "none"}, False),
        ({"norm_position": "post", "final_norm": True}, True),
        ({"final_norm": False}, False),
    ],
)
def test_final_norm_default(choices, final):
    assert config(**choices).final_norm is final


def test_bias_sets():
    assert config(bias=True).bias == {"qkv", "attn_out", "ffn"}
    assert config(bias=False).bias == frozenset()
    for places in ({"qkv"}, ["qkv"], ("qkv",), frozenset({"qkv"})):
        assert config(bias=places).bias == frozenset({"qkv"})


def test_encoder_layers_default():
    assert config(kind="encoder-decoder").n_encoder_layers == 2
    assert config(kind="encoder-decoder", n_encoder_layers=5).n_encoder_layers == 5
    assert config().n_encoder_layers is None


def test_derived_sizes():
    assert config(ffn="none").ffn_size == 0
    assert config(positions="rotary", d_head=8, rotary_fraction=0.5).rotary_dims == 4
    assert config().rotary_dims == 0
    assert (config().rotates, config(qk_norm=True).rotates, config(positions="rotary").rotates) == (False, True, True)


@settings(max_examples=100, derandomize=True, deadline=None, database=None)
@given(strategies.choices())
def test_json_round_trip(choices):
    made = ModelConfig(**choices)
    again = ModelConfig.from_dict(json.loads(json.dumps(made.to_dict())))
    assert again == made
    assert hash(again) == hash(made)
    assert again.to_dict() == made.to_dict()


def test_unequal_configs_differ():
    assert config() != config(norm="rmsnorm")
    assert len({config(), config(), config(norm="rmsnorm")}) == 2


def test_frozen():
    with pytest.raises(AttributeError):
        config().norm = "rmsnorm"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("values", "said"),
    [({**small(), "colour": 1}, "colour"), ({"vocab": 9}, "n_layers"), ({**small(), "norm": "no"}, "norm='no'")],
)
def test_from_dict_refuses(values, said):
    with pytest.raises(ConfigError, match=said):
        ModelConfig.from_dict(values)
