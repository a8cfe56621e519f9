"""Which of transformers' architectures ours equals: each family reads and writes a config, and names its weights.

One table of names serves both directions, so a weight cannot be read from one place and written to another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from interp.model.config import ModelConfig


class BridgeError(ValueError):
    """A model that the other library cannot express, or weights that do not match their config; the message names the part."""


class Name(NamedTuple):
    """One of our weights, the source's weights whose rows it joins, and whether the source stores it [in out]."""

    ours: str
    theirs: tuple[str, ...]
    turned: bool = False


@dataclass(frozen=True)
class Family:
    """architecture: transformers' model class; config_class: its config's.

    read(config) -> ModelConfig, raising BridgeError for what ours cannot express. write(ModelConfig) -> the config's
    keyword arguments, as near as the family comes; whether it is near enough, reading it back tells. names: every weight.
    ignored: source weights that are no part of the model (a pooler). keywords: for the model class.
    """

    architecture: str
    config_class: str
    read: Callable[[Any], ModelConfig]
    write: Callable[[ModelConfig], dict[str, Any]]
    names: Callable[[ModelConfig], list[Name]]
    embedding: str
    head: str | None
    ignored: tuple[str, ...] = ()
    keywords: tuple[tuple[str, Any], ...] = ()


def refuse(config: Any, allowed: dict[str, Any], architecture: str) -> None:
    """Raise BridgeError for the first field whose value ours cannot express; a missing field is fine."""
    for name, value in allowed.items():
        found = getattr(config, name, value)
        if found != value:
            raise BridgeError(f"{architecture} with {name}={found!r} is not supported; allowed: {value!r}")


# Llama, Mistral, Qwen2, Qwen3: RMSNorm, rotary, SwiGLU


def _rotary(config: Any, architecture: str) -> dict[str, Any]:
    """positions, rotary_base and rotary_scaling of a transformers config."""
    rope = dict(config.rope_parameters)
    kind = rope.get("rope_type", "default")
    fraction = rope.get("partial_rotary_factor", 1.0)
    if fraction != 1.0:  # these architectures rotate every dimension whatever it says, or fail
        raise BridgeError(f"{architecture} with partial_rotary_factor={fraction!r} is not supported; allowed: 1.0")
    found: dict[str, Any] = {"positions": "rotary", "rotary_base": float(rope["rope_theta"])}
    if kind == "linear":
        found["rotary_scaling"] = {"type": "linear", "factor": float(rope["factor"])}
    elif kind == "llama3":
        keys = ("factor", "low_freq_factor", "high_freq_factor")
        found["rotary_scaling"] = {"type": "llama3", **{key: float(rope[key]) for key in keys},
                                   "original_n_ctx": int(rope["original_max_position_embeddings"])}  # fmt: skip
    elif kind != "default":
        raise BridgeError(f"{architecture} with rope_type={kind!r} is not supported; allowed: 'default', 'linear', "
                          "'llama3'")  # fmt: skip
    return found


def _rope_parameters(config: ModelConfig) -> dict[str, Any]:
    """The inverse of `_rotary`."""
    scaling = dict(config.rotary_scaling or {})
    kind = scaling.pop("type", "default")
    if "original_n_ctx" in scaling:
        scaling["original_max_position_embeddings"] = scaling.pop("original_n_ctx")
    return {"rope_type": kind, "rope_theta": config.rotary_base, **scaling}


def _window(config: Any, architecture: str) -> int | None:
    """How many last keys a query of every layer may read (itself included), None = all."""
    window = getattr(config, "sliding_window", None)
    if architecture == "LlamaForCausalLM":  # has no window, also where its config carries one
        return None
    if architecture == "MistralForCausalLM":  # every layer has it, whatever layer_types says
        return window
    kinds = set(config.layer_types)
    if not kinds <= {"full_attention", "sliding_attention"} or len(kinds) > 1:
        raise BridgeError(f"{architecture} with layer_types {sorted(kinds)} is not supported; allowed: the same for "
                          "every layer, 'full_attention' or 'sliding_attention'")  # fmt: skip
    return window if kinds == {"sliding_attention"} else None


def _read_llama(architecture: str) -> Callable[[Any], ModelConfig]:
    def read(config: Any) -> ModelConfig:
        refuse(config, {"hidden_act": "silu"}, architecture)
        bias = {"ffn"} if getattr(config, "mlp_bias", False) else set()
        if getattr(config, "attention_bias", False):
            bias |= {"qkv", "attn_out"}
        if architecture == "Qwen2ForCausalLM":
            bias = {"qkv"}
        return ModelConfig(
            vocab=config.vocab_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
            n_kv_heads=config.num_key_value_heads, d_model=config.hidden_size, d_head=getattr(config, "head_dim", None),
            d_ff=config.intermediate_size, n_ctx=config.max_position_embeddings, norm="rmsnorm",
            norm_eps=config.rms_norm_eps, ffn="swiglu", bias=frozenset(bias), window=_window(config, architecture),
            qk_norm=architecture == "Qwen3ForCausalLM", tied_embeddings=bool(config.tie_word_embeddings),
            **_rotary(config, architecture),
        )  # fmt: skip

    return read


