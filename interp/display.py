"""How results show themselves as the last value of a notebook cell: small tables of HTML, everything escaped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

STYLE = (
    "font:13px/1.45 system-ui,sans-serif;color:#1c2330;background:#fff;border:1px solid #d5dae2;border-radius:8px;"
    "padding:8px 12px;margin:0 0 8px;width:fit-content;max-width:100%;overflow-x:auto;text-align:left;box-sizing:border-box"
)
CELL = "padding:1px 14px 1px 0;text-align:left;vertical-align:top;border:0;background:none;color:inherit;overflow-wrap:break-word"
SHOWN = 12  # changes listed one by one


def card(title: str, lines: Iterable[str] = (), columns: Sequence[str] = (), rows: Iterable[Sequence[str]] = ()) -> str:
    """A heading, sentences and one table as HTML; styles stand in the elements, so nothing else on the page changes."""
    said = "".join(f"<div>{escape(line)}</div>" for line in lines)
    head = "".join(f'<th style="{CELL};color:#4a5363;font-weight:600">{escape(name)}</th>' for name in columns)
    body = "".join(
        "<tr>" + "".join(f'<td style="{CELL}">{escape(cell)}</td>' for cell in row) + "</tr>" for row in rows
    )
    header = f"<thead><tr>{head}</tr></thead>" if head else ""
    table = f'<table style="border-collapse:collapse;margin:4px 0 0;font-size:inherit">{header}<tbody>{body}</tbody></table>'
    return f'<div class="interp-card" style="{STYLE}"><b>{escape(title)}</b>{said}{table if body else ""}</div>'


def site_html(site: Any) -> str:
    """A Site: what it is, the book's symbol and equation, its axes, TransformerLens's name (of a model with one stack)."""
    spec = site.spec
    what, _, equation = spec.meaning.removesuffix(")").partition(" (7.")  # the dictionary's meanings end in "(7.28)"
    hook = spec.transformer_lens.replace("blocks.L.", f"blocks.{site.layer}.")
    rows = [
        ("what it is", what if equation else spec.meaning),
        ("book's symbol", spec.symbol),
        ("equation", f"7.{equation} of SLP3's draft" if equation else ""),
        ("shape", f"[batch {' '.join(axes(spec))}]"),
        ("TransformerLens", hook if site.stack is None else ""),
    ]
    return card(f"Site {site}", rows=[row for row in rows if row[1]])


def run_html(run: Any) -> str:
    """A Run: logits, inputs, the changes that were made, and what was recorded."""
    mask = run.inputs.mask
    padded = "" if mask is None else f", {int(mask.sum())} of {mask.numel()} tokens real"
    roles = f"; roles: {', '.join(map(str, run.inputs.roles))}" if run.inputs.roles else ""
    lines = [f"logits [batch pos vocab] = {shape(run.logits)}, {dtype(run.logits)}",
             f"inputs {shape(run.inputs.tokens)} tokens{padded}{roles}"]  # fmt: skip
    if run.changes:
        more = f"; … {len(run.changes) - SHOWN} more" if len(run.changes) > SHOWN else ""
        lines.append(f"changed: {'; '.join(run.changes[:SHOWN])}{more}")
    return card("Run", [*lines, total(run.cache)], *recorded(run.cache))


def cache_html(cache: Mapping[Any, Any]) -> str:
    """A Cache: one row per recorded site name, layers of one shape together."""
    return card("Cache", [total(cache)], *recorded(cache))


def total(cache: Mapping[Any, Any]) -> str:
    """How many sites were recorded, and their bytes."""
    if not cache:
        return "nothing recorded"
    return f"recorded: {len(cache)} site{'s' * (len(cache) != 1)}, {size(sum(map(bytes_of, cache.values())))}"


def recorded(cache: Mapping[Any, Any]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Columns and rows: site, layers, axes, shape and type of each, bytes of all."""
    groups: dict[tuple[str, ...], list[tuple[int | None, int]]] = {}
    for site, value in cache.items():
        name = site.name if site.stack is None else f"{site.stack}.{site.name}"
        key = (name, f"[batch {' '.join(axes(site.spec))}]", shape(value), dtype(value))
        groups.setdefault(key, []).append((site.layer, bytes_of(value)))
    rows = [
        (name, spans([layer for layer, _ in found if layer is not None]), named, each, kind, size(sum(n for _, n in found)))
        for (name, named, each, kind), found in groups.items()
    ]  # fmt: skip
    return ("site", "layers", "axes", "each", "type", "size"), rows


def change_texts(changes: Mapping[Any, Sequence[Any]]) -> tuple[str, ...]:
    """The interventions at each site in words: the objects themselves would keep their tensors alive."""
    return tuple(change_text(change) for found in changes.values() for change in found)


def change_text(change: Any) -> str:
    """An intervention in a few words: its kind, where, and numbers; tensors by their shape, runs by name only."""
    at = getattr(change, "at", ())
    given = [f"at={value_text(at)}"] if not isinstance(at, tuple) or at else []
    for name, value in getattr(change, "__dict__", {}).items():
        if name not in ("site", "at") and not name.startswith("_"):
            given.append(f"{name}={value_text(value)}")
    return f"{type(change).__name__}({', '.join([str(change.site), *given])})"


def value_text(value: Any) -> str:
    """A value that may be a tensor, a run or a selection, short enough for one line."""
    if isinstance(value, slice):
        return ":".join("" if part is None else str(part) for part in (value.start, value.stop))
    if isinstance(value, list | tuple):
        shown = [value_text(one) for one in value[:6]] + ["…"] * (len(value) > 6)
        return f"[{', '.join(shown)}]"
    if value is None or isinstance(value, str | bool | int):
        return repr(value)[:60]
    if isinstance(value, float):
        return f"{value:.4g}"
    if hasattr(value, "shape"):
        return f"tensor {shape(value)}"  # never its numbers: reading them would wait for the GPU
    return type(value).__name__


def axes(spec: Any) -> list[str]:
    """A site's axes after batch, as docs/sites.md writes them."""
    return ["1" if axis == "one" else axis for axis in spec.axes]


def shape(value: Any) -> str:
    return "[" + " ".join(map(str, value.shape)) + "]"


def dtype(value: Any) -> str:
    return str(value.dtype).removeprefix("torch.")


def bytes_of(value: Any) -> int:
    return value.numel() * value.element_size()


def size(count: int) -> str:
    """Bytes with a unit of 1000s: 1.5 MB."""
    for unit in ("B", "kB", "MB"):
        if count < 999.5:  # 999.6 would be printed as 1e+03
            return f"{count:.3g} {unit}"
        count /= 1000  # type: ignore[assignment]
    return f"{count:,.3g} GB" if count < 1000 else f"{count:,.0f} GB"


def spans(layers: Sequence[int]) -> str:
    """Layer numbers with runs drawn together: 0–3, 5."""
    parts: list[list[int]] = []
    for layer in sorted(layers):
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ", ".join(str(low) if low == high else f"{low}–{high}" for low, high in parts)
