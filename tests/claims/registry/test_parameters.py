"""Counting by arithmetic against models that are made, and against published totals."""

import pandas as pd
import pytest

from interp.analyses.parameters import parameter_table
from interp.claims.registry import parameters
from interp.model import ModelConfig, Transformer
from interp.plots.style import PlotError

BASE = {"vocab": 11, "n_layers": 2, "n_heads": 4, "d_model": 12, "n_ctx": 7}


@pytest.mark.parametrize("choices", [
    {}, {"ffn": "swiglu", "bias": False, "norm": "rmsnorm", "positions": "rotary", "d_head": 4, "n_kv_heads": 2},
    {"tied_embeddings": True, "bias": frozenset({"qkv", "unembed"})}, {"norm": "none", "ffn": "none"},
    {"kind": "encoder", "norm_position": "post", "embedding_norm": True}, {"qk_norm": True, "ffn": "geglu"},
    {"kind": "encoder-decoder", "n_encoder_layers": 3, "ffn": "swiglu", "swish_beta": "learned"}, {"head": False},
])  # fmt: skip
def test_counts_of_a_model_that_is_made(choices):
    config = ModelConfig(**{**BASE, **choices})
    counts = parameters.count_parameters(config)
    found = parameter_table(Transformer(config)).set_index("group")["parameters"]
    assert counts["norms"] == found["other"]
    assert [counts[name] for name in ("embeddings", "attention", "ffn")] == [
        found[name] for name in ("embeddings", "attention", "ffn")
    ]


def test_segments_are_embeddings():
    config = ModelConfig(**BASE, kind="encoder", n_segments=2)
    assert sum(parameters.count_parameters(config).values()) == sum(p.numel() for p in Transformer(config).parameters())


@pytest.mark.parametrize(("name", "total"), [
    ("GPT-2 small", 124_439_808), ("GPT-2 XL", 1_557_611_200), ("Pythia-70M", 70_426_624), ("LLaMA-7B", 6_738_415_616),
    ("Llama-3-8B", 8_030_261_248), ("Mistral-7B", 7_241_732_096), ("SmolLM2-135M", 134_515_008), ("Qwen2-0.5B", 494_032_768),
    ("T5-small", 60_506_624 - 2 * 32 * 8),  # as published, without two stacks' relative-position biases
])  # fmt: skip
def test_published_totals(name, total):
    assert sum(parameters.count_parameters(parameters.PUBLISHED[name]).values()) == total


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    return {"F1": parameters.measure({"published": list(parameters.PUBLISHED)}, tmp_path_factory.mktemp("F1"))}


def test_verdicts(measured):
    assert parameters.blocks(measured).says == "supported"
    whole = parameters.total(measured)
    assert whole.says == "refuted"
    assert whole.low == pytest.approx(0.179, abs=5e-4)
    assert "no FFN" in set(measured["F1"]["origin"])
    row = measured["F1"].set_index("model")["share"]
    assert row[["GPT-2 small", "GPT-2 XL", "SmolLM2-135M", "LLaMA-7B"]].round(3).tolist() == [
        0.455,
        0.631,
        0.592,
        0.642,
    ]


def test_rule_on_made_up_tables():
    rows = pd.DataFrame({"model": ["a", "b", "c"], "origin": ["published", "toy", "no FFN"], "share": [0.9, 0.5, 0.0]})
    assert parameters.total({"F1": rows}).says == "refuted"  # one half is not most
    assert parameters.total({"F1": rows.assign(share=[0.9, 0.51, 0.0])}).says == "supported"
    assert parameters.total({"F1": rows}).n == 2


def test_figure(measured):
    (ax,) = parameters.figure(measured).axes
    assert len(ax.patches) == 2 * len(measured["F1"])
    with pytest.raises(PlotError):
        parameters.figure({"F1": measured["F1"].drop(columns="share")})