def _write_llama(architecture: str) -> Callable[[ModelConfig], dict[str, Any]]:
    def write(config: ModelConfig) -> dict[str, Any]:
        words: dict[str, Any] = {
            "vocab_size": config.vocab, "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
            "num_key_value_heads": config.n_kv_heads, "hidden_size": config.d_model, "head_dim": config.d_head,
            "intermediate_size": config.ffn_size, "max_position_embeddings": config.n_ctx,
            "rms_norm_eps": config.norm_eps, "tie_word_embeddings": config.tied_embeddings,
            "rope_parameters": _rope_parameters(config), "pad_token_id": None, "bos_token_id": None, "eos_token_id": None,
        }  # fmt: skip
        if architecture in ("LlamaForCausalLM", "Qwen3ForCausalLM"):
            words["attention_bias"] = "attn_out" in config.biases
        if architecture == "LlamaForCausalLM":
            words["mlp_bias"] = "ffn" in config.biases
        else:
            words["sliding_window"] = config.window
        if architecture.startswith("Qwen"):
            words |= {"use_sliding_window": config.window is not None, "max_window_layers": 0}
        if architecture == "Qwen2ForCausalLM":
            del words["head_dim"]  # it has none: always d_model / n_heads
        return words

    return write


def _llama_names(config: ModelConfig) -> list[Name]:
    names = [
        Name("embedding.weight", ("model.embed_tokens.weight",)),
        Name("final_norm.weight", ("model.norm.weight",)),
    ]
    if not config.tied_embeddings:
        names.append(Name("unembedding.weight", ("lm_head.weight",)))
    parts = {
        place: ("weight", "bias") if place in config.biases else ("weight",) for place in ("qkv", "attn_out", "ffn")
    }
    for layer in range(config.n_layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        names.append(Name(f"{ours}.norm1.weight", (f"{theirs}.input_layernorm.weight",)))
        names.append(Name(f"{ours}.norm2.weight", (f"{theirs}.post_attention_layernorm.weight",)))
        for part in parts["qkv"]:
            projections = tuple(f"{theirs}.self_attn.{letter}_proj.{part}" for letter in "qkv")
            names.append(Name(f"{ours}.attention.qkv.{part}", projections))
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            names.append(Name(f"{ours}.attention.{norm}.weight", (f"{theirs}.self_attn.{norm}.weight",)))
        for part in parts["attn_out"]:
            names.append(Name(f"{ours}.attention.out.{part}", (f"{theirs}.self_attn.o_proj.{part}",)))
        for part in parts["ffn"]:
            halves = (f"{theirs}.mlp.gate_proj.{part}", f"{theirs}.mlp.up_proj.{part}")
            names.append(Name(f"{ours}.ffn.gate_up.{part}", halves))
            names.append(Name(f"{ours}.ffn.down.{part}", (f"{theirs}.mlp.down_proj.{part}",)))
    return names


def _llama(architecture: str) -> Family:
    config_class = architecture.replace("ForCausalLM", "Config")
    return Family(architecture, config_class, _read_llama(architecture), _write_llama(architecture), _llama_names,
                  "model.embed_tokens.weight", "lm_head.weight")  # fmt: skip


# GPT-2: LayerNorm, learned positions, biases


GPT2_ACTIVATIONS = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}


def activation(name: str, known: dict[str, str], field: str, architecture: str) -> Any:
    """Our name of a source's activation function; BridgeError for one that ours lacks."""
    if name not in known:
        raise BridgeError(f"{architecture} with {field}={name!r} is not supported; allowed: {', '.join(known)}")
    return known[name]


def _their_activation(config: ModelConfig, known: dict[str, str]) -> str:
    return next((theirs for theirs, ours in known.items() if ours == config.ffn), next(iter(known)))


def _read_gpt2(config: Any) -> ModelConfig:
    architecture = "GPT2LMHeadModel"
    refuse(config, {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False},
           architecture)  # fmt: skip
    return ModelConfig(
        vocab=config.vocab_size, n_layers=config.n_layer, n_heads=config.n_head, d_model=config.n_embd,
        d_ff=config.n_inner or 4 * config.n_embd, n_ctx=config.n_positions, norm="layernorm",
        norm_eps=config.layer_norm_epsilon, positions="learned", bias=True, tied_embeddings=bool(config.tie_word_embeddings),
        ffn=activation(config.activation_function, GPT2_ACTIVATIONS, "activation_function", architecture),
    )  # fmt: skip


