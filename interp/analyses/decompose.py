"""The stream as a sum of what was written to it (Elhage 2021): embeddings, heads, FFNs and their biases (R1).

Exact for a pre-norm model; a head is further split by the token it read: Σ_j α_ij (v_j W_O).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.at import positions as locate
from interp.at import side
from interp.hookable import Hookable, UnsupportedModelError, require_hookable
from interp.metrics import wide
from interp.model.inputs import Inputs
from interp.run import Cache, Run, prepare, run
from interp.sites import Site, resolve
from interp.tokens import labels

STREAM = ("resid_pre", "resid_mid", "resid_cross", "resid_post")
WRITERS = ("attn_out", "cross_out", "ffn_out")
COLUMNS = ["component", "kind", "layer", "head", "source"]


class DecompositionError(ValueError):
    """A site that is not the stream, or components that do not add up to it."""


@dataclass(frozen=True, eq=False)
class Decomposition:
    """Components of the stream at one position of each example, which add up to it.

    vectors [component example d_model]; components: one row per component (component, kind, layer, head, source; missing
    where it does not apply); stream [example d_model] as recorded; error: largest |Σ − stream| over largest |stream|;
    position [example]; texts: printed token of each position, sources: of each source position, both [example][position].
    """

    vectors: Tensor
    components: pd.DataFrame
    stream: Tensor
    error: float
    site: Site
    position: Tensor
    role: str | None
    texts: list[list[str]]
    sources: dict[str, list[list[str]]]

    def table(self) -> pd.DataFrame:
        """One row per component × example.

        Columns: those of `components`, example, position, role, token, source_token (with sources), norm, dot (with the
        stream's direction, in the stream's unit) and share (of the stream's squared norm: component · stream / |stream|²; the
        shares of one example sum to 1 and can be negative).
        """
        n, batch = self.vectors.shape[:2]
        length = self.stream.norm(dim=-1)
        dot = (self.vectors * self.stream).sum(-1) / length
        place = self.position.tolist()
        table = self.components.loc[self.components.index.repeat(batch)].reset_index(drop=True)
        table = table.assign(
            example=list(range(batch)) * n, position=place * n, role=self.role,
            token=[row[at] for row, at in zip(self.texts, place, strict=True)] * n,
            norm=self.vectors.norm(dim=-1).flatten().tolist(), dot=dot.flatten().tolist(),
            share=(dot / length).flatten().tolist(),
        )  # fmt: skip
        if table["source"].notna().any():
            table.insert(len(COLUMNS), "source_token", self.source_tokens(table))
        return table

    def source_tokens(self, table: pd.DataFrame) -> list[str | None]:
        """The printed token that each row's head read (rows: kind, source, example)."""
        rows = zip(table["kind"], table["source"], table["example"], strict=True)
        return [None if pd.isna(at) else self.sources[kind][example][int(at)] for kind, at, example in rows]


