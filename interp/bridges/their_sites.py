"""Where transformers' and PyTorch's modules hold our sites: read with their own forward hooks, nothing changed.

Only for comparing numbers: which module's input or output is which site, per family.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from interp.sites import Site


class Place(NamedTuple):
    """A module by its path, whether its input or its output, and how to shape it [batch pos …]."""

    module: str
    side: str
    shape: Callable[[Tensor], Tensor] = lambda x: x


def _heads(n: int) -> Callable[[Tensor], Tensor]:
    return lambda x: x.unflatten(-1, (n, -1))


def llama_places(config: Any) -> dict[Site, Place]:
    """Llama, Mistral, Qwen2, Qwen3."""
    q, kv = _heads(config.num_attention_heads), _heads(config.num_key_value_heads)
    places = {Site("embed"): Place("model.embed_tokens", "out"), Site("final"): Place("model.norm", "out")}
    inside = {
        "resid_pre": Place("input_layernorm", "in"), "norm1": Place("input_layernorm", "out"),
        "q": Place("self_attn.q_proj", "out", q), "k": Place("self_attn.k_proj", "out", kv),
        "v": Place("self_attn.v_proj", "out", kv), "z": Place("self_attn.o_proj", "in", q),
        "attn_out": Place("self_attn.o_proj", "out"), "resid_mid": Place("post_attention_layernorm", "in"),
        "norm2": Place("post_attention_layernorm", "out"), "ffn_pre": Place("mlp.gate_proj", "out"),
        "ffn_up": Place("mlp.up_proj", "out"), "ffn_act": Place("mlp.down_proj", "in"),
        "ffn_out": Place("mlp.down_proj", "out"), "resid_post": Place("", "out"),
    }  # fmt: skip
    return places | _per_layer(config.num_hidden_layers, "model.layers", inside)


def gpt2_places(config: Any) -> dict[Site, Place]:
    """GPT-2."""
    heads, d = _heads(config.n_head), config.n_embd
    places = {
        Site("embed"): Place("transformer.wte", "out"), Site("pos_embed"): Place("transformer.wpe", "out"),
        Site("final"): Place("transformer.ln_f", "out"),
    }  # fmt: skip
    inside = {
        "resid_pre": Place("ln_1", "in"), "norm1": Place("ln_1", "out"),
        **{name: Place("attn.c_attn", "out", lambda x, i=i: heads(x[..., i * d : (i + 1) * d])) for i, name in enumerate("qkv")},
        "z": Place("attn.c_proj", "in", heads), "attn_out": Place("attn.c_proj", "out"), "resid_mid": Place("ln_2", "in"),
        "norm2": Place("ln_2", "out"), "ffn_pre": Place("mlp.c_fc", "out"), "ffn_act": Place("mlp.c_proj", "in"),
        "ffn_out": Place("mlp.c_proj", "out"), "resid_post": Place("", "out"),
    }  # fmt: skip
    return places | _per_layer(config.n_layer, "transformer.h", inside)


def bert_places(config: Any) -> dict[Site, Place]:
    """The BERT body."""
    heads = _heads(config.num_attention_heads)
    places = {
        Site("embed"): Place("embeddings.word_embeddings", "out"),
        Site("pos_embed"): Place("embeddings.position_embeddings", "out"),
    }
    inside = {
        "resid_pre": Place("", "in"), "q": Place("attention.self.query", "out", heads),
        "k": Place("attention.self.key", "out", heads), "v": Place("attention.self.value", "out", heads),
        "z": Place("attention.output.dense", "in", heads), "attn_out": Place("attention.output.dense", "out"),
        "resid_mid_sum": Place("attention.output.LayerNorm", "in"), "resid_mid": Place("attention.output.LayerNorm", "out"),
        "ffn_pre": Place("intermediate.dense", "out"), "ffn_act": Place("output.dense", "in"),
        "ffn_out": Place("output.dense", "out"), "resid_post_sum": Place("output.LayerNorm", "in"),
        "resid_post": Place("output.LayerNorm", "out"),
    }  # fmt: skip
    return places | _per_layer(config.num_hidden_layers, "encoder.layer", inside)


def torch_places(n_encoder: int, n_decoder: int, norm_first: bool) -> dict[Site, Place]:
    """`torch.nn.Transformer`, batch_first: its modules call attention without hooks on q, k, v, so layers and FFNs are read."""
    places = {
        Site("final", stack="encoder"): Place("encoder", "out"),
        Site("final", stack="decoder"): Place("decoder", "out"),
    }
    ffn = {"ffn_pre": Place("linear1", "out"), "ffn_act": Place("linear2", "in"), "ffn_out": Place("linear2", "out")}
    ends = {"resid_pre": Place("", "in"), "resid_post": Place("", "out")}
    norms: dict[str, dict[str, Place]] = {
        "encoder": {"norm1": Place("norm1", "out"), "norm2": Place("norm2", "out"), "resid_mid": Place("norm2", "in")},
        "decoder": {"norm1": Place("norm1", "out"), "cross_norm": Place("norm2", "out"), "norm2": Place("norm3", "out"),
                    "resid_mid": Place("norm2", "in"), "resid_cross": Place("norm3", "in")},
    }  # fmt: skip
    if not norm_first:
        norms = {
            "encoder": {"resid_mid_sum": Place("norm1", "in"), "resid_mid": Place("norm1", "out"),
                        "resid_post_sum": Place("norm2", "in")},
            "decoder": {"resid_mid_sum": Place("norm1", "in"), "resid_mid": Place("norm1", "out"),
                        "resid_cross_sum": Place("norm2", "in"), "resid_cross": Place("norm2", "out"),
                        "resid_post_sum": Place("norm3", "in")},
        }  # fmt: skip
    for stack, n in (("encoder", n_encoder), ("decoder", n_decoder)):
        places |= _per_layer(n, f"{stack}.layers", {**ends, **norms[stack], **ffn}, stack)
    return places


def _per_layer(n: int, where: str, inside: dict[str, Place], stack=None) -> dict[Site, Place]:
    return {
        Site(name, layer, stack): Place(f"{where}.{layer}.{module}".rstrip("."), side, shape)
        for layer in range(n)
        for name, (module, side, shape) in inside.items()
    }


PLACES: dict[str, Callable[[Any], dict[Site, Place]]] = {
    "GPT2LMHeadModel": gpt2_places,
    "BertModel": bert_places,
    **{f"{name}ForCausalLM": llama_places for name in ("Llama", "Mistral", "Qwen2", "Qwen3")},
}


@contextmanager
def reading(model: nn.Module, places: dict[Site, Place]) -> Iterator[dict[Site, Tensor]]:
    """A dict that forward passes inside the block fill with each place's value; no hook is left behind."""
    found: dict[Site, Tensor] = {}
    handles = []

    def first(value: Any) -> Tensor:
        return value[0] if isinstance(value, tuple) else value

    def hook(site: Site, place: Place) -> Any:
        def store(module: nn.Module, given: Any, named: Any, out: Any) -> None:
            value = first(out) if place.side == "out" else first(given) if given else named["hidden_states"]
            found[site] = place.shape(value.detach().clone())

        return model.get_submodule(place.module).register_forward_hook(store, with_kwargs=True)

    try:
        handles = [hook(site, place) for site, place in places.items()]
        with torch.no_grad():
            yield found
    finally:
        for handle in handles:
            handle.remove()
