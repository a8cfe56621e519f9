"""Tables of logit attribution, head scores and composition as figures; several examples are averaged."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
from matplotlib.figure import Figure

from interp.plots.bars import effect_bars
from interp.plots.heatmap import effect_heatmaps
from interp.plots.style import PlotError, need

LOGITS = "direct attribution (logits)"


def attribution_bars(table: pd.DataFrame, title: str = "", unit: str = LOGITS) -> Figure:
    """One bar per component of `direct_logit_attribution`'s table, in the order of writing, the constants last."""
    need(table, ["component", "attribution"])
    return effect_bars(table.assign(site=title), "component", value="attribution", unit=unit)


def attribution_heatmap(table: pd.DataFrame, title: str = "", unit: str = LOGITS) -> Figure:
    """Layer × part of a block (heads, attention, FFN, biases); colour centred at 0.

    table: `direct_logit_attribution`'s with by="component" or "head". What belongs to no layer (embeddings, the final norm's
    offset, the unembedding's bias) has no cell: see `attribution_bars`.
    """
    need(table, ["component", "layer", "attribution"])
    if "neuron" in table.columns and bool(table["neuron"].notna().any()):
        raise PlotError("a table by neuron has no layer × component grid; allowed: by='component', 'head' or 'source'")
    inside = table[table["layer"].notna()]
    need(inside, ["component"])
    total = inside.groupby(["example", "component", "layer"] if "example" in inside else ["component", "layer"])
    cells = total["attribution"].sum().reset_index()
    names = cells["component"].str.split(".", n=1).str[1].str.replace(r"\[\d+\]", "", regex=True)  # sources: summed
    cells = cells.assign(part=names).groupby([*(["example"] if "example" in cells else []), "part", "layer"])
    cells = cells["attribution"].sum().reset_index()
    order = sorted(set(cells["part"]), key=_order)
    cells = cells.assign(x=cells["part"].map({name: i for i, name in enumerate(order)}), panel=title)
    figure = effect_heatmaps(cells.astype({"layer": int}), "x", order, "attribution", unit, panel="panel", y="layer")
    figure.axes[0].set_xlabel("part of the block")
    return figure


def head_score_heatmaps(table: pd.DataFrame, convention: str = "mean", title: str = "") -> Figure:
    """One panel per score of `head_scores`'s table in one convention: layer × head, colour centred at 0."""
    need(table, ["score", "convention", "layer", "head", "value"])
    chosen = table[table["convention"] == convention]
    if chosen.empty:
        raise PlotError(f"convention={convention!r} is not in the table; it has {sorted(set(table['convention']))}")
    unit = "share of attention" if convention != "eigenvalues" else "Σλ / Σ|λ|"
    return effect_heatmaps(chosen, "head", None, "value", f"{unit} ({convention})", title, "layer", "score")


def composition_heatmap(table: pd.DataFrame, value: str | None = None, title: str = "") -> Figure:
    """One panel per kind of `composition_scores`'s table: later head upward, earlier head to the right, named layer.head.

    value: a column, by default the score minus its null's mean where there is a null, else the score. Several offsets are
    averaged; choose one to see it alone.
    """
    need(table, ["kind", "layer", "head", "earlier_layer", "earlier_head", "score"])
    unit = (value or "composition score").replace("_", " ")
    if value is None and "null_mean" in table.columns:
        table, value, unit = table.assign(excess=table["score"] - table["null_mean"]), "excess", "score − null mean"
    later, rows = _numbered(table, "layer", "head")
    earlier, columns = _numbered(table, "earlier_layer", "earlier_head")
    cells = table.assign(later=later, earlier=earlier, panel=table["kind"].str.upper() + "-composition")
    figure = effect_heatmaps(cells, "earlier", columns, value or "score", unit, title, "later", "panel")
    step = max(1, round(len(rows) / 24))
    figure.axes[0].set_yticks(range(0, len(rows), step), rows[::step])
    figure.axes[0].set_ylabel("later head")
    for ax in figure.axes[: len(set(cells["panel"]))]:
        ax.set_xlabel("earlier head")
    return figure


def _order(part: str) -> tuple[int, int, str]:
    """Heads by number, then the FFN, then biases; cross-attention after self-attention."""
    kind = part.removeprefix("cross_")
    place = ("attn", "ffn", "b_O", "b_out").index(kind) + 1 if not kind.startswith("head") else 0
    return place, (1000 if part != kind else 0) + int(kind[4:] or 0) if place == 0 else int(part != kind), part


def _numbered(table: pd.DataFrame, layer: str, head: str) -> tuple[list[int], Sequence[str]]:
    """Each row's head counted from 0 over the layers, and the names in that order."""
    pairs = list(zip(table[layer].astype(int), table[head].astype(int), strict=True))
    order = {pair: i for i, pair in enumerate(sorted(set(pairs)))}
    return [order[pair] for pair in pairs], [f"{one}.{two}" for one, two in order]
