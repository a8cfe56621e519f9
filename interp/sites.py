"""The only dictionary of places: every intermediate of a forward pass has one name here.

`SITES` is the whole vocabulary; which of them a given model has, and in which order they are reached,
follows from its config (`ordered_sites`). The symbol table in docs/sites.md is generated from this file.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Literal

from interp.display import site_html

STACKS = ("encoder", "decoder")


class UnknownSiteError(ValueError):
    """A site name that is not in the dictionary, or one that this model does not have."""


@dataclass(frozen=True)
class SiteSpec:
    """What one name means: the book's symbol, its axes after batch, and TransformerLens's name."""

    name: str
    symbol: str
    axes: tuple[str, ...]
    per_layer: bool
    transformer_lens: str
    meaning: str


_STREAM = ("position", "d_model")
_SCALE = ("position", "one")
_QUERY = ("position", "head", "d_head")
_KV = ("position", "kv_head", "d_head")
_EDGES = ("head", "query", "key")
_FFN = ("position", "d_ff")


def _spec(name, symbol, axes, tl, meaning, per_layer=True) -> SiteSpec:
    return SiteSpec(name, symbol, axes, per_layer, tl, meaning)


# In the order of a pre-norm block; `ordered_sites` gives the order of a particular model.
_ALL = (
    _spec("embed", "", _STREAM, "hook_embed", "token embedding", False),
    _spec("pos_embed", "", _STREAM, "hook_pos_embed", "position embedding (learned or sinusoidal)", False),
    _spec("resid_pre", "x", _STREAM, "blocks.L.hook_resid_pre", "stream entering the block"),
    _spec("norm1_scale", "σ", _SCALE, "blocks.L.ln1.hook_scale", "divisor of the first norm, ε inside the root (7.24)"),
    _spec("norm1_hat", "x̂", _STREAM, "blocks.L.ln1.hook_normalized", "before gain and offset (7.25)"),
    _spec("norm1", "t¹", _STREAM, "", "what attention reads, after gain and offset (7.27)"),
    _spec("q", "q", _QUERY, "blocks.L.attn.hook_q", "query, after bias, before q/k norm and rotary"),
    _spec("k", "k", _KV, "blocks.L.attn.hook_k", "key, after bias, before q/k norm and rotary"),
    _spec("v", "v", _KV, "blocks.L.attn.hook_v", "value, after bias"),
    _spec("q_rot", "", _QUERY, "blocks.L.attn.hook_rot_q", "query as it enters the scores (rotary or q/k norm only)"),
    _spec("k_rot", "", _KV, "blocks.L.attn.hook_rot_k", "key as it enters the scores (rotary or q/k norm only)"),
    _spec("scores", "", _EDGES, "blocks.L.attn.hook_attn_scores", "q·k, scaled and masked (−∞)"),
    _spec("pattern", "α", _EDGES, "blocks.L.attn.hook_pattern", "attention weights: softmax of scores over keys"),
    _spec("z", "z", _QUERY, "blocks.L.attn.hook_z", "α-weighted values, before W_O"),
    _spec(
        "head_out", "", ("position", "head", "d_model"), "blocks.L.attn.hook_result", "each head's z W_O (without b_O)"
    ),
    _spec("attn_out", "t²", _STREAM, "blocks.L.hook_attn_out", "attention's output (7.28)"),
    _spec("resid_mid_sum", "t² + x", _STREAM, "", "post-norm only: the sum before its norm"),
    _spec("resid_mid", "t³", _STREAM, "blocks.L.hook_resid_mid", "stream after attention (7.29)"),
    _spec("cross_norm_scale", "σ", _SCALE, "", "divisor of the cross-attention norm"),
    _spec("cross_norm_hat", "x̂", _STREAM, "", "before gain and offset"),
    _spec("cross_norm", "", _STREAM, "", "what cross-attention reads for its queries"),
    _spec("cross_q", "", _QUERY, "", "query from the decoder's stream"),
    _spec("cross_k", "", _KV, "", "key from encoder.final"),
    _spec("cross_v", "", _KV, "", "value from encoder.final"),
    _spec("cross_scores", "", _EDGES, "", "scaled, masked by source padding"),
    _spec("cross_pattern", "", _EDGES, "", "attention over source positions"),
    _spec("cross_z", "", _QUERY, "", "before the cross-attention's W_O"),
    _spec("cross_head_out", "", ("position", "head", "d_model"), "", "each head's z W_O"),
    _spec("cross_out", "", _STREAM, "", "cross-attention's output"),
    _spec("resid_cross_sum", "", _STREAM, "", "post-norm only: the sum before its norm"),
    _spec("resid_cross", "", _STREAM, "", "stream after cross-attention"),
    _spec("norm2_scale", "σ", _SCALE, "blocks.L.ln2.hook_scale", "divisor of the second norm, ε inside the root"),
    _spec("norm2_hat", "x̂", _STREAM, "blocks.L.ln2.hook_normalized", "before gain and offset"),
    _spec("norm2", "t⁴", _STREAM, "", "what the FFN reads, after gain and offset (7.30)"),
    _spec("ffn_pre", "xW1 + b1", _FFN, "blocks.L.mlp.hook_pre", "before the activation function"),
    _spec("ffn_up", "xW2 + b2", _FFN, "blocks.L.mlp.hook_pre_linear", "gated only: the factor the gate multiplies"),
    _spec("ffn_act", "m", _FFN, "blocks.L.mlp.hook_post", "memory coefficients: what the last matrix reads (7.22)"),
    _spec("ffn_out", "t⁵", _STREAM, "blocks.L.hook_mlp_out", "the FFN's output (7.31)"),
    _spec("resid_post_sum", "t⁵ + t³", _STREAM, "", "post-norm only: the sum before its norm"),
    _spec("resid_post", "h", _STREAM, "blocks.L.hook_resid_post", "stream leaving the block (7.32)"),
    _spec("final_scale", "σ", _SCALE, "ln_final.hook_scale", "divisor of the final norm", False),
    _spec("final_hat", "x̂", _STREAM, "ln_final.hook_normalized", "before gain and offset", False),
    _spec("final", "", _STREAM, "", "what the head reads: the final norm's output", False),
    _spec("logits", "", ("position", "vocab"), "", "scores over the vocabulary", False),
)
SITES: dict[str, SiteSpec] = {spec.name: spec for spec in _ALL}


@dataclass(frozen=True)
class Site:
    """One place in one model: a name, its layer (from 0) where it has one, and its stack in an encoder-decoder."""

    name: str
    layer: int | None = None
    stack: Literal["encoder", "decoder"] | None = None
    _repr_html_ = site_html

    def __post_init__(self) -> None:
        if self.name not in SITES:
            raise UnknownSiteError(
                f"unknown site {self.name!r}{suggest(self.name, SITES)}; allowed: {', '.join(SITES)}"
            )
        if self.stack is not None and self.stack not in STACKS:
            raise UnknownSiteError(f"unknown stack {self.stack!r}; allowed: {', '.join(STACKS)}")
        if SITES[self.name].per_layer and self.layer is None:
            raise UnknownSiteError(f"site {self.name!r} needs a layer, as in '0.{self.name}'")
        if not SITES[self.name].per_layer and self.layer is not None:
            raise UnknownSiteError(f"site {self.name!r} has no layer, got {self.layer}")
        if self.layer is not None and (
            not isinstance(self.layer, int) or isinstance(self.layer, bool) or self.layer < 0
        ):
            raise UnknownSiteError(f"layer of {self.name!r} must be an integer from 0, got {self.layer!r}")
        # Sites are looked up at every tap: the number is made once.
        object.__setattr__(self, "_hash", hash(self.name) + (0 if self.layer is None else self.layer + 1))

    def __hash__(self) -> int:
        return self._hash  # type: ignore[attr-defined]

    def __reduce__(self):
        return Site, (self.name, self.layer, self.stack)  # another process hashes text to other numbers

    def __str__(self) -> str:
        parts = [self.stack, None if self.layer is None else str(self.layer), self.name]
        return ".".join(part for part in parts if part is not None)

    @property
    def spec(self) -> SiteSpec:
        """The dictionary's entry for this name."""
        return SITES[self.name]

    @staticmethod
    def parse(text: str | Site) -> Site:
        """Read '3.pattern', 'embed', 'encoder.3.pattern'; a Site passes through. Raises UnknownSiteError."""
        if isinstance(text, Site):
            return text
        if not isinstance(text, str):
            raise UnknownSiteError(f"a site is text like '3.attn_out' or a Site, got {type(text).__name__}: {text!r}")
        parts = text.split(".")
        stack = parts.pop(0) if parts[0] in STACKS else None
        layer = None
        if len(parts) > 1:
            number = parts.pop(0)
            if not number.isdecimal():
                raise UnknownSiteError(f"cannot read {text!r} as a site: {number!r} is not a layer; write '3.attn_out'")
            layer = int(number)
        return Site(".".join(parts), layer, stack)  # type: ignore[arg-type]


