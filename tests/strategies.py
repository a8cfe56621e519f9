"""Random valid models and inputs: hypothesis strategies, and helpers that need no hypothesis."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from hypothesis import strategies as st

from interp.model import Inputs, ModelConfig, Transformer

VOCAB, N_CTX = 9, 8
FFNS = ("relu", "gelu", "gelu_tanh", "swish", "swiglu", "geglu", "reglu", "bilinear", "none")
BIAS_PLACES = ("qkv", "attn_out", "ffn", "unembed")
LLAMA3 = {"type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_n_ctx": 64}


@dataclass(frozen=True)
class Case:
    """One model and one batch: the choices given to ModelConfig, what the batch looks like, and a seed."""

    choices: dict[str, Any]
    padding: tuple[tuple[int, int], ...] = ((0, 0), (0, 0))  # of each sequence: how much on the left, on the right
    prefixes: tuple[int, ...] | None = None
    segments: bool = False
    length: int = 5
    seed: int = 0
    source_padding: tuple[tuple[int, int], ...] | None = None  # of each source, as `padding`; None: all real
    source_length: int = 4
    dtype: torch.dtype = field(default=torch.float64)

    def build(self) -> tuple[Transformer, Inputs]:
        """The model with every parameter random, and the batch."""
        model = random_model(self.choices, self.seed, self.dtype)
        generator = torch.Generator().manual_seed(self.seed)
        shape = (len(self.padding), self.length)
        segments = torch.randint(model.config.n_segments, shape, generator=generator) if self.segments else None
        inputs = Inputs(
            torch.randint(VOCAB, shape, generator=generator),
            mask=real_positions(self.padding, self.length),
            prefix_length=None if self.prefixes is None else torch.tensor(self.prefixes),
            segments=segments,
        )
        if model.config.kind != "encoder-decoder":
            return model, inputs
        source = torch.randint(VOCAB, (len(self.padding), self.source_length), generator=generator)
        padding = self.source_padding or ((0, 0),) * len(self.padding)
        return model, replace(inputs, source=source, source_mask=real_positions(padding, self.source_length))


def real_positions(padding: tuple[tuple[int, int], ...], length: int) -> torch.Tensor | None:
    """The mask of sequences padded so much on the left and on the right; None when nothing is padding."""
    mask = torch.zeros(len(padding), length, dtype=torch.bool)
    for row, (left, right) in enumerate(padding):
        mask[row, left : length - right] = True
    return None if bool(mask.all()) else mask


def small(**choices: Any) -> dict[str, Any]:
    """The choices of a small model: two layers, two heads, width 8."""
    return {"vocab": VOCAB, "n_layers": 2, "n_heads": 2, "d_model": 8, "n_ctx": N_CTX, "d_ff": 7, **choices}


def translator(**choices: Any) -> dict[str, Any]:
    """The choices of a small encoder-decoder with stacks of unequal depth."""
    return small(**{"kind": "encoder-decoder", "n_layers": 2, "n_encoder_layers": 1, **choices})


def random_model(choices: dict[str, Any], seed: int = 0, dtype: torch.dtype = torch.float64) -> Transformer:
    """A model of these choices whose every parameter, also gains, offsets, biases and β, is random."""
    model = Transformer(ModelConfig(**choices), seed=None).to(dtype)  # filled below
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 1.0 if parameter.ndim < 2 else 1.5 / parameter.shape[1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * spread)
    return model.eval()


@st.composite
def choices(draw: Any) -> dict[str, Any]:
    """Keyword arguments of a valid ModelConfig, over every kind and option."""
    norm = draw(st.sampled_from(["layernorm", "rmsnorm", "none"]))
    positions = draw(st.sampled_from(["learned", "sinusoidal", "rotary", "none"]))
    ffn = draw(st.sampled_from(FFNS))
    head = draw(st.booleans())
    n_heads = draw(st.sampled_from([1, 2, 4]))
    places = BIAS_PLACES if head else BIAS_PLACES[:3]
    kind = draw(st.sampled_from(["decoder", "encoder", "prefix-decoder", "encoder-decoder"] * 2 + ["encoder-decoder"]))
    out: dict[str, Any] = {
        "kind": kind,
        "vocab": VOCAB,
        "n_ctx": N_CTX,
        "n_layers": draw(st.integers(1, 2)),
        "n_heads": n_heads,
        "n_kv_heads": draw(st.sampled_from([None] + [n for n in (1, 2, 4) if n_heads % n == 0])),
        "d_model": draw(st.sampled_from([8, 12])),
        "d_head": draw(st.sampled_from([4, 6])),
        "d_ff": draw(st.sampled_from([None, 5])),
        "norm": norm,
        "norm_position": "pre" if norm == "none" else draw(st.sampled_from(["pre", "post"])),
        "norm_eps": draw(st.sampled_from([0, 1e-5, 0.1])),
        "final_norm": None if norm == "none" else draw(st.sampled_from([None, True, False])),
        "ffn": ffn,
        "positions": positions,
        "bias": draw(st.one_of(st.booleans(), st.sets(st.sampled_from(places)).map(frozenset))),
        "qk_norm": draw(st.booleans()),
        "window": draw(st.sampled_from([None, 1, 2, 3])),
        "embedding_norm": norm != "none" and draw(st.booleans()),
        "n_segments": 0 if kind == "encoder-decoder" else draw(st.sampled_from([0, 0, 3])),
        "tied_embeddings": head and draw(st.booleans()),
        "attention_scale": draw(st.sampled_from([None, None, 1.0, 0.3])),
        "head": head,
    }
    if kind == "encoder-decoder":
        out["n_encoder_layers"] = draw(st.sampled_from([None, 1, 2, 3]))
    if ffn in ("swish", "swiglu"):
        out["swish_beta"] = draw(st.sampled_from([1.0, 1.7, "learned"]))
    if positions == "rotary":
        out["rotary_base"] = draw(st.sampled_from([10000.0, 37.0]))
        out["rotary_fraction"] = draw(st.sampled_from([1.0, 4 / out["d_head"]]))
        out["rotary_scaling"] = draw(st.sampled_from([None, {"type": "linear", "factor": 2.5}, LLAMA3]))
    return out


@st.composite
def cases(draw: Any) -> Case:
    """A valid model with a batch of two: padded left, right, on both sides or not, with prefixes and segments."""
    chosen = draw(choices())
    padding = draw(st.sampled_from([((0, 0), (0, 0)), ((0, 0), (2, 0)), ((3, 0), (0, 2)), ((0, 4), (1, 1))]))
    prefixes, source = None, {}
    if chosen["kind"] == "prefix-decoder":
        prefixes = draw(st.sampled_from([None, (0, 2), (3, 1), (5, 7)]))
    if chosen["kind"] == "encoder-decoder":
        source["source_padding"] = draw(st.sampled_from([None, ((0, 0), (2, 0)), ((0, 3), (1, 0)), ((1, 1), (0, 1))]))
        source["source_length"] = draw(st.sampled_from([4, 5, 7]))
    segments = chosen["n_segments"] > 0 and draw(st.booleans())
    return Case(chosen, padding, prefixes, segments, seed=draw(st.integers(0, 1000)), **source)
