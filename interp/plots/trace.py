"""Causal tracing, attention knock-out and attribute rates: heat maps of role × layer as in ROME's figure 2, lines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from interp.plots.style import COLOURS, PlotError, need, new_figure

ROLES = ("subject_first", "subject_middle", "subject_last", "first_subsequent", "further", "last")
ROLE_NAMES = {"earlier": "before the subject", "subject_first": "first subject token", "subject_middle": "middle subject tokens",
              "subject_last": "last subject token", "first_subsequent": "first subsequent token", "further": "further tokens",
              "last": "last token"}  # fmt: skip
SITES = {"resid_post": "state after the layer", "ffn_out": "FFN output", "attn_out": "attention output"}
UNITS = {"probability": "probability", "logit_difference": "logits"}


def trace_heatmap(
    effects: pd.DataFrame,
    corruption: str | None = None,
    metric: str | None = None,
    value: str = "aie",
    roles: Sequence[str] = ROLES,
    title: str = "",
) -> Figure:
    """Average indirect effect, role upward × layer to the right, one panel per site, each with its own scale centred at 0.

    effects: of `trace_effects`; corruption, metric: which rows, needed where there are several. value: "aie" or "share".
    Columns of windows that are cut off at an end of the model are hatched; roles that no prompt has are grey.
    """
    table = _one_map(effects, corruption, metric)
    need(table, ["site", "severed", "layer", "role", "clipped", value, "n"])
    table = table[(table["severed"] == "none") & table["role"].isin(roles)]
    shown = [role for role in roles if (table["role"] == role).any()]
    if not shown:
        raise PlotError(f"the table has none of the roles {list(roles)}")
    sites, counts = _in_order(table["site"]), table.groupby("role")["n"].max()
    layers = sorted(set(table["layer"]))
    figure, axes = new_figure(len(sites), 3.9, 2.6, sharey=True)
    for ax, site in zip(axes, sites, strict=True):
        rows = table[table["site"] == site]
        grid = rows.pivot_table(index="role", columns="layer", values=value).reindex(index=shown[::-1], columns=layers)
        top = max(float(rows[value].abs().max()), 1e-9)
        ax.set_facecolor("#dddddd")
        image = ax.imshow(np.ma.masked_invalid(grid.to_numpy(float)), aspect="auto", origin="lower", cmap="RdBu_r",
                          vmin=-top, vmax=top)  # fmt: skip
        for at in np.flatnonzero([layer in set(rows.loc[rows["clipped"], "layer"]) for layer in layers]):
            ax.add_patch(
                Rectangle((at - 0.5, -0.5), 1, len(shown), fill=False, hatch="//", edgecolor="#999999", linewidth=0)
            )
        step = max(1, round(len(layers) / 8))
        ax.set_xticks(range(0, len(layers), step), [str(layer) for layer in layers[::step]])
        ax.set(title=SITES.get(site, site), xlabel=_layer_label(rows))
        figure.colorbar(image, ax=ax, label=_unit(table, value), shrink=0.9, pad=0.02)
    axes[0].set_yticks(range(len(shown)), [f"{ROLE_NAMES.get(role, role)} ({counts[role]})" for role in shown[::-1]])
    axes[0].set_ylabel("token (number of facts)")
    if title:
        figure.suptitle(title)
    return figure


def trace_lines(
    effects: pd.DataFrame,
    corruption: str | None = None,
    metric: str | None = None,
    roles: Sequence[str] = ("subject_last", "last"),
    title: str = "",
) -> Figure:
    """Average indirect effect over layers with its interval: one panel per role; lines: the sites, and severed states dashed."""
    table = _one_map(effects, corruption, metric)
    need(table, ["site", "severed", "layer", "role", "aie", "low", "high", "n"])
    shown = [role for role in roles if (table["role"] == role).any()]
    if not shown:
        raise PlotError(f"the table has none of the roles {list(roles)}; it has {sorted(set(table['role']))}")
    figure, axes = new_figure(len(shown), 3.9, 3.1, sharey=True)
    handles: dict[str, Any] = {}
    for ax, role in zip(axes, shown, strict=True):
        here = table[table["role"] == role]
        here = here.assign(_=here["site"].map(_in_order(table["site"]).index)).sort_values("_", kind="stable")
        for colour, ((site, severed), rows) in zip(
            COLOURS, here.groupby(["site", "severed"], sort=False), strict=False
        ):
            name = SITES.get(str(site), str(site)) + (
                "" if severed == "none" else f", {_severed(str(severed))} severed"
            )
            handles[name] = _band(ax, rows, "aie", "low", "high", colour, "-" if severed == "none" else "--")
        ax.set(
            title=f"{ROLE_NAMES.get(role, role)} (n = {int(here['n'].max())} facts)",
            xlabel="layer (centre of a window)",
        )
    axes[0].set_ylabel(f"average indirect effect ({_unit(table, 'aie', short=True)})")
    figure.legend(handles.values(), handles, loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    if title:
        figure.suptitle(title)
    return figure


def knock_out_curves(
    effects: pd.DataFrame, metric: str = "probability", value: str = "percent", title: str = ""
) -> Figure:
    """Change when attention edges from the final position are cut, over the centre of the window; of `knock_out_effects`.

    value: "percent" (mean of relative changes) or "change" (the metric's unit), both with intervals over facts.
    """
    ends = {"percent": ("percent_low", "percent_high"), "change": ("low", "high")}
    if value not in ends:
        raise PlotError(f"value={value!r} is not allowed; allowed: {', '.join(map(repr, ends))}")
    need(effects, ["metric", "to", "layer", "window", value, *ends[value], "n"])
    table = effects[effects["metric"] == metric]
    if not len(table):
        raise PlotError(f"metric={metric!r} is not in the table; it has {sorted(set(effects['metric']))}")
    figure, [ax] = new_figure(1, 5.0, 3.2)
    for colour, (name, rows) in zip(COLOURS, table.groupby("to", sort=False), strict=False):
        line = _band(ax, rows, value, *ends[value], colour)
        line.set_label(f"final → {str(name).replace('_', ' ')}")
    unit = "%" if value == "percent" else UNITS.get(metric, metric)
    ax.set(
        xlabel=f"centre of {int(table['window'].iloc[0])} layers",
        ylabel=f"change of {metric.replace('_', ' ')} ({unit})",
    )
    ax.axhline(0, color="#999999", linewidth=0.7)
    ax.set_title(title or f"attention edges cut (n = {int(table['n'].max())} facts)")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def rate_curves(
    table: pd.DataFrame, line: str = "site", x: str = "layer", label: str = "rate", title: str = ""
) -> Figure:
    """A rate over layers with its interval, one line per value of `line`; of `rates` (columns line, x, mean, low, high, n)."""
    need(table, [line, x, "mean", "low", "high", "n"])
    figure, [ax] = new_figure(1, 4.8, 3.1)
    for colour, (name, rows) in zip(COLOURS, table.groupby(line, sort=False), strict=False):
        _band(ax, rows.sort_values(x), "mean", "low", "high", colour, x=x).set_label(
            SITES.get(str(name), str(name)).replace("_", " ")
        )
    ax.set(
        xlabel=x.replace("_", " "), ylabel=f"{label} (share of facts' tokens)" if label == "attribute rate" else label
    )
    ax.set_ylim(bottom=0)
    ax.set_title(title or f"n = {int(table['n'].max())} facts")
    figure.legend(loc="outside lower center", ncols=3, fontsize=8, frameon=False)
    return figure


def _band(
    ax: Axes, rows: pd.DataFrame, value: str, low: str, high: str, colour: str, style: str = "-", x: str = "layer"
):
    rows = rows.sort_values(x)
    at = rows[x].astype(int)
    (line,) = ax.plot(at, rows[value], color=colour, linestyle=style, marker=".", markersize=3, linewidth=1.3)
    ax.fill_between(at, rows[low].astype(float), rows[high].astype(float), color=colour, alpha=0.18, linewidth=0)
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    return line


def _one_map(effects: pd.DataFrame, corruption: str | None, metric: str | None) -> pd.DataFrame:
    """The rows of one corruption and metric; PlotError where there are several and none was named."""
    need(effects, ["corruption", "metric"])
    for column, wanted in (("corruption", corruption), ("metric", metric)):
        held = list(dict.fromkeys(effects[column]))
        if wanted is None and len(held) > 1:
            raise PlotError(f"the table has several of {column}: {held}; say which, {column}=")
        if wanted is not None and wanted not in held:
            raise PlotError(f"{column}={wanted!r} is not in the table; it has {held}")
        effects = effects[effects[column] == (wanted or held[0])]
    return effects


def _in_order(sites: pd.Series) -> list[str]:
    """States, FFN and attention as in ROME's figure, any other site after them."""
    order = list(SITES)
    return sorted(dict.fromkeys(sites), key=lambda site: order.index(site) if site in order else len(order))


def _unit(table: pd.DataFrame, value: str, short: bool = False) -> str:
    metric = str(table["metric"].iloc[0])
    if value == "share":
        return f"share of the total effect\n({metric.replace('_', ' ')})"
    unit = UNITS.get(metric, metric)
    return unit if short else f"average indirect effect\n({unit})"


def _layer_label(rows: pd.DataFrame) -> str:
    width = int((rows["last_layer"] - rows["first_layer"]).max()) + 1
    cut = "\n(hatched: cut off at an end)" if rows["clipped"].any() else ""
    return "restored layer" if width == 1 else f"centre of {width} restored layers{cut}"


def _severed(name: str) -> str:
    return {"ffn_out": "FFNs", "attn_out": "attention"}.get(name, name)