def suggest(name: str, known) -> str:
    """', did you mean …?' for a near miss, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f", did you mean {close[0]!r}?" if close else ""


def named(site: Site, available: Iterable[Site]) -> list[Site]:
    """The available sites that `site` can mean: itself, or those of either stack when it names none."""
    if site in available or site.stack is not None:
        return [site] if site in available else []
    return [one for one in available if (one.name, one.layer) == (site.name, site.layer)]


def resolve(text: str | Site, available: tuple[Site, ...]) -> Site:
    """The site of this model that `text` names; UnknownSiteError says what the model has instead.

    In an encoder-decoder the stack may be left out where only one stack has the site ('logits', '0.cross_pattern').
    """
    site = Site.parse(text)
    found = named(site, available)
    if len(found) == 1:
        return found[0]
    if found:
        either = " or ".join(f"'{one}'" for one in found)
        raise UnknownSiteError(f"'{site}' can mean {either}; say which")
    same_name = [str(s) for s in available if s.name == site.name]
    if same_name:
        raise UnknownSiteError(f"this model has no site '{site}'; it has {_span(same_name)}")
    names = ", ".join(dict.fromkeys(s.name for s in available))
    raise UnknownSiteError(f"this model has no site {site.name!r} (asked for '{site}'); it has {names}")


def output_sites(name: str, available: tuple[Site, ...]) -> list[Site]:
    """Every layer's site of this name in the stack that the output is read from (an encoder-decoder's decoder)."""
    return [site for site in available if site.name == name and site.stack == available[-1].stack]


def expand(text: str | Site, available: tuple[Site, ...]) -> list[Site]:
    """One site, or every layer's when `text` is a bare per-layer name: 'resid_post' -> 0.resid_post, 1.resid_post, …

    In an encoder-decoder 'encoder.resid_post' means every layer of that stack, 'resid_post' every layer of both.
    """
    stack, name = None, text
    if isinstance(text, str) and text.split(".")[0] in STACKS:
        stack, _, name = text.partition(".")
    if isinstance(name, str) and name in SITES and SITES[name].per_layer:
        found = [site for site in available if site.name == name and stack in (None, site.stack)]
        if not found:
            names = ", ".join(dict.fromkeys(s.name for s in available))
            raise UnknownSiteError(f"this model has no site {text!r}; it has {names}")
        return found
    return [resolve(text, available)]


def _span(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} … {names[-1]} ({len(names)} sites)"


@lru_cache(maxsize=4096)
def layer_sites(layer: int, stack: str | None = None) -> SimpleNamespace:
    """Every per-layer Site of one block as attributes: `s.attn_out`."""
    return SimpleNamespace(
        **{name: Site(name, layer, stack) for name, spec in SITES.items() if spec.per_layer}  # type: ignore[arg-type]
    )


@lru_cache(maxsize=8)
def model_sites(stack: str | None = None) -> SimpleNamespace:
    """Every Site outside the blocks as attributes: `s.embed`."""
    return SimpleNamespace(
        **{name: Site(name, None, stack) for name, spec in SITES.items() if not spec.per_layer}  # type: ignore[arg-type]
    )


def symbol_table() -> str:
    """The dictionary as a Markdown table (site, book's symbol, shape, TransformerLens's name, meaning)."""
    rows = ["| site | book | shape after batch | TransformerLens | what it is |", "|---|---|---|---|---|"]
    for spec in _ALL:
        shape = " ".join("1" if axis == "one" else axis for axis in spec.axes)
        tl = f"`{spec.transformer_lens}`" if spec.transformer_lens else ""
        rows.append(f"| `{spec.name}` | {spec.symbol} | {shape} | {tl} | {spec.meaning} |")
    return "\n".join(rows)