def decompose(
    model: Hookable,
    inputs: Any,
    site: str | Site,
    positions: Any = -1,
    heads: bool = True,
    sources: bool = False,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> Decomposition:
    """Everything that was written to the stream before `site`, at one position per example (Elhage 2021).

    site: "3.resid_post", any resid_pre, resid_mid, resid_cross or resid_post; an encoder's too. positions: an int (negative
    from the last real token), int tensor [batch] or role. heads: one component per head (else per attention layer). sources:
    each head split by the position it read, α_ij v_j W_O; tokens of the encoder for cross-attention. Kinds: embed,
    position, segment, head, attention, attention bias (b_O), ffn, ffn bias (b_out), cross head, cross attention, cross
    attention bias. b_V is part of v, so a head's share of it goes with the token read.
    Raises UnsupportedModelError for a stream that is no sum (post-norm) or that the model does not split as asked,
    DecompositionError for another site or parts that do not add up, SelectionError, InputsError.
    """
    require_hookable(model)
    inputs = prepare(model, inputs, tokenizer, prefix)
    return decomposed(model, inputs, resolve(site, model.sites), positions, heads, sources, tokenizer)[0]


def decomposed(
    model: Hookable,
    inputs: Inputs,
    site: Site,
    positions: Any,
    heads: bool,
    sources: bool,
    tokenizer: Any = None,
    also: Sequence[Site] = (),
) -> tuple[Decomposition, Run]:
    """`decompose` of prepared inputs, and the one run that it read, which also recorded the sites `also`."""
    _require_sum(model, site)
    own = side(site, "position", inputs)
    index = locate(own, positions)
    before = _written(model, site)
    found = run(model, inputs, record=[*_needed(model, before, site, heads, sources), *also])
    parts = _Parts(model, found.cache, index)
    parts.embeddings(before)
    for written in before:
        if written.name == "ffn_out":
            parts.ffn(written)
        elif written.name in WRITERS:
            parts.attention(written, heads, sources)
    vectors, stream = torch.stack(parts.vectors), parts.at(site)
    error = float((vectors.sum(0) - stream).abs().max() / stream.abs().max())
    dtype = found.cache[site].dtype
    limit = min(2000 * torch.finfo(dtype).eps, 0.1)
    if not error <= limit:
        raise DecompositionError(f"the parts of '{site}' miss it by {error:.3g} of its largest entry; allowed: {limit:.3g} in "
                                 f"{dtype}. Something else writes to this model's stream")  # fmt: skip
    table = pd.DataFrame(parts.rows, columns=COLUMNS).astype(dict.fromkeys(("layer", "head", "source"), "Int64"))
    role = positions if isinstance(positions, str) else None
    texts = _texts(own, tokenizer)
    return Decomposition(
        vectors, table, stream, error, site, index, role, texts, _read(inputs, texts, site, tokenizer)
    ), found


class _Parts:
    """Components collected in the order in which they are written."""

    def __init__(self, model: Hookable, cache: Cache, index: Tensor) -> None:
        self.model, self.cache, self.index = model, cache, index
        self.rows: list[tuple[Any, ...]] = []
        self.vectors: list[Tensor] = []

    def at(self, site: Site) -> Tensor:
        """The recorded value at each example's position, 16-bit values in 32 bits."""
        value = self.cache[site]
        index = self.index.to(value.device)
        return wide(value[torch.arange(len(index), device=value.device), index])

    def add(self, vector: Tensor, name: str, kind: str, layer: int | None = None, head=None, source=None) -> None:
        self.rows.append((name if layer is None else f"{layer}.{name}", kind, layer, head, source))
        self.vectors.append(vector)

    def embeddings(self, before: list[Site]) -> None:
        """Token, position and, as what is left of the first block's input, segment embeddings."""
        rest = None
        for site in before:
            if site.name in ("embed", "pos_embed"):
                self.add(self.at(site), site.name, "embed" if site.name == "embed" else "position")
            elif site.name == "resid_pre" and site.layer == 0:
                rest = self.at(site) - torch.stack(self.vectors).sum(0)
        if rest is not None and getattr(self.model.config, "n_segments", 0):
            self.add(rest, "segment", "segment")

    def ffn(self, site: Site) -> None:
        """ffn_out as its neurons' part and b_out."""
        part, bias = self._without_bias(site, "b_out")
        self.add(part, "ffn", "ffn", site.layer)
        if bias is not None:
            self.add(bias, "b_out", "ffn bias", site.layer)

    def attention(self, site: Site, heads: bool, sources: bool) -> None:
        """attn_out or cross_out as heads (and what each read), or as one part, and b_O."""
        cross, kind = ("cross_", "cross ") if site.name == "cross_out" else ("", "")
        part, bias = self._without_bias(site, f"{cross}b_O")
        if heads or sources:  # each computed by itself, so that the sum is a check
            self._heads(site, cross, f"{kind}head", sources)
        else:
            self.add(part, f"{cross}attn", f"{kind}attention", site.layer)
        if bias is not None:
            self.add(bias, f"{cross}b_O", f"{kind}attention bias", site.layer)

    def _without_bias(self, site: Site, bias: str) -> tuple[Tensor, Tensor | None]:
        whole, offset = self.at(site), self.model.weight(bias, site.layer, site.stack)
        if offset is None:
            return whole, None
        offset = offset.detach().to(whole).expand_as(whole)
        return whole - offset, offset

    def _heads(self, site: Site, cross: str, kind: str, sources: bool) -> None:
        weight = self.model.weight(f"{cross}W_O", site.layer, site.stack)
        if weight is None:
            raise UnsupportedModelError(f"heads need the weight '{cross}W_O' in layer {site.layer}, which this model does not "
                                        "have; allowed: heads=False")  # fmt: skip
        out = weight.detach()

        def named(name: str) -> Site:
            return Site(cross + name, site.layer, site.stack)

        if not sources:
            z = self.at(named("z"))
            for head in range(z.shape[1]):
                self.add(z[:, head] @ out[head].to(z), f"{cross}head{head}", kind, site.layer, head)
            return
        pattern = self.cache[named("pattern")]
        rows = torch.arange(len(self.index), device=pattern.device)
        pattern, v = wide(pattern[rows, :, self.index.to(pattern.device)]), wide(self.cache[named("v")])
        v = v.repeat_interleave(pattern.shape[1] // v.shape[2], 2)  # grouped heads share a value head
        for head in range(pattern.shape[1]):
            read = pattern[:, head, :, None] * (v[:, :, head] @ out[head].to(v))  # [example source d_model]
            for j in range(read.shape[1]):
                self.add(read[:, j], f"{cross}head{head}[{j}]", kind, site.layer, head, j)


def _require_sum(model: Hookable, site: Site) -> None:
    if not model.additive_stream:
        raise UnsupportedModelError(
            "this model's stream has no exact decomposition: a norm sits on the stream itself (post-norm, or a norm of the "
            "embeddings), so what was written is rescaled on the way; allowed: pre-norm without embedding_norm"
        )
    if site.name not in STREAM:
        raise DecompositionError(
            f"'{site}' is not the stream, which alone is a sum; allowed: a layer's {', '.join(STREAM)}"
        )


def _written(model: Hookable, site: Site) -> list[Site]:
    """The sites of this stack up to `site`, in order, that write to the stream or show its start."""
    own = [one for one in model.sites if one.stack == site.stack]
    upto = own[: own.index(site) + 1]
    kept = [s for s in upto if s.name in (*WRITERS, "embed", "pos_embed") or (s.name, s.layer) == ("resid_pre", 0)]
    if not any(s.name == "embed" for s in kept):
        raise UnsupportedModelError("this needs the site 'embed', which this model does not offer")
    return kept


def _needed(model: Hookable, before: list[Site], site: Site, heads: bool, sources: bool) -> list[Site]:
    """What to record, and a refusal by name of what the model does not offer."""
    needed = [*before, site]
    if heads or sources:
        for one in before:
            if one.name in ("attn_out", "cross_out"):
                cross = "cross_" if one.name == "cross_out" else ""
                names = ("pattern", "v") if sources else ("z",)
                inner = [Site(cross + name, one.layer, one.stack) for name in (*names, "head_out")]
                missing = [str(s) for s in inner if s not in model.sites]
                if missing:  # head_out: where it is not offered, heads do not add up to attn_out
                    instead = "sources=False" if sources else "heads=False"
                    raise UnsupportedModelError(
                        f"splitting '{one}' needs the site(s) {', '.join(missing)}, which this model does not offer; "
                        f"allowed: {instead}"
                    )
                needed += inner[:-1]
    return list(dict.fromkeys(needed))


def _texts(inputs: Inputs, tokenizer: Any) -> list[list[str]]:
    return [labels(tokenizer, row) for row in inputs.tokens]


def _read(inputs: Inputs, texts: list[list[str]], site: Site, tokenizer: Any) -> dict[str, list[list[str]]]:
    """The tokens that each kind of head reads."""
    crosses = inputs.source is not None and site.stack == "decoder"
    return {"head": texts} | ({"cross head": _texts(inputs.encoder, tokenizer)} if crosses else {})
