"""Direct logit attribution (Elhage 2021, nostalgebraist 2020): what each part of the last stream adds to a logit.

The final norm's scale is held at the value it had in the run, so that the map from the stream to the logits is linear:
centre each component (LayerNorm), divide by the cached σ, times gain, times the unembedding's column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.analyses.decompose import Decomposition, decomposed
from interp.analyses.norm_reading import NormReading, norm_readings
from interp.hookable import Hookable, UnsupportedModelError, require_head
from interp.metrics import wide
from interp.run import Run, prepare
from interp.sites import Site, output_sites, resolve

SPLITS = ("component", "head", "source", "neuron")


class AttributionError(ValueError):
    """A split, layer or token that does not exist, or rows that do not add up to the model's logits."""


@torch.no_grad()
def direct_logit_attribution(
    model: Hookable,
    inputs: Any,
    correct: int | Tensor,
    wrong: int | Tensor | None = None,
    position: Any = -1,
    by: str = "component",
    site: str | Site | None = None,
    layers: Sequence[int] | None = None,
    top: int | None = 20,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> pd.DataFrame:
    """One row per example × component: its share of logit(correct) − logit(wrong) at `position`, in logits.

    correct, wrong: token ids, an int or int tensor [batch]; wrong=None: of logit(correct) itself. by: "component" (embeddings,
    each layer's attention and FFN, biases), "head" (attention by head), "source" (each head by the token it read) or "neuron"
    (the FFNs of `layers`, default all, by neuron: the `top` of each example by size over those layers, None = all, and one row
    "other neurons" per layer). site: attribute an earlier stream, read with the last stream's scale; default the last stream.
    Columns: example, position, component, kind, layer, head, source, source_token, neuron (missing where they do not apply),
    attribution. The rows of one example add up to the model's own logits: the norm's offset and the unembedding's bias have
    rows of their own (0 where there is none). It is the direct effect only; later parts may undo what an early one writes.
    Raises UnsupportedModelError, AttributionError (also where the sum fails, as with capped logits), DecompositionError.
    """
    _check(by, layers, top)
    require_head(model)
    inputs = prepare(model, inputs, tokenizer, prefix)
    last = output_sites("resid_post", model.sites)[-1]
    site = last if site is None else resolve(site, model.sites)
    if site.stack != last.stack:
        raise AttributionError(f"'{site}' does not end in the head; allowed: a stream of the {last.stack}")
    [norm] = norm_readings(model, "final")
    scale = [Site("final_scale", None, last.stack)] if norm.exists else []
    acts = _neuron_sites(model, site, layers) if by == "neuron" else []
    parts, found = decomposed(model, inputs, site, position, by in ("head", "source"), by == "source", tokenizer,
                              [*scale, *acts])  # fmt: skip
    here = (torch.arange(inputs.batch), parts.position.cpu())
    sigma = _pick(found, scale[0], here) if scale else torch.ones_like(parts.stream[:, :1])
    head = wide(_direction(model, correct, wrong, inputs.batch).to(parts.stream.device))
    reads = norm.read(head).T / sigma  # [example d_model]: logits per unit of stream
    table = _components(parts, reads)
    if acts:
        table = _split_neurons(model, table, acts, found, here, reads, top)
    table = _finish(pd.concat([table, _constants(model, norm, head, correct, wrong, inputs.batch)]), parts)
    if site == last:
        _add_up(table, _logits(found.logits[here], correct, wrong), found.logits.dtype)
    return table


def _check(by: str, layers: Any, top: Any) -> None:
    if by not in SPLITS:
        raise AttributionError(f"by={by!r} is not allowed; allowed: {', '.join(map(repr, SPLITS))}")
    if layers is not None and by != "neuron":
        raise AttributionError(f"layers={layers!r} goes with by='neuron', got by={by!r}")
    if top is not None and (not isinstance(top, int) or top < 1):
        raise AttributionError(f"top={top!r} is not allowed; allowed: an integer from 1, or None for every neuron")


def _pick(found: Run, site: Site, here: tuple[Tensor, Tensor]) -> Tensor:
    return wide(found.cache[site][here])


def _ids(token: Any, batch: int, vocab: int) -> Tensor:
    """Token ids [batch], checked."""
    ids = torch.as_tensor(token)
    if ids.dtype.is_floating_point or ids.dtype == torch.bool or ids.shape not in ((), (batch,)):
        raise AttributionError(
            f"token ids must be an int or ints [batch] = ({batch},), got {ids.dtype} {tuple(ids.shape)}"
        )
    if int(ids.min()) < 0 or int(ids.max()) >= vocab:
        raise AttributionError(
            f"token ids {int(ids.min())} … {int(ids.max())} leave the vocabulary; allowed: 0 … {vocab - 1}"
        )
    return ids.expand(batch)


def _direction(model: Hookable, correct: Any, wrong: Any, batch: int) -> Tensor:
    """W_U[:, correct] − W_U[:, wrong], [d_model example]."""
    weight = model.weight("W_U")
    assert weight is not None  # require_head
    return _logits(weight.detach().expand(batch, -1, -1), correct, wrong).T


def _logits(values: Tensor, correct: Any, wrong: Any) -> Tensor:
    """values[correct] − values[wrong] of the last axis, [example …]; values [example … vocab]."""
    batch, vocab = values.shape[0], values.shape[-1]
    rows = torch.arange(batch)
    chosen = wide(values[rows, ..., _ids(correct, batch, vocab)])
    return chosen if wrong is None else chosen - wide(values[rows, ..., _ids(wrong, batch, vocab)])


def _components(parts: Decomposition, reads: Tensor) -> pd.DataFrame:
    """Component × example, long."""
    values = torch.einsum("ced,ed->ce", parts.vectors, reads)
    n, batch = values.shape
    table = parts.components.loc[parts.components.index.repeat(batch)]
    return table.assign(example=list(range(batch)) * n, attribution=values.flatten().tolist())


def _neuron_sites(model: Hookable, site: Site, layers: Sequence[int] | None) -> list[Site]:
    before = model.sites[: model.sites.index(site)]
    have = {one.layer: one for one in output_sites("ffn_out", (*before, model.sites[-1]))}
    wrong = [layer for layer in layers or () if layer not in have]
    if wrong or not have:
        raise AttributionError(f"layers={layers!r}: no FFN writes to '{site}' in layer(s) {wrong or 'any'}; "
                               f"allowed: {', '.join(map(str, have)) or 'none, this model has no FFN before it'}")  # fmt: skip
    acts = [Site("ffn_act", layer, site.stack) for layer in (have if layers is None else dict.fromkeys(layers))]
    missing = [str(one) for one in acts if one not in model.sites]
    if missing:
        raise UnsupportedModelError(
            f"by='neuron' needs the site(s) {', '.join(missing)}, which this model does not offer"
        )
    return acts


def _split_neurons(
    model: Hookable, table: pd.DataFrame, acts: list[Site], found: Run, here: Any, reads: Tensor, top: int | None
) -> pd.DataFrame:
    """The rows "ffn" of the layers in `acts` replaced by m_i (v_i · direction) of their neurons."""
    values = {}
    for act in acts:
        weight = model.weight("W_out", act.layer, act.stack)
        if weight is None:
            raise UnsupportedModelError(
                f"by='neuron' needs the weight 'W_out' in layer {act.layer}, which this model does not have"
            )
        values[act.layer] = _pick(found, act, here) * (reads @ weight.detach().to(reads).T)  # [example neuron]
    split = torch.cat(list(values.values()), -1).cpu()
    owners = torch.cat([torch.full((each.shape[1],), layer) for layer, each in values.items()])
    neurons = torch.cat([torch.arange(each.shape[1]) for each in values.values()])
    size = split.shape[1] if top is None else min(top, split.shape[1])
    best = split.abs().topk(size, -1).indices
    layer, neuron = owners[best].flatten().tolist(), neurons[best].flatten().tolist()
    frames = [table[~((table["kind"] == "ffn") & table["layer"].isin(list(values)))]]
    frames.append(pd.DataFrame({
        "component": [f"{one}.neuron{i}" for one, i in zip(layer, neuron, strict=True)], "kind": "neuron", "layer": layer,
        "neuron": neuron, "example": [row for row in range(len(split)) for _ in range(size)],
        "attribution": split.gather(-1, best).flatten().tolist(),
    }))  # fmt: skip
    if size < split.shape[1]:
        left = split.scatter(-1, best, 0.0)
        for one in values:
            rest = left[:, owners == one].sum(-1)
            frames.append(pd.DataFrame({"component": f"{one}.other neurons", "kind": "other neurons", "layer": one,
                                        "example": range(len(split)), "attribution": rest.tolist()}))  # fmt: skip
    return pd.concat(frames)


def _constants(model: Hookable, norm: NormReading, head: Tensor, correct: Any, wrong: Any, batch: int) -> pd.DataFrame:
    """What the norm's offset and the unembedding's bias add whatever the stream holds."""
    bias = model.weight("b_U")
    added = [0.0] * batch if bias is None else _logits(bias.detach().expand(batch, -1), correct, wrong).tolist()
    offset = (norm.offset.to(head) @ head).tolist()
    return pd.DataFrame({
        "component": ["norm offset"] * batch + ["b_U"] * batch,
        "kind": ["final norm offset"] * batch + ["unembedding bias"] * batch,
        "example": [*range(batch)] * 2, "attribution": [*offset, *added],
    })  # fmt: skip


def _finish(table: pd.DataFrame, parts: Decomposition) -> pd.DataFrame:
    """Columns in order, one example after the other, each in the order of writing."""
    table = table.sort_values("example", kind="stable", ignore_index=True)
    table["position"] = [int(parts.position[example]) for example in table["example"]]
    table["source_token"] = parts.source_tokens(table)
    table["neuron"] = table.get("neuron")
    counts = dict.fromkeys(("layer", "head", "source", "neuron"), "Int64")
    columns = [
        "example",
        "position",
        "component",
        "kind",
        "layer",
        "head",
        "source",
        "source_token",
        "neuron",
        "attribution",
    ]
    return table.astype(counts)[columns]


def _add_up(table: pd.DataFrame, truth: Tensor, dtype: torch.dtype) -> None:
    """Rows must sum to the model's own logits: rounding scales with the parts, not with their sum."""
    parts = table.groupby("example")["attribution"]
    sizes = table["attribution"].abs().groupby(table["example"]).sum() + 1.0
    miss = (parts.sum() - truth.double().cpu().numpy()).abs() / sizes
    limit = min(max(2000 * torch.finfo(dtype).eps, 1e-6), 0.1)  # transformers' RMSNorm rounds to 32 bits in any model
    if not bool((miss <= limit).all()):
        raise AttributionError(
            f"the rows miss the model's logits by {miss.max():.3g} of their summed size; allowed: {limit:.3g} in {dtype}. "
            "Its logits are not a linear map of the normed stream (capped or scaled?)"
        )
