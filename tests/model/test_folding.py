"""fold_norm and center: the same logits from simpler weights, or a refusal."""

import pytest
import torch
from strategies import Case, small

from interp import center, fold_norm, load, save
from interp.model import ConfigError

PADDING = ((0, 0), (2, 0), (0, 1))
MODELS = {
    "layernorm": small(),
    "no biases": small(bias=False),
    "tied": small(tied_embeddings=True),
    "sinusoidal": small(positions="sinusoidal"),
    "gated, rmsnorm, rotary": small(norm="rmsnorm", ffn="swiglu", positions="rotary", bias=False, rotary_base=300.0),
    "gated, layernorm, grouped": small(ffn="geglu", n_heads=4, n_kv_heads=2, qk_norm=True, window=2),
    "attention only": small(ffn="none"),
    "no final norm": small(final_norm=False),
    "no norm": small(norm="none"),
    "no head": small(head=False),
    "encoder": small(kind="encoder", n_segments=2),
    "embedding norm": small(embedding_norm=True),
    "encoder-decoder": small(kind="encoder-decoder", bias=False),
    "encoder-decoder, rmsnorm": small(kind="encoder-decoder", norm="rmsnorm", ffn="swiglu", positions="rotary"),
    "encoder-decoder, attention only": small(kind="encoder-decoder", ffn="none", n_encoder_layers=3),
}
CENTRED = [name for name, choices in MODELS.items()
           if choices.get("norm", "layernorm") == "layernorm" and choices.get("final_norm") is not False
           and not choices.get("embedding_norm")]  # fmt: skip


def build(name, dtype):
    choices = MODELS[name]
    model, inputs = Case(choices, PADDING, length=7, dtype=dtype).build()
    if choices.get("kind") == "encoder-decoder" and inputs.source is None:
        source = torch.randint(9, (3, 6), generator=torch.Generator().manual_seed(3))
        from dataclasses import replace

        inputs = replace(inputs, source=source)
    return model, inputs


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", MODELS)
def test_folding_keeps_the_logits(name, dtype, atol):
    model, inputs = build(name, dtype)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    wanted = model(inputs)
    folded = fold_norm(model)
    real = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    scale = wanted[real].abs().max()
    assert (folded(inputs) - wanted)[real].abs().max() < atol * scale
    assert (folded(inputs, lambda site, value: value) - wanted)[real].abs().max() < atol * scale
    assert all(
        torch.equal(value, before[key]) for key, value in model.state_dict().items()
    )  # the given model is untouched
    assert not folded.config.tied_embeddings and folded.training == model.training
    for key, value in folded.named_parameters():
        if "norm" in key and not key.endswith(("q_norm.weight", "k_norm.weight")):
            kept = key.startswith("embedding_norm") or (key.startswith("final_norm") and not model.config.head)
            assert kept or torch.equal(value, torch.full_like(value, float(key.endswith("weight")))), key
    twice = fold_norm(folded)
    assert all(torch.equal(value, twice.state_dict()[key]) for key, value in folded.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float64, 1e-9), (torch.float32, 1e-5)])
@pytest.mark.parametrize("name", CENTRED)
def test_centring_keeps_the_logits_and_takes_the_mean_out_of_the_stream(name, dtype, atol):
    model, inputs = build(name, dtype)
    wanted = model(inputs)
    real = torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask
    for made in (center(model), fold_norm(center(model)), center(fold_norm(model))):
        apart = (made(inputs) - wanted)[real].abs().max()
        assert apart < atol * wanted[real].abs().max()
        means = []
        made(
            inputs,
            lambda site, x, means=means: (means.append(x.mean(-1).abs().max()) if site.name == "resid_post" else 0, x)[
                1
            ],
        )
        assert means and max(means) < atol


@pytest.mark.parametrize(
    ("function", "choices", "words"),
    [
        (fold_norm, {"norm_position": "post"}, "fold_norm of a model with norm_position='post' is not allowed"),
        (center, {"norm_position": "post"}, "center of a model with norm_position='post'"),
        (
            center,
            {"norm": "rmsnorm"},
            "norm='rmsnorm' is not allowed: the logits would change; allowed: norm='layernorm'",
        ),
        (center, {"final_norm": False}, "final_norm=False"),
        (center, {"embedding_norm": True}, "embedding_norm=True"),
    ],
)
def test_what_cannot_be_done_is_refused(function, choices, words):
    model, _ = Case(small(**choices)).build()
    with pytest.raises(ConfigError, match=words):
        function(model)


@torch.no_grad()
def test_a_folded_model_is_an_ordinary_model(tmp_path):
    model, inputs = build("tied", torch.float64)
    folded = fold_norm(center(model))
    save(folded, tmp_path / "folded")
    assert torch.equal(load(tmp_path / "folded")(inputs), folded(inputs))
