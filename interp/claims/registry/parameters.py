"""F1: where a transformer's parameters are, by arithmetic on the sizes of published models and of our own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from interp.claims.claim import Claim, Hypothesis, Reading, Study, Tables
from interp.model.config import ModelConfig
from interp.plots.claims import parameter_shares
from interp.tasks import TASKS

_GPT2 = {"vocab": 50257, "n_ctx": 1024, "ffn": "gelu_tanh", "tied_embeddings": True}
_PYTHIA = {"vocab": 50304, "n_ctx": 2048, "ffn": "gelu", "positions": "rotary", "rotary_fraction": 0.25}
_LLAMA = {"norm": "rmsnorm", "ffn": "swiglu", "positions": "rotary", "bias": False}
_BERT = {"kind": "encoder", "vocab": 30522, "n_ctx": 512, "norm_position": "post", "ffn": "gelu", "n_segments": 2,
         "embedding_norm": True, "tied_embeddings": True}  # fmt: skip
_T5 = {"kind": "encoder-decoder", "vocab": 32128, "n_ctx": 512, "norm": "rmsnorm", "positions": "none", "bias": False,
       "tied_embeddings": True, "d_head": 64}  # fmt: skip


def _sizes(layers: int, d_model: int, heads: int, family: Mapping[str, Any], **more: Any) -> ModelConfig:
    return ModelConfig(n_layers=layers, d_model=d_model, n_heads=heads, **{**family, **more})


PUBLISHED: dict[str, ModelConfig] = {
    "GPT-2 small": _sizes(12, 768, 12, _GPT2),
    "GPT-2 medium": _sizes(24, 1024, 16, _GPT2),
    "GPT-2 large": _sizes(36, 1280, 20, _GPT2),
    "GPT-2 XL": _sizes(48, 1600, 25, _GPT2),
    "Pythia-70M": _sizes(6, 512, 8, _PYTHIA),
    "Pythia-160M": _sizes(12, 768, 12, _PYTHIA),
    "Pythia-410M": _sizes(24, 1024, 16, _PYTHIA),
    "Pythia-1B": _sizes(16, 2048, 8, _PYTHIA),
    "Pythia-6.9B": _sizes(32, 4096, 32, _PYTHIA, vocab=50432),
    "LLaMA-7B": _sizes(32, 4096, 32, _LLAMA, vocab=32000, n_ctx=2048, d_ff=11008),
    "Llama-3-8B": _sizes(32, 4096, 32, _LLAMA, vocab=128256, n_ctx=8192, d_ff=14336, n_kv_heads=8),
    "Mistral-7B": _sizes(32, 4096, 32, _LLAMA, vocab=32000, n_ctx=8192, d_ff=14336, n_kv_heads=8),
    "SmolLM2-135M": _sizes(30, 576, 9, _LLAMA, vocab=49152, n_ctx=8192, d_ff=1536, n_kv_heads=3, tied_embeddings=True),
    "Qwen2-0.5B": _sizes(24, 896, 14, _LLAMA, vocab=151936, n_ctx=32768, d_ff=4864, n_kv_heads=2, bias=frozenset({"qkv"}),
                         tied_embeddings=True),
    "BERT-base": _sizes(12, 768, 12, _BERT),
    "BERT-large": _sizes(24, 1024, 16, _BERT),
    "T5-small": _sizes(6, 512, 8, _T5, d_ff=2048),
    "T5-base": _sizes(12, 768, 12, _T5, d_ff=3072),
}  # fmt: skip
"""Sizes as in the models' published configs. Not counted: BERT's pooler and task heads, T5's 512 or 768 relative-position biases,
and the few thousand rotary tables and masks that some checkpoints store."""


def count_parameters(config: ModelConfig) -> dict[str, int]:
    """Parameters per group of a model of these sizes, without making it: embeddings (token, position, segment and unembedding;
    tied ones once), attention, ffn, norms."""
    d, inner, grouped = config.d_model, config.n_heads * config.head_size, config.kv_heads * config.head_size
    biased = config.biases
    attention = d * (inner + 2 * grouped) + inner * d
    attention += (inner + 2 * grouped) * ("qkv" in biased) + d * ("attn_out" in biased)
    into = 2 if config.gated else 1  # matrices that read the stream
    ffn = (into + 1) * d * config.ffn_size
    ffn += (into * config.ffn_size + d) * ("ffn" in biased and config.ffn != "none")
    crosses = config.kind == "encoder-decoder"
    behind = config.n_encoder_layers or 0
    blocks = config.n_layers + behind
    attentions = blocks + config.n_layers * crosses
    stacks = 1 + crosses
    norm = d * {"layernorm": 2, "rmsnorm": 1, "none": 0}[config.norm]
    norms = norm * (
        attentions + blocks * (config.ffn != "none") + stacks * (bool(config.final_norm) + config.embedding_norm)
    )
    norms += config.qk_norm * 2 * config.head_size * blocks + (config.swish_beta == "learned") * blocks
    tables = config.vocab * (1 + (config.head and not config.tied_embeddings)) + config.n_segments
    tables += config.n_ctx * (config.positions == "learned")
    embeddings = d * tables + config.vocab * ("unembed" in biased)
    return {"embeddings": embeddings, "attention": attentions * attention, "ffn": blocks * ffn, "norms": norms}


def measure(config: Mapping[str, Any], scratch: Path) -> pd.DataFrame:
    """One row per model: seed (0, nothing is drawn), model, origin ("published", "toy", "no FFN"), the groups' parameters, total,
    share_blocks (the FFNs' of all but embeddings) and share (of all)."""
    toys: dict[str, ModelConfig] = {}
    for name, make in TASKS.items():
        sizes = make().model_config()
        if sizes not in toys.values():  # tasks that share a model count once
            toys[f"toy {name}"] = sizes
    rows = [_row(name, "published", PUBLISHED[name]) for name in config["published"]]
    rows += [_row(name, "no FFN" if sizes.ffn == "none" else "toy", sizes) for name, sizes in toys.items()]
    return pd.DataFrame(rows)


def _row(name: str, origin: str, config: ModelConfig) -> dict[str, Any]:
    counts = count_parameters(config)
    total = sum(counts.values())
    shares = {"share_blocks": counts["ffn"] / (total - counts["embeddings"]), "share": counts["ffn"] / total}
    return {"seed": 0, "model": name, "origin": origin, **counts, "total": total, **shares}


def blocks(tables: Tables) -> Reading:
    """F1.blocks."""
    return above_half(tables, "share_blocks")


def total(tables: Tables) -> Reading:
    """F1.total."""
    return above_half(tables, "share")


def above_half(tables: Tables, share: str) -> Reading:
    """Whether a share is above one half in every model that has FFNs; the estimate is the median, the interval the range."""
    rows = tables["F1"]
    rows = rows[rows["origin"] != "no FFN"]
    values, n = rows[share].to_numpy(dtype=float), len(rows)
    above = values > 0.5
    lowest = rows["model"].iloc[int(np.argmin(values))]
    note = f"above one half in {int(above.sum())} of {n} models; lowest in {lowest}; median and range"
    says = "supported" if bool(above.all()) else "refuted"
    return Reading(says, float(np.median(values)), float(values.min()), float(values.max()), n, None, note)


def shown(tables: Tables) -> pd.DataFrame:
    """Model, parameters and both shares."""
    return tables["F1"][["model", "origin", "total", "share_blocks", "share"]]


def figure(tables: Tables) -> Any:
    """Both shares of every model."""
    return parameter_shares(tables["F1"])


PROFILE_UNITS = {profile: {"all": {"published": list(PUBLISHED)}} for profile in ("quick", "standard", "full")}
STUDIES = (
    Study("F1", "Which share of the parameters is the FFNs'?", measure, PROFILE_UNITS,
          dict.fromkeys(("quick", "standard", "full"), 0.1)),
)  # fmt: skip
_COMMON: dict[str, Any] = {
    "unit": "of the parameters",
    "null": "None: it is arithmetic.",
    "statistic": "The range over models; n counts models.",
    "studies": ("F1",),
    "figure": figure,
    "shown": shown,
    "scope": f"{len(PUBLISHED)} published models of 70 million to 8 billion parameters and the default models of our tasks; "
    "models without FFNs are listed and not counted",
}
CLAIMS = (
    Claim(
        id="F1",
        sentence="FFNs hold most of a transformer's parameters.",
        source="7.22 and the default d_ff = 4 d",
        overall=False,  # what counts as a transformer's parameters decides: two readings, two verdicts
        hypotheses=(
            Hypothesis(
                id="F1.blocks", rule=blocks, **_COMMON,
                quantity="The FFNs' share of all parameters but embeddings and unembedding.",
                prediction="It is above one half in every model.",
                falsified="A model with FFNs in which it is one half or less.",
            ),
            Hypothesis(
                id="F1.total", rule=total, **_COMMON,
                quantity="The FFNs' share of all parameters, embeddings and unembedding included (tied ones once).",
                prediction="It is above one half in every model.",
                falsified="A model with FFNs in which it is one half or less.",
            ),
        ),
    ),
)  # fmt: skip
