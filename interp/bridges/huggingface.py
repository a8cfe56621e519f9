"""transformers models into ours: every key and shape asserted, nothing folded, the given object untouched."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from interp.model.checkpoint import fill
from interp.model.config import ModelConfig
from interp.model.transformer import Transformer


class BridgeError(ValueError):
    """A model that ours cannot express, or weights that do not match their config; the message names the part."""


def optional(module: str, extra: str) -> Any:
    """Import a module of an extra, or say how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ImportError(f"this needs {module}, which is not installed: pip install 'interp[{extra}]'") from error


def from_huggingface(
    model: Any,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
) -> Transformer:
    """Our Transformer with the weights of a transformers causal language model, in eval mode.

    model: a transformers model object (left bit-identical), a local folder or a hub name, of Llama, Mistral, Qwen2,
    Qwen3 or GPT-2. dtype, device: the source's unless given. Logits equal transformers' eager ones up to rounding.
    Costs one copy of the weights beside the source. Raises BridgeError naming what ours cannot express.
    """
    if isinstance(model, str | Path):
        transformers = optional("transformers", "hf")
        model = transformers.AutoModelForCausalLM.from_pretrained(str(model), revision=revision, dtype=dtype or "auto")
    architecture = type(model).__name__
    if architecture not in _CONVERTERS:
        raise BridgeError(f"architecture {architecture} is not supported; allowed: {', '.join(_CONVERTERS)}")
    read_config, name_weights = _CONVERTERS[architecture]
    _refuse(model.config, {"is_causal": True}, architecture)
    config = read_config(model.config, architecture)
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    _plain(weights, architecture)
    _untie(config, weights, "lm_head.weight", model.get_input_embeddings().weight.detach())
    taken = name_weights(config, weights)
    if weights:
        raise BridgeError(f"{architecture} has weights that ours has no place for: {sorted(weights)[:5]}")
    target = next(iter(taken.values()))
    device, dtype = device or target.device, dtype or target.dtype
    ours = Transformer(config, seed=None)
    for name in list(taken):  # one at a time, so that a change of dtype never holds a third copy
        taken[name] = taken[name].to(device, dtype)
    fill(ours, taken, architecture)
    return ours.eval()


def _untie(config: ModelConfig, weights: dict[str, Tensor], head: str, embedding: Tensor) -> None:
    """A tied head is the embedding and is dropped; one that differs contradicts the config."""
    if config.tied_embeddings and head in weights and not torch.equal(weights.pop(head), embedding):
        raise BridgeError(f"tie_word_embeddings is set, but {head} differs from the token embedding")


def _plain(weights: dict[str, Tensor], architecture: str) -> None:
    """Raise for weights that are not numbers at hand: quantised, or left on the meta device by an offloading loader."""
    for name, tensor in weights.items():
        if tensor.is_meta or not tensor.is_floating_point():
            where = "on the meta device (offloaded)" if tensor.is_meta else f"of type {tensor.dtype} (quantised)"
            raise BridgeError(f"{architecture}: {name} is {where}; allowed: floating-point weights in memory")


def _refuse(config: Any, allowed: dict[str, Any], architecture: str) -> None:
    """Raise for every field whose value ours cannot express."""
    for name, value in allowed.items():
        found = getattr(config, name, value)
        if found != value:
            raise BridgeError(f"{architecture} with {name}={found!r} is not supported; allowed: {value!r}")


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


def _llama_config(config: Any, architecture: str) -> ModelConfig:
    """Llama and its relatives: Mistral adds a window, Qwen2 biases of q, k, v, Qwen3 norms of q and k."""
    _refuse(config, {"hidden_act": "silu"}, architecture)
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


