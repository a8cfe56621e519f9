"""What the subject's stream holds and which sub-layer hands the answer over (Geva et al. 2023): attribute rate and extraction."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.analyses.joint_metric import TraceError, asked, layer_windows, odd_window, top_tokens
from interp.analyses.trace_effects import mean_interval
from interp.at import positions
from interp.hookable import Hookable, UnsupportedModelError, require_head
from interp.interventions import Zero, derangement
from interp.metrics import wide
from interp.model.inputs import Inputs
from interp.run import run
from interp.sites import output_sites
from interp.tasks.facts import Prompts
from interp.tasks.task import Pairs


def attribute_rate(
    model: Hookable,
    prompts: Prompts | Pairs,
    attributes: Mapping[Any, Sequence[int]] | Sequence[Sequence[int]],
    k: int = 50,
    position: Any = "subject_last",
    knock_out: Literal["ffn_out", "attn_out"] | None = None,
    window: int = 1,
    layers: Sequence[int] | None = None,
    counted: Tensor | None = None,
    seed: int = 0,
    batch: int = 32,
) -> pd.DataFrame:
    """The share of the stream's top k tokens, projected by the final norm and head, that are attributes of the subject.

    attributes: token ids per subject (the table's column) or per example: a subject's true values, or tokens of its known
    attributes. k: 50 as published; the number of true values for toy facts. position: where the stream is read. knock_out: zero
    this sub-layer's output at that position in each window of layers (odd), one after the other. layers: which streams
    (`resid_post`) are read, default all, with knock_out the last alone. counted [vocab] bool: the tokens that count at all (the
    published code drops stop words and parts of words); None: every token. seed: draws which other subject each is compared with.
    One row per example × knocked window × layer read. Columns: fact, example, right, knocked ("none"), knocked_layer (centre,
    missing without), first_layer, last_layer, clipped, layer, k, attributes (how many), rate, other_rate (against another
    subject's attributes, without this one's), chance (attributes / counted tokens). Raises TraceError, UnsupportedModelError.
    """
    require_head(model)
    ask = asked(model, prompts, "given", None)
    vocab = model.config.vocab
    counted = _counted(counted, vocab, k)
    sets = _sets(attributes, prompts, ask.clean.batch, vocab)
    others = _others(attributes, sets, prompts, seed)
    streams = output_sites("resid_post", model.sites)
    read = _layers(layers, len(streams), knock_out)
    spans: list[tuple[int, ...]] = [()]
    if knock_out is not None:
        if knock_out not in ("ffn_out", "attn_out"):
            raise TraceError(f"knock_out={knock_out!r} is not allowed; allowed: 'ffn_out', 'attn_out', None")
        spans = layer_windows(len(output_sites(knock_out, model.sites)), odd_window(window))
    rows = []
    for centre, span in enumerate(spans):
        zeroed = [Zero(output_sites(str(knock_out), model.sites)[layer], at=position) for layer in span]
        for start in range(0, ask.clean.batch, batch):
            part = ask.clean.select(slice(start, start + batch))
            got = run(model, part, record=[streams[layer] for layer in read], change=zeroed)
            where = _at(part, position)
            for layer in read:
                vectors = got.cache[streams[layer]][torch.arange(part.batch), where]
                with torch.no_grad():
                    logits = wide(model.unembed(vectors)).masked_fill(~counted.to(vectors.device), float("-inf"))
                for i, top in enumerate(top_tokens(logits, k).tolist(), start):
                    rows.append(
                        (i, centre, layer, len(sets[i]), len(sets[i] & set(top)) / k, len(others[i] & set(top)) / k)
                    )
    table = pd.DataFrame(rows, columns=["example", "centre", "layer", "attributes", "rate", "other_rate"])
    return _described(table, ask.facts, ask.right, spans, knock_out, window, k, int(counted.sum()))


def _described(table, facts, right, spans, knock_out, window, k, n_counted) -> pd.DataFrame:
    ends = [(span[0], span[-1], len(span) < window) if span else (None, None, False) for span in spans]
    first, last, cut = (np.array(one, dtype=object)[table["centre"]] for one in zip(*ends, strict=True))
    example = table["example"].to_numpy()
    centres = table["centre"].tolist() if knock_out else [None] * len(table)
    table = table.assign(fact=facts[example], right=right[example], knocked=knock_out or "none", k=k)
    table = table.assign(knocked_layer=pd.array(centres, dtype="Int64"), first_layer=pd.array(first, dtype="Int64"))
    table = table.assign(last_layer=pd.array(last, dtype="Int64"), clipped=cut.astype(bool))
    table = table.assign(chance=table["attributes"] / n_counted)
    columns = [
        "fact",
        "example",
        "right",
        "knocked",
        "knocked_layer",
        "first_layer",
        "last_layer",
        "clipped",
        "layer",
        "k",
    ]
    return table[[*columns, "attributes", "rate", "other_rate", "chance"]]


def extraction(model: Hookable, prompts: Prompts | Pairs, position: Any = -1, batch: int = 32) -> pd.DataFrame:
    """Which layer's attention or FFN output at the final position, read by the final norm and head, has the prediction on top.

    One row per example × site × layer. Columns: fact, example, right, site ("attn_out", "ffn_out"), layer, predicted (the model's
    top token), top, extracts (top = predicted), first (the first layer of its site that extracts). Geva et al. (2023) project
    with the unembedding alone; here the norm's gain comes before it, as the model itself reads its stream.
    """
    require_head(model)
    ask = asked(model, prompts, "given", None)
    sites = [site for name in ("attn_out", "ffn_out") for site in output_sites(name, model.sites)]
    if not sites:
        raise UnsupportedModelError("extraction reads 'attn_out' and 'ffn_out', which this model does not have")
    frames = []
    for start in range(0, ask.clean.batch, batch):
        part = ask.clean.select(slice(start, start + batch))
        got, where, rows = run(model, part, record=sites), _at(part, position), np.arange(start, start + part.batch)
        for site in sites:
            with torch.no_grad():
                top = model.unembed(got.cache[site][torch.arange(part.batch), where]).argmax(-1)
            predicted = ask.predicted[start : start + part.batch]
            frames.append(pd.DataFrame({
                "fact": ask.facts[rows], "example": rows, "right": ask.right[rows], "site": site.name, "layer": site.layer,
                "predicted": predicted.tolist(), "top": top.tolist(), "extracts": (top == predicted).tolist(),
            }))  # fmt: skip
    table = pd.concat(frames, ignore_index=True).sort_values(
        ["example", "site", "layer"], kind="stable", ignore_index=True
    )
    seen = table.groupby(["example", "site"])["extracts"].cumsum()
    return table.assign(first=table["extracts"] & (seen == 1))


def rates(table: pd.DataFrame, value: str, by: Sequence[str], confidence: float = 0.95) -> pd.DataFrame:
    """The mean of `value` ("rate", "extracts", …) over facts per group, with a t interval: columns by, mean, low, high, n."""
    missing = [name for name in (value, "fact", *by) if name not in table.columns]
    if missing:
        raise TraceError(f"the table lacks column(s) {missing}; it has {list(table.columns)}")
    each = (
        table.assign(**{value: table[value].astype(float)})
        .groupby([*by, "fact"], sort=False, dropna=False)[value]
        .mean()
    )
    return mean_interval(each.groupby(list(by), sort=False, dropna=False), confidence).reset_index()


def _at(inputs: Inputs, position: Any) -> Tensor:
    return positions(inputs, position)


def _counted(counted: Tensor | None, vocab: int, k: int) -> Tensor:
    mask = torch.ones(vocab, dtype=torch.bool) if counted is None else torch.as_tensor(counted)
    if mask.dtype != torch.bool or tuple(mask.shape) != (vocab,):
        raise TraceError(f"counted must be bool [{vocab}], got {mask.dtype} {tuple(mask.shape)}")
    if not isinstance(k, int) or isinstance(k, bool) or not 1 <= k <= int(mask.sum()):
        raise TraceError(f"k={k!r} is not allowed; allowed: 1 … {int(mask.sum())}, the tokens that count")
    return mask


def _sets(attributes: Any, prompts: Any, batch: int, vocab: int) -> list[set[int]]:
    """The attributes of each example. Raises TraceError."""
    if isinstance(attributes, Mapping):
        subjects = prompts.table["subject"].tolist()
        missing = [one for one in subjects if one not in attributes]
        if missing:
            raise TraceError(f"no attributes for subject {missing[0]!r}; allowed: token ids for every subject")
        found = [set(map(int, attributes[one])) for one in subjects]
    else:
        found = [set(map(int, one)) for one in attributes]
        if len(found) != batch:
            raise TraceError(f"attributes has {len(found)} entries; allowed: one per prompt, {batch}")
    bad = [one for one in found if not one or not 0 <= min(one) <= max(one) < vocab]
    if bad:
        raise TraceError(
            f"attributes holds {sorted(bad[0])}; allowed: token ids 0 … {vocab - 1}, at least one per subject"
        )
    return found


def _others(attributes: Any, sets: list[set[int]], prompts: Any, seed: int) -> list[set[int]]:
    """Another subject's attributes for each example, without its own; of a mapping any subject's, else another example's."""
    if isinstance(attributes, Mapping) and len(attributes) > 1:
        names, rng, pool = list(attributes), np.random.default_rng(seed), []
        for subject in prompts.table["subject"]:
            at = (names.index(subject) + 1 + rng.integers(len(names) - 1)) % len(names)
            pool.append(set(map(int, attributes[names[at]])))
    elif len(sets) > 1:
        pool = [sets[other] for other in derangement(len(sets), seed).tolist()]
    else:
        raise TraceError("one subject has no other to be compared with; allowed: attributes by subject, of at least two, or "
                         "several prompts")  # fmt: skip
    return [other - own for own, other in zip(sets, pool, strict=True)]


def _layers(layers: Sequence[int] | None, n: int, knock_out: str | None) -> list[int]:
    if layers is None:
        return list(range(n)) if knock_out is None else [n - 1]
    bad = [one for one in layers if not isinstance(one, int) or not 0 <= one < n]
    if bad or not len(layers):
        raise TraceError(f"layers={list(layers)!r} is not allowed; allowed: 0 … {n - 1}")
    return list(layers)
