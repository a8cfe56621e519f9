"""Which sites a model has, in the order in which a forward pass reaches them; follows from the config alone."""

from __future__ import annotations

from interp.model.config import ModelConfig
from interp.sites import Site


def ordered_sites(config: ModelConfig) -> tuple[Site, ...]:
    """Every site of a model, in the order in which it is reached; an encoder-decoder's encoder first."""
    if config.kind != "encoder-decoder":
        return tuple(_stack_sites(config, None, config.head))
    encoder = _stack_sites(config.encoder, "encoder", head=False)
    if not config.final_norm:  # cross-attention reads the encoder's output at one place, normed or not
        encoder.append(Site("final", stack="encoder"))
    return (*encoder, *_stack_sites(config, "decoder", config.head))


def _stack_sites(config: ModelConfig, stack, head: bool) -> list[Site]:
    outer = ["embed", *(["pos_embed"] if config.positions in ("learned", "sinusoidal") else [])]
    names = _post_norm_names(config) if config.norm_position == "post" else _pre_norm_names(config)
    sites = [Site(name, None, stack) for name in outer]
    sites += [Site(name, layer, stack) for layer in range(config.n_layers) for name in names]
    outer = ["final_scale", "final_hat", "final"] if config.final_norm else []
    return sites + [Site(name, None, stack) for name in [*outer, *(["logits"] if head else [])]]


def _attention_names(config: ModelConfig) -> list[str]:
    rotated = ["q_rot", "k_rot"] if config.rotates else []
    return ["q", "k", "v", *rotated, "scores", "pattern", "z", "head_out", "attn_out"]


_CROSS = [f"cross_{name}" for name in ("q", "k", "v", "scores", "pattern", "z", "head_out", "out")]


def _pre_norm_names(config: ModelConfig) -> list[str]:
    names = ["resid_pre", *_inner(config, "norm1"), "norm1", *_attention_names(config)]
    middle = "resid_mid"
    if config.kind == "encoder-decoder":
        names += ["resid_mid", *_inner(config, "cross_norm"), "cross_norm", *_CROSS]
        middle = "resid_cross"
    if config.ffn != "none":
        names += [middle, *_inner(config, "norm2"), "norm2", *_ffn_names(config)]
    return [*names, "resid_post"]


def _post_norm_names(config: ModelConfig) -> list[str]:
    names, middle, norm = ["resid_pre", *_attention_names(config)], "resid_mid", "norm1"
    if config.kind == "encoder-decoder":
        names += ["resid_mid_sum", *_inner(config, "norm1"), "resid_mid", *_CROSS]
        middle, norm = "resid_cross", "cross_norm"
    if config.ffn != "none":
        names += [f"{middle}_sum", *_inner(config, norm), middle, *_ffn_names(config)]
        norm = "norm2"
    return [*names, "resid_post_sum", *_inner(config, norm), "resid_post"]


def _inner(config: ModelConfig, norm: str) -> list[str]:
    return [] if config.norm == "none" else [f"{norm}_scale", f"{norm}_hat"]


def _ffn_names(config: ModelConfig) -> list[str]:
    return ["ffn_pre", *(["ffn_up"] if config.gated else []), "ffn_act", "ffn_out"]
