"""ModelConfig: every choice that defines a model, checked when it is made."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

Kind = Literal["decoder", "encoder", "prefix-decoder", "encoder-decoder"]
Norm = Literal["layernorm", "rmsnorm", "none"]
NormPosition = Literal["pre", "post"]
FFN = Literal["relu", "gelu", "gelu_tanh", "swish", "swiglu", "geglu", "reglu", "bilinear", "none"]
Positions = Literal["learned", "sinusoidal", "rotary", "none"]

GATED = ("swiglu", "geglu", "reglu", "bilinear")
BIAS_PLACES = ("qkv", "attn_out", "ffn", "unembed")
DEFAULT_BIAS = frozenset({"qkv", "attn_out", "ffn"})
ROPE_SCALINGS = {
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_n_ctx"},
}


class ConfigError(ValueError):
    """A config that contradicts itself or asks for what the model cannot express."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Everything that defines a model's function except its weights.

    Defaults are the textbook's: pre-norm, LayerNorm, ReLU feed-forward with d_ff = 4 d, learned positions.

    vocab, n_layers, n_heads, d_model, n_ctx: sizes. d_ff: 4 d by default; for a gated FFN 8d/3 rounded, which
    matches the parameters. d_head: d_model / n_heads. n_kv_heads: n_heads (fewer = grouped keys and values).
    norm_eps: ε inside the root; 0 gives equations 7.23-7.26 exactly. final_norm: pre-norm yes, post-norm no.
    swish_beta: β of 7.21 for "swish" and "swiglu", a float or "learned" (one per layer). rotary_base,
    rotary_fraction (share of d_head rotated), rotary_scaling ({"type": "linear" | "llama3", …}).
    bias: True = {"qkv", "attn_out", "ffn"}, False = none, or a set of those and "unembed"; a norm's offset belongs
    to the norm. qk_norm: RMSNorm of each head's q and k. window: a query sees keys less than this
    far away (a decoder: at most this many last ones, itself included; a prefix is seen regardless).
    embedding_norm: a norm between embeddings and the first block. kind "encoder-decoder": both stacks share the token
    and position embeddings; n_encoder_layers: n_layers; rotary, q/k norm and window are self-attention's, cross-attention
    has none of them; final_norm gives both stacks one. n_segments: segment embeddings, 0 = none.
    attention_scale: factor on q·k, default 1/sqrt(d_head). head: False leaves out the unembedding.
    Raises ConfigError naming the value and what is allowed.
    """

    kind: Kind = "decoder"
    vocab: int
    n_layers: int
    n_heads: int
    d_model: int
    n_ctx: int
    d_ff: int | None = None
    d_head: int | None = None
    n_kv_heads: int | None = None
    n_encoder_layers: int | None = None
    norm: Norm = "layernorm"
    norm_position: NormPosition = "pre"
    norm_eps: float = 1e-5
    final_norm: bool | None = None
    ffn: FFN = "relu"
    swish_beta: float | Literal["learned"] = 1.0
    positions: Positions = "learned"
    rotary_base: float = 10000.0
    rotary_fraction: float = 1.0
    rotary_scaling: dict[str, Any] | None = None
    bias: bool | frozenset[str] = True
    qk_norm: bool = False
    window: int | None = None
    embedding_norm: bool = False
    n_segments: int = 0
    tied_embeddings: bool = False
    attention_scale: float | None = None
    head: bool = True

    def __post_init__(self) -> None:
        for name, allowed in _CHOICES.items():
            _require(
                getattr(self, name) in allowed, name, getattr(self, name), "one of " + ", ".join(map(repr, allowed))
            )
        for name in ("vocab", "n_layers", "n_heads", "d_model", "n_ctx"):
            _require(
                _is_int(getattr(self, name)) and getattr(self, name) > 0, name, getattr(self, name), "an integer > 0"
            )
        for name in ("d_ff", "d_head", "n_kv_heads", "n_encoder_layers", "window"):
            value = getattr(self, name)
            _require(value is None or (_is_int(value) and value > 0), name, value, "an integer > 0 or None")
        for name in ("qk_norm", "embedding_norm", "tied_embeddings", "head"):
            _require(isinstance(getattr(self, name), bool), name, getattr(self, name), "True or False")
        _require(
            self.final_norm is None or isinstance(self.final_norm, bool),
            "final_norm",
            self.final_norm,
            "True, False or None",
        )
        _require(_is_int(self.n_segments) and self.n_segments >= 0, "n_segments", self.n_segments, "an integer >= 0")
        self._resolve_defaults()
        self._check_numbers()
        self._check_contradictions()

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # the dataclass is frozen for everyone else

    def _resolve_defaults(self) -> None:
        if self.n_kv_heads is None:
            self._set("n_kv_heads", self.n_heads)
        if self.d_head is None:
            ok = self.d_model % self.n_heads == 0
            _require(ok, "n_heads", self.n_heads, f"a divisor of d_model={self.d_model}, or give d_head")
            self._set("d_head", self.d_model // self.n_heads)
        if self.d_ff is None:
            self._set("d_ff", round(8 * self.d_model / 3) if self.gated else 4 * self.d_model)
        if self.final_norm is None:
            self._set("final_norm", self.norm_position == "pre" and self.norm != "none")
        if self.kind == "encoder-decoder" and self.n_encoder_layers is None:
            self._set("n_encoder_layers", self.n_layers)
        if isinstance(self.bias, bool):
            self._set("bias", DEFAULT_BIAS if self.bias else frozenset())
        else:
            places = self.bias if isinstance(self.bias, frozenset | set | list | tuple) else [self.bias]
            ok = all(isinstance(place, str) and place in BIAS_PLACES for place in places)
            ok = ok and not isinstance(self.bias, str)
            _require(ok, "bias", self.bias, "True, False or a set of " + ", ".join(map(repr, BIAS_PLACES)))
            self._set("bias", frozenset(self.bias))
        if self.attention_scale is None:
            self._set("attention_scale", 1 / math.sqrt(self.head_size))

    def _check_numbers(self) -> None:
        _require(_is_number(self.norm_eps) and self.norm_eps >= 0, "norm_eps", self.norm_eps, "a number >= 0")
        _require(_is_number(self.attention_scale) and self.attention_scale != 0, "attention_scale", self.attention_scale,
                 "a finite number, not 0")  # fmt: skip
        _require(self.swish_beta == "learned" or _is_number(self.swish_beta), "swish_beta", self.swish_beta,
                 "a number or 'learned'")  # fmt: skip
        _require(_is_number(self.rotary_base) and self.rotary_base > 0, "rotary_base", self.rotary_base, "a number > 0")
        fraction = self.rotary_fraction
        _require(_is_number(fraction) and 0 < fraction <= 1, "rotary_fraction", fraction, "a number in (0, 1]")
        if self.rotary_scaling is not None:
            kind = self.rotary_scaling.get("type") if isinstance(self.rotary_scaling, dict) else None
            kind = kind if isinstance(kind, str) else None
            allowed = " or ".join(f"{{'type': {k!r}, {', '.join(sorted(v))}}}" for k, v in ROPE_SCALINGS.items())
            ok = kind in ROPE_SCALINGS and set(self.rotary_scaling) == {"type"} | ROPE_SCALINGS[kind]
            _require(ok, "rotary_scaling", self.rotary_scaling, f"None, {allowed}")
            self._set("rotary_scaling", dict(self.rotary_scaling))  # the caller's dict stays the caller's
            numbers = {name: value for name, value in self.rotary_scaling.items() if name != "type"}
            ok = all(_is_number(value) and value > 0 for value in numbers.values())
            _require(ok, "rotary_scaling", self.rotary_scaling, "numbers > 0")
            if kind == "llama3":
                ok = numbers["low_freq_factor"] < numbers["high_freq_factor"]
                _require(ok, "rotary_scaling", self.rotary_scaling, "low_freq_factor < high_freq_factor")

    def _check_contradictions(self) -> None:
        _require(
            self.n_heads % self.kv_heads == 0, "n_kv_heads", self.n_kv_heads, f"a divisor of n_heads={self.n_heads}"
        )
        if self.positions == "rotary":
            n = self.rotary_dims
            _require(n > 0 and n % 2 == 0, "rotary_fraction", self.rotary_fraction,
                     f"one that rotates an even number of the d_head={self.d_head} entries, this rotates {n}")  # fmt: skip
        else:
            _require(
                self.rotary_scaling is None, "rotary_scaling", self.rotary_scaling, "None unless positions='rotary'"
            )
            _require(
                self.rotary_fraction == 1.0, "rotary_fraction", self.rotary_fraction, "1.0 unless positions='rotary'"
            )
        if self.positions == "sinusoidal":
            _require(self.d_model % 2 == 0, "d_model", self.d_model, "even for positions='sinusoidal'")
        if self.swish_beta != 1.0:
            _require(self.ffn in ("swish", "swiglu"), "swish_beta", self.swish_beta, f"1.0 for ffn={self.ffn!r}")
        if self.norm == "none":
            _require(not self.final_norm, "final_norm", self.final_norm, "False or None for norm='none'")
            _require(not self.embedding_norm, "embedding_norm", self.embedding_norm, "False for norm='none'")
            _require(self.norm_position == "pre", "norm_position", self.norm_position, "'pre' for norm='none'")
        if not self.head:
            _require(not self.tied_embeddings, "tied_embeddings", self.tied_embeddings, "False for head=False")
            _require("unembed" not in self.biases, "bias", set(self.biases), "a set without 'unembed' for head=False")
        if self.kind == "encoder-decoder":
            _require(self.n_segments == 0, "n_segments", self.n_segments, "0 for kind='encoder-decoder'")
        else:
            _require(self.n_encoder_layers is None, "n_encoder_layers", self.n_encoder_layers,
                     f"None for kind={self.kind!r}")  # fmt: skip

    # The optional fields once resolved, with their plain types.
    @property
    def head_size(self) -> int:
        """d_head, resolved."""
        assert self.d_head is not None
        return self.d_head

    @property
    def kv_heads(self) -> int:
        """n_kv_heads, resolved."""
        assert self.n_kv_heads is not None
        return self.n_kv_heads

    @property
    def ffn_size(self) -> int:
        """d_ff, resolved (0 when there is no FFN)."""
        assert self.d_ff is not None
        return 0 if self.ffn == "none" else self.d_ff

    @property
    def biases(self) -> frozenset[str]:
        """The places that have a bias."""
        assert not isinstance(self.bias, bool)
        return self.bias

    @property
    def gated(self) -> bool:
        """Whether the FFN multiplies two linear maps of its input (7.22)."""
        return self.ffn in GATED

    @property
    def rotary_dims(self) -> int:
        """How many entries of each head's q and k are rotated."""
        return round(self.head_size * self.rotary_fraction) if self.positions == "rotary" else 0

    @property
    def rotates(self) -> bool:
        """Whether q and k change between their projections and the scores (rotary or q/k norm)."""
        return self.positions == "rotary" or self.qk_norm

    @property
    def encoder(self) -> ModelConfig:
        """The encoder of an encoder-decoder as a config of its own: the same block, every edge."""
        return dataclasses.replace(self, kind="encoder", n_layers=self.n_encoder_layers, n_encoder_layers=None)  # type: ignore[arg-type]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; `from_dict` reads them back."""
        values = dataclasses.asdict(self)
        values["bias"] = sorted(self.biases)
        return values

    @staticmethod
    def from_dict(values: dict[str, Any]) -> ModelConfig:
        """A config from `to_dict`'s values; ConfigError for unknown or missing fields."""
        known = {field.name for field in dataclasses.fields(ModelConfig)}
        unknown = sorted(set(values) - known)
        _require(not unknown, "config", unknown, "fields among " + ", ".join(sorted(known)))
        missing = [name for name in ("vocab", "n_layers", "n_heads", "d_model", "n_ctx") if name not in values]
        _require(not missing, "config", sorted(values), f"one that also gives {', '.join(missing)}")
        if isinstance(values.get("bias"), list):
            values = {**values, "bias": frozenset(values["bias"])}
        return ModelConfig(**values)

    def __hash__(self) -> int:
        values = (getattr(self, field.name) for field in dataclasses.fields(self))
        return hash(tuple(tuple(sorted(value.items())) if isinstance(value, dict) else value for value in values))


_CHOICES: dict[str, tuple[str, ...]] = {
    "kind": get_args(Kind),
    "norm": get_args(Norm),
    "norm_position": get_args(NormPosition),
    "ffn": get_args(FFN),
    "positions": get_args(Positions),
}


def _require(ok: bool, name: str, value: Any, allowed: str) -> None:
    if not ok:
        raise ConfigError(f"{name}={value!r} is not allowed; allowed: {allowed}")


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
