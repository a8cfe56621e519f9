"""Which sites a model has, in the order in which a forward pass reaches them; follows from the config alone."""

from __future__ import annotations

from interp.model.config import ModelConfig
from interp.sites import Site


def ordered_sites(config: ModelConfig) -> tuple[Site, ...]:
    """Every site of a single-stack model, in the order in which it is reached."""
    sites = [Site("embed")]
    if config.positions in ("learned", "sinusoidal"):
        sites.append(Site("pos_embed"))
    names = _block_names(config)
    sites += [Site(name, layer) for layer in range(config.n_layers) for name in names]
    if config.final_norm:
        sites += [Site("final_scale"), Site("final_hat"), Site("final")]
    return (*sites, Site("logits")) if config.head else tuple(sites)


def _block_names(config: ModelConfig) -> list[str]:
    attention = ["q", "k", "v"]
    attention += ["q_rot", "k_rot"] if config.rotates else []
    attention += ["scores", "pattern", "z", "head_out", "attn_out"]
    if config.norm_position == "post":
        return _post_norm_names(config, attention)
    names = ["resid_pre", *_inner(config, 1), "norm1", *attention]
    if config.ffn != "none":
        names += ["resid_mid", *_inner(config, 2), "norm2", *_ffn_names(config)]
    return [*names, "resid_post"]


def _post_norm_names(config: ModelConfig, attention: list[str]) -> list[str]:
    if config.ffn == "none":
        return ["resid_pre", *attention, "resid_post_sum", *_inner(config, 1), "resid_post"]
    names = ["resid_pre", *attention, "resid_mid_sum", *_inner(config, 1), "resid_mid", *_ffn_names(config)]
    return [*names, "resid_post_sum", *_inner(config, 2), "resid_post"]


def _inner(config: ModelConfig, number: int) -> list[str]:
    return [] if config.norm == "none" else [f"norm{number}_scale", f"norm{number}_hat"]


def _ffn_names(config: ModelConfig) -> list[str]:
    return ["ffn_pre", *(["ffn_up"] if config.gated else []), "ffn_act", "ffn_out"]
