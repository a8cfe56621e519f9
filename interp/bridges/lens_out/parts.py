"""What notebooks reach through a TransformerLens model besides hooks: its config, its blocks and its norms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from interp.bridges.lens_out.hooks import HookPoint, Registry
from interp.bridges.lens_out.names import UnknownHookError, check_name
from interp.model.tap import NO_TAP
from interp.model.transformer import Transformer

_ACTIVATIONS = {"gelu_tanh": "gelu_new", "swish": "silu", "swiglu": "silu", "geglu": "gelu", "reglu": "relu"}


@dataclass(eq=False)
class LensConfig:
    """TransformerLens's names of our config's values; device and dtype are the weights' at the moment of reading.

    default_prepend_bos is False, where TransformerLens has True: nothing is prepended unless asked. The use_… flags
    only say what a cache without a filter holds; a hook asked for by name always fires.
    """

    model: Transformer = field(repr=False)
    n_layers: int
    n_heads: int
    n_key_value_heads: int | None
    d_model: int
    d_head: int
    d_mlp: int
    d_vocab: int
    d_vocab_out: int
    n_ctx: int
    act_fn: str | None
    gated_mlp: bool
    attn_only: bool
    normalization_type: str | None
    final_rms: bool
    uses_rms_norm: bool
    eps: float
    positional_embedding_type: str
    rotary_dim: int | None
    rotary_base: float
    attn_scale: float
    attention_dir: str
    window_size: int | None
    use_local_attn: bool
    tie_word_embeddings: bool
    n_params: int
    model_name: str = "interp.Transformer"
    original_architecture: str = "interp.Transformer"
    tokenizer_name: str | None = None
    default_prepend_bos: bool = False
    use_attn_scale: bool = True
    parallel_attn_mlp: bool = False
    n_devices: int = 1
    use_attn_result: bool = False
    use_split_qkv_input: bool = False
    use_attn_in: bool = False
    use_hook_mlp_in: bool = False

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.model.device

    @property
    def dtype(self) -> torch.dtype:
        """The weights' floating-point type."""
        return self.model.dtype

    def to_dict(self) -> dict[str, Any]:
        """Every value by name."""
        values = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "model"}
        return {**values, "device": self.device, "dtype": self.dtype}


def lens_config(model: Transformer) -> LensConfig:
    """The TransformerLens view of a model's config."""
    c = model.config
    positions = {"learned": "standard", "sinusoidal": "standard"}.get(c.positions, c.positions)
    return LensConfig(
        model=model,
        n_layers=c.n_layers,
        n_heads=c.n_heads,
        n_key_value_heads=None if c.kv_heads == c.n_heads else c.kv_heads,
        d_model=c.d_model,
        d_head=c.head_size,
        d_mlp=c.ffn_size,
        d_vocab=c.vocab,
        d_vocab_out=c.vocab,
        n_ctx=c.n_ctx,
        act_fn=None if c.ffn == "none" else _ACTIVATIONS.get(c.ffn, c.ffn),
        gated_mlp=c.gated,
        attn_only=c.ffn == "none",
        normalization_type={"layernorm": "LN", "rmsnorm": "RMS", "none": None}[c.norm],
        final_rms=c.norm == "rmsnorm",
        uses_rms_norm=c.norm == "rmsnorm",
        eps=c.norm_eps,
        positional_embedding_type=positions,
        rotary_dim=c.rotary_dims or None,
        rotary_base=c.rotary_base,
        attn_scale=1 / c.attention_scale,  # type: ignore[operator]  # TransformerLens divides by it
        attention_dir={"decoder": "causal", "encoder": "bidirectional"}.get(c.kind, c.kind),
        window_size=c.window,
        use_local_attn=c.window is not None,
        tie_word_embeddings=c.tied_embeddings,
        n_params=sum(parameter.numel() for parameter in model.parameters()),
    )


