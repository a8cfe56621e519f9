"""Weight groups: every number in exactly one, the rows that `W_Q` … `b_out` show, and swaps that touch nothing else."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from interp import ModelConfig, Transformer
from interp.model.weights import GROUPS, PARTITION, WeightsError

SMALL = {"vocab": 11, "n_layers": 2, "n_heads": 4, "d_model": 16, "n_ctx": 8}
CONFIGS = {
    "gated, grouped": {"n_kv_heads": 2, "ffn": "swiglu", "norm": "rmsnorm", "qk_norm": True, "positions": "rotary"},
    "biases": {"bias": {"qkv", "attn_out", "ffn", "unembed"}, "positions": "learned", "n_segments": 2},
    "tied, learned beta": {"tied_embeddings": True, "ffn": "swish", "swish_beta": "learned", "embedding_norm": True},
    "encoder-decoder": {"kind": "encoder-decoder", "n_encoder_layers": 1, "bias": True},
    "no ffn": {"ffn": "none", "norm": "none"},
}
VIEWS = {"qk": ("W_Q", "W_K", "b_Q", "b_K"), "ov": ("W_V", "W_O", "b_V", "b_O"),
         "ffn_in": ("W_in", "W_gate", "b_in", "b_gate"), "ffn_out": ("W_out", "b_out")}  # fmt: skip


def a_model(name, seed=0):
    config: dict[str, Any] = {**SMALL, **CONFIGS[name]}
    model = Transformer(ModelConfig(**config), seed=seed).double()
    drawn = torch.Generator().manual_seed(seed + 100)
    for parameter in model.parameters():  # gains and offsets differ between models too
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=drawn, dtype=torch.float64)
    return model


def view(model, kind, layer, stack=None):
    weight = model.weight(kind, layer, stack)
    assert weight is not None
    return weight.detach()


@pytest.mark.parametrize("name", CONFIGS)
def test_every_number_is_in_exactly_one_group(name):
    model = a_model(name)
    total = sum(p.numel() for p in model.parameters())
    table = model.weights.table().set_index("group")
    parts = [group for group in PARTITION if group in table.index]
    assert table["parameters"][parts].sum() == total == model.weights.count() == table["parameters"]["all"]
    times = {n: torch.zeros(p.shape[:1]) for n, p in model.named_parameters()}
    for group in parts:
        for parameter, rows in model.weights.select(group).items():
            times[parameter] += rows
    assert all(bool((count == 1).all()) for count in times.values())


@pytest.mark.parametrize("name", CONFIGS)
def test_a_swap_changes_the_views_of_its_group_and_nothing_else(name):
    model, donor = a_model(name), a_model(name, 1)
    stack = "decoder" if name == "encoder-decoder" else None
    before = {n: p.clone() for n, p in model.named_parameters()}
    for group in VIEWS:
        if name == "no ffn" and group.startswith("ffn"):
            continue
        new = model.weights.swapped(donor, group, layers=[1])
        for other, kinds in VIEWS.items():
            for kind in kinds if not (name == "no ffn" and other.startswith("ffn")) else ():
                for layer in (0, 1):
                    source = donor if other == group and layer == 1 else model
                    wanted: Any = source.weight(kind, layer, stack)
                    got: Any = new.weight(kind, layer, stack)
                    assert wanted is got is None or torch.equal(wanted, got), (group, kind, layer)
        assert torch.equal(new.W_E, model.W_E)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_wholes_are_their_parts_and_all_is_the_donor():
    model, donor = a_model("biases"), a_model("biases", 1)
    both = model.weights.swapped(donor, ["qk", "ov"])
    whole = model.weights.swapped(donor, "attention")
    assert all(torch.equal(p, q) for p, q in zip(both.parameters(), whole.parameters(), strict=True))
    everything = model.weights.swapped(donor, PARTITION)
    assert all(torch.equal(p, q) for p, q in zip(everything.parameters(), donor.parameters(), strict=True))
    table = model.weights.table(donor).set_index("group")
    parts = sum(table["distance"][group] ** 2 for group in PARTITION)
    assert table["distance"]["all"] ** 2 == pytest.approx(parts)
    kinds = [(kind, layer) for kind in ("W_out", "b_out") for layer in (0, 1)]
    squares = [float((view(model, *kind) - view(donor, *kind)).square().sum()) for kind in kinds]
    assert table["distance"]["ffn_out"] ** 2 == pytest.approx(sum(squares))


def test_drawing_again_gives_what_a_new_model_has():
    config = ModelConfig(vocab=11, n_layers=2, n_heads=4, d_model=16, n_ctx=8)
    model, fresh = Transformer(config, seed=0), Transformer(config, seed=9)
    new = model.weights.reinitialised("ffn", seed=9, layers=[0])
    assert torch.equal(view(new, "W_in", 0), view(fresh, "W_in", 0))
    assert torch.equal(view(new, "W_in", 1), view(model, "W_in", 1)) and torch.equal(new.W_E, model.W_E)


def test_what_is_refused():
    model = a_model("no ffn")
    with pytest.raises(WeightsError, match=f"groups='mlp' is not allowed; allowed: {', '.join(GROUPS)}"):
        model.weights.count("mlp")
    with pytest.raises(WeightsError, match=r"hold no weights here; this model has Weights\(embeddings"):
        model.weights.swapped(a_model("no ffn", 1), "ffn")
    with pytest.raises(WeightsError, match=r"layers=\[2\] is not allowed; allowed: some of 0 … 1"):
        model.weights.read("qk", layers=[2])
    with pytest.raises(WeightsError, match="hold no weights here"):
        model.weights.read("embeddings", layers=[0])
    with pytest.raises(WeightsError, match="different configs"):
        model.weights.swapped(a_model("biases"), "qk")