def _llama_weights(config: ModelConfig, source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ours by name; every source tensor is taken out of `source`, joined or copied."""
    taken = {
        "embedding.weight": _take(source, "model.embed_tokens.weight"),
        "final_norm.weight": _take(source, "model.norm.weight"),
    }
    if not config.tied_embeddings:
        taken["unembedding.weight"] = _take(source, "lm_head.weight")
    for layer in range(config.n_layers):
        theirs, ours = f"model.layers.{layer}", f"blocks.{layer}"
        taken[f"{ours}.norm1.weight"] = _take(source, f"{theirs}.input_layernorm.weight")
        taken[f"{ours}.norm2.weight"] = _take(source, f"{theirs}.post_attention_layernorm.weight")
        for part in ("weight", *(["bias"] if "qkv" in config.biases else [])):
            names = [f"{theirs}.self_attn.{letter}_proj.{part}" for letter in "qkv"]
            taken[f"{ours}.attention.qkv.{part}"] = _take(source, *names)
        for norm in ("q_norm", "k_norm") if config.qk_norm else ():
            taken[f"{ours}.attention.{norm}.weight"] = _take(source, f"{theirs}.self_attn.{norm}.weight")
        for part in ("weight", *(["bias"] if "attn_out" in config.biases else [])):
            taken[f"{ours}.attention.out.{part}"] = _take(source, f"{theirs}.self_attn.o_proj.{part}")
        for part in ("weight", *(["bias"] if "ffn" in config.biases else [])):
            names = [f"{theirs}.mlp.{half}_proj.{part}" for half in ("gate", "up")]
            taken[f"{ours}.ffn.gate_up.{part}"] = _take(source, *names)
            taken[f"{ours}.ffn.down.{part}"] = _take(source, f"{theirs}.mlp.down_proj.{part}")
    return taken


def _gpt2_config(config: Any, architecture: str) -> ModelConfig:
    fixed = {
        "scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False, "add_cross_attention": False,
    }  # fmt: skip
    _refuse(config, fixed, architecture)
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
    if config.activation_function not in activations:
        raise BridgeError(f"{architecture} with activation_function={config.activation_function!r} is not supported; "
                          f"allowed: {', '.join(activations)}")  # fmt: skip
    return ModelConfig(
        vocab=config.vocab_size, n_layers=config.n_layer, n_heads=config.n_head, d_model=config.n_embd,
        d_ff=config.n_inner or 4 * config.n_embd, n_ctx=config.n_positions, norm="layernorm",
        norm_eps=config.layer_norm_epsilon, ffn=activations[config.activation_function],  # type: ignore[arg-type]
        positions="learned", bias=True, tied_embeddings=bool(config.tie_word_embeddings),
    )  # fmt: skip


def _gpt2_weights(config: ModelConfig, source: dict[str, Tensor]) -> dict[str, Tensor]:
    """Ours by name; transformers' Conv1D stores [in out], ours is [out in]."""
    taken = {
        "embedding.weight": _take(source, "transformer.wte.weight"),
        "W_pos": _take(source, "transformer.wpe.weight"),
        "final_norm.weight": _take(source, "transformer.ln_f.weight"),
        "final_norm.bias": _take(source, "transformer.ln_f.bias"),
    }
    if not config.tied_embeddings:
        taken["unembedding.weight"] = _take(source, "lm_head.weight")
    places = {
        "ln_1": "norm1", "ln_2": "norm2", "attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out",
        "mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down",
    }  # fmt: skip
    for layer in range(config.n_layers):
        for theirs, ours in places.items():
            for part in ("weight", "bias"):
                tensor = _take(source, f"transformer.h.{layer}.{theirs}.{part}")
                turned = tensor.T.contiguous() if ".c_" in theirs and part == "weight" else tensor
                taken[f"blocks.{layer}.{ours}.{part}"] = turned
    return taken


def _take(source: dict[str, Tensor], *names: str) -> Tensor:
    """Remove the named tensors from `source`, their rows joined; `fill` makes the copy."""
    missing = [name for name in names if name not in source]
    if missing:
        raise BridgeError(f"the source lacks the weight {missing[0]!r} that its config asks for")
    found = [source.pop(name) for name in names]
    return torch.cat(found) if len(found) > 1 else found[0]


_CONVERTERS: dict[str, tuple[Callable[[Any, str], ModelConfig], Callable[..., dict[str, Tensor]]]] = {
    "LlamaForCausalLM": (_llama_config, _llama_weights),
    "MistralForCausalLM": (_llama_config, _llama_weights),
    "Qwen2ForCausalLM": (_llama_config, _llama_weights),
    "Qwen3ForCausalLM": (_llama_config, _llama_weights),
    "GPT2LMHeadModel": (_gpt2_config, _gpt2_weights),
}