def hook_point(registry: Registry, prefix: str, name: str) -> HookPoint:
    """The hook point `prefix.name`, as an attribute: AttributeError when the model has none."""
    full = f"{prefix}.{name}" if prefix else name
    try:
        return registry.points[check_name(full, registry.places)]
    except UnknownHookError as error:
        raise AttributeError(str(error)) from None


class LensNorm(nn.Module):
    """One of our norms as TransformerLens calls it: norm(x [… d_model]) -> same shape; `w`, `b` (None when absent)."""

    def __init__(self, norm: nn.Module | None, prefix: str, registry: Registry) -> None:
        super().__init__()
        self._held = (norm,)  # in a tuple: the norm stays a part of the model alone
        self._prefix, self._registry = prefix, registry

    def forward(self, x: Tensor) -> Tensor:
        norm = self._held[0]
        return x if norm is None else norm(x, NO_TAP)

    @property
    def weight(self) -> Tensor | None:
        """The gain [d_model]."""
        return getattr(self._held[0], "weight", None)

    @property
    def bias(self) -> Tensor | None:
        """The offset [d_model]."""
        return getattr(self._held[0], "bias", None)

    w = weight
    b = bias

    def __getattr__(self, name: str) -> Any:
        if name.startswith("hook_"):
            return hook_point(self._registry, self._prefix, name)
        return super().__getattr__(name)


class LensPart:
    """One component under its TransformerLens name: weights as attributes, hook points as `hook_…`."""

    def __init__(self, prefix: str, registry: Registry, read: dict[str, Callable[[], Any]], call: Any = None) -> None:
        self._prefix, self._registry, self._read, self._call = prefix, registry, read, call

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)  # copying and pickling ask before __init__ has run
        if name.startswith("hook_"):
            return hook_point(self._registry, self._prefix, name)
        if name not in self._read:
            raise AttributeError(f"{self._prefix} has no {name!r}; it has {', '.join(self._read)} and hook points")
        return self._read[name]()

    def __call__(self, x: Tensor) -> Tensor:
        if self._call is None:
            raise TypeError(f"{self._prefix} cannot be called by itself; run the model with hooks")
        return self._call(x)

    def __repr__(self) -> str:
        return f"{self._prefix}({', '.join(self._read)})"

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of what it holds."""
        return tuple(self._read)


def lens_block(model: Transformer, layer: int, registry: Registry) -> LensPart:
    """`blocks[layer]` with `.attn`, `.mlp`, `.ln1`, `.ln2`; absent biases are zeros, as TransformerLens has them."""
    block: Any = model.blocks[layer]
    prefix, c = f"blocks.{layer}", model.config

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(*shape, device=model.device, dtype=model.dtype)

    def weight(name: str, *shape: int) -> Callable[[], Tensor]:
        def read() -> Tensor:
            found = model.weight(name, layer)
            return zeros(*shape) if found is None else found

        return read

    head = {"b_Q": (c.n_heads, c.head_size), "b_K": (c.kv_heads, c.head_size), "b_V": (c.kv_heads, c.head_size)}
    attention = {name: weight(name) for name in ("W_Q", "W_K", "W_V", "W_O")}
    attention |= {name: weight(name, *shape) for name, shape in head.items()} | {"b_O": weight("b_O", c.d_model)}
    attn = LensPart(f"{prefix}.attn", registry, attention)
    parts: dict[str, Any] = {"attn": attn, "ln1": LensNorm(block.norm1, f"{prefix}.ln1", registry)}
    if block.ffn is not None:
        names = ("W_in", "W_gate", "W_out") if c.gated else ("W_in", "W_out")
        ffn = {name: weight(name) for name in names}
        ffn |= {"b_in": weight("b_in", c.ffn_size), "b_out": weight("b_out", c.d_model)}
        if c.gated:
            ffn["b_gate"] = weight("b_gate", c.ffn_size)
        parts["mlp"] = LensPart(f"{prefix}.mlp", registry, ffn, lambda x: block.ffn(x, NO_TAP))
        parts["ln2"] = LensNorm(block.norm2, f"{prefix}.ln2", registry)
    return LensPart(prefix, registry, {name: (lambda part=part: part) for name, part in parts.items()})
