"""TransformerLens's hook names of our sites, and the places that only TransformerLens has."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from interp.model.config import ModelConfig
from interp.model.transformer import Transformer
from interp.sites import Site, UnknownSiteError, suggest

Part = Literal["attn", "q", "k", "v", "mlp"]


class UnknownHookError(UnknownSiteError, KeyError):
    """A hook name that this model does not have; also a KeyError, which TransformerLens raises here."""

    def __str__(self) -> str:
        return str(self.args[0])  # KeyError would print the message's repr


@dataclass(frozen=True)
class Fork:
    """A reader's own copy of the stream before its norm, which TransformerLens can patch alone.

    part: who reads it: "q", "k", "v" (one copy per head), "attn" (the three together), "mlp".
    """

    part: Part
    layer: int


Place = Site | Fork

FORK_NAMES: dict[str, tuple[str, ...]] = {
    "attn": ("hook_attn_in", "attn.hook_attn_in"),
    "q": ("hook_q_input", "attn.hook_q_input"),
    "k": ("hook_k_input", "attn.hook_k_input"),
    "v": ("hook_v_input", "attn.hook_v_input"),
    "mlp": ("hook_mlp_in",),
}
_FORKS_AFTER: dict[str, tuple[Part, ...]] = {"resid_pre": ("attn", "q", "k", "v"), "resid_mid": ("mlp",)}

# TransformerLens 4's names, relative to the block, beside the 3.x one in `interp.sites`.
_OUTSIDE = {
    "embed": ("embed.hook_out",),
    "pos_embed": ("pos_embed.hook_out",),
    "final": ("ln_final.hook_out", "unembed.hook_in"),
    "logits": ("unembed.hook_out", "hook_unembed"),
}
_BLOCK = {
    "q": ("attn.q.hook_out",),
    "k": ("attn.k.hook_out",),
    "v": ("attn.v.hook_out",),
    "z": ("attn.o.hook_in",),
    "attn_out": ("attn.hook_out",),
    "ffn_up": ("mlp.in.hook_out",),
    "ffn_act": ("mlp.out.hook_in",),
    "ffn_out": ("mlp.hook_out",),
}
_PRE_NORM = {
    "resid_pre": ("hook_in", "ln1.hook_in"),
    "norm1": ("ln1.hook_out", "attn.hook_in"),
    "resid_mid": ("ln2.hook_in",),
    "norm2": ("ln2.hook_out", "mlp.hook_in"),
    "resid_post": ("hook_out",),
}
_POST_NORM = {
    "resid_pre": ("hook_in", "attn.hook_in"),
    "resid_mid_sum": ("ln1.hook_in",),
    "resid_mid": ("ln1.hook_out", "mlp.hook_in"),
    "resid_post_sum": ("ln2.hook_in",),
    "resid_post": ("hook_out", "ln2.hook_out", "hook_normalized_resid_post"),
}
_POST_NORM_WITHOUT_FFN = {
    "resid_pre": ("hook_in", "attn.hook_in"),
    "resid_post_sum": ("ln1.hook_in",),
    "resid_post": ("hook_out", "ln1.hook_out", "hook_normalized_resid_post"),
}


def has_forks(model: Transformer) -> bool:
    """Whether readers have copies of their own: only where what a head writes is what a later reader finds added."""
    return model.additive_stream


def hook_names(model: Transformer) -> dict[str, Place]:
    """Every hook name of this model and its place, in the order reached, a place's 3.x name before its 4.x ones.

    In a post-norm model `hook_resid_mid` and `hook_resid_post` are the normed stream that flows on, as TransformerLens
    4's block output is; the sums before the norms are `ln1.hook_in` and `ln2.hook_in`.
    """
    names: dict[str, Place] = {}
    for site in model.sites:
        for name in site_names(model.config, site):
            names[name] = site
        if has_forks(model) and site.layer is not None:
            for part in _FORKS_AFTER.get(site.name, ()):
                if part != "attn" or model.config.kv_heads == model.config.n_heads:  # one copy per head of q, k and v
                    names |= {f"blocks.{site.layer}.{name}": Fork(part, site.layer) for name in FORK_NAMES[part]}
    last = model.config.n_layers - 1
    if model.config.final_norm:
        names["ln_final.hook_in"] = Site("resid_post", last)
    return names


def site_names(config: ModelConfig, site: Site) -> tuple[str, ...]:
    """A site's hook names, the 3.x one first where there is one: `0.z` -> blocks.0.attn.hook_z, blocks.0.attn.o.hook_in."""
    if site.layer is None:
        found = (site.spec.transformer_lens, *_OUTSIDE.get(site.name, ()))
        return tuple(name for name in found if name)
    old = site.spec.transformer_lens.replace("blocks.L.", "")
    found = (old, *_BLOCK.get(site.name, ()), *_by_norm(config).get(site.name, ()))
    if site.name == "ffn_pre":
        found += ("mlp.gate.hook_out",) if config.gated else ("mlp.in.hook_out",)
    return tuple(f"blocks.{site.layer}.{name}" for name in found if name)


def _by_norm(config: ModelConfig) -> dict[str, tuple[str, ...]]:
    if config.norm_position == "pre":
        return _PRE_NORM
    return _POST_NORM_WITHOUT_FFN if config.ffn == "none" else _POST_NORM


def fork_is_on(fork: Fork, cfg) -> bool:
    """Whether the flag of a reader's copy is set, as `set_use_split_qkv_input` and its like do."""
    flags = {"attn": "use_attn_in", "mlp": "use_hook_mlp_in"}
    return bool(getattr(cfg, flags.get(fork.part, "use_split_qkv_input")))


def default_names(names: dict[str, Place], cfg) -> list[str]:
    """What a cache without a filter holds: each place's 3.x name; per-head results and forks where their flag is on."""
    seen: set[Place] = set()
    found = []
    for name, place in names.items():
        if place in seen:
            continue
        seen.add(place)
        if isinstance(place, Fork):
            wanted = fork_is_on(place, cfg)
        else:
            wanted = bool(place.spec.transformer_lens) and (place.name != "head_out" or cfg.use_attn_result)
        if wanted:
            found.append(name)
    return found


def check_name(name: str, known: Iterable[str]) -> str:
    """The name itself. UnknownHookError, with the nearest one, when the model does not have it."""
    known = list(known)
    if name not in known:
        raise UnknownHookError(
            f"this model has no hook {name!r}{suggest(name, known)}; model.hook_dict lists all {len(known)}"
        )
    return name