def _write_gpt2(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab, "n_layer": config.n_layers, "n_head": config.n_heads, "n_embd": config.d_model,
        "n_inner": config.ffn_size, "n_positions": config.n_ctx, "layer_norm_epsilon": config.norm_eps,
        "tie_word_embeddings": config.tied_embeddings, "activation_function": _their_activation(config, GPT2_ACTIVATIONS),
        "bos_token_id": None, "eos_token_id": None,
    }  # fmt: skip


def _gpt2_names(config: ModelConfig) -> list[Name]:
    names = [Name("embedding.weight", ("transformer.wte.weight",)), Name("W_pos", ("transformer.wpe.weight",))]
    names += [Name(f"final_norm.{part}", (f"transformer.ln_f.{part}",)) for part in ("weight", "bias")]
    if not config.tied_embeddings:
        names.append(Name("unembedding.weight", ("lm_head.weight",)))
    places = {
        "ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out",
        "mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down",
    }  # fmt: skip
    for layer in range(config.n_layers):
        for theirs, ours in places.items():
            for part in ("weight", "bias"):  # transformers' Conv1D stores [in out], ours is [out in]
                turned = ".c_" in theirs and part == "weight"
                names.append(Name(f"blocks.{layer}.{ours}.{part}", (f"transformer.h.{layer}.{theirs}.{part}",), turned))
    return names


# The BERT body: post-norm encoder, embedding norm, segments


BERT_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}


def _read_bert(config: Any) -> ModelConfig:
    architecture = "BertModel"
    refuse(
        config, {"is_decoder": False, "add_cross_attention": False, "position_embedding_type": "absolute"}, architecture
    )
    return ModelConfig(
        kind="encoder", vocab=config.vocab_size, n_layers=config.num_hidden_layers, n_heads=config.num_attention_heads,
        d_model=config.hidden_size, d_ff=config.intermediate_size, n_ctx=config.max_position_embeddings,
        norm="layernorm", norm_position="post", norm_eps=config.layer_norm_eps, positions="learned", bias=True,
        embedding_norm=True, n_segments=config.type_vocab_size, head=False,
        ffn=activation(config.hidden_act, BERT_ACTIVATIONS, "hidden_act", architecture),
    )  # fmt: skip


def _write_bert(config: ModelConfig) -> dict[str, Any]:
    return {
        "vocab_size": config.vocab, "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads,
        "hidden_size": config.d_model, "intermediate_size": config.ffn_size, "max_position_embeddings": config.n_ctx,
        "layer_norm_eps": config.norm_eps, "type_vocab_size": max(1, config.n_segments), "pad_token_id": None,
        "hidden_act": _their_activation(config, BERT_ACTIVATIONS),
    }  # fmt: skip


def _bert_names(config: ModelConfig) -> list[Name]:
    outer = {"embedding.weight": "word_embeddings.weight", "W_pos": "position_embeddings.weight",
             "segment_embedding.weight": "token_type_embeddings.weight", "embedding_norm.weight": "LayerNorm.weight",
             "embedding_norm.bias": "LayerNorm.bias"}  # fmt: skip
    names = [Name(ours, (f"embeddings.{theirs}",)) for ours, theirs in outer.items()]
    places = {"attention.out": "attention.output.dense", "norm1": "attention.output.LayerNorm",
              "ffn.up": "intermediate.dense", "ffn.down": "output.dense", "norm2": "output.LayerNorm"}  # fmt: skip
    for layer in range(config.n_layers):
        ours, theirs = f"blocks.{layer}", f"encoder.layer.{layer}"
        for part in ("weight", "bias"):
            projections = tuple(f"{theirs}.attention.self.{name}.{part}" for name in ("query", "key", "value"))
            names.append(Name(f"{ours}.attention.qkv.{part}", projections))
            names += [Name(f"{ours}.{mine}.{part}", (f"{theirs}.{given}.{part}",)) for mine, given in places.items()]
    return names


FAMILIES: dict[str, Family] = {
    family.architecture: family
    for family in (
        *(_llama(f"{name}ForCausalLM") for name in ("Llama", "Mistral", "Qwen2", "Qwen3")),
        Family("GPT2LMHeadModel", "GPT2Config", _read_gpt2, _write_gpt2, _gpt2_names, "transformer.wte.weight", "lm_head.weight"),
        Family("BertModel", "BertConfig", _read_bert, _write_bert, _bert_names, "embeddings.word_embeddings.weight", None,
               ("pooler.dense.weight", "pooler.dense.bias"), (("add_pooling_layer", False),)),
    )
}  # fmt: skip
