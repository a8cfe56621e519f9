"""Patches by hand for the sweep tests: full forwards through the model's tap, and the pairs of prompts they are made on.

Nothing here is the engine's: a cell is a list of (site, index, new value); all cells of a call run as one batch, each part of
which has its own values written into it.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
from strategies import VOCAB, Case, small, translator
from torch import Tensor

from interp import Inputs, Metric, Site, Transformer, kl_divergence, logit_difference, loss, probability, run
from interp.metrics import evaluate

Write = tuple[str, Any, Tensor]  # site, index of [batch …], the dense value from which that index is taken


@dataclass
class Pair:
    """A model with a clean and a corrupted batch that differ in some tokens."""

    model: Transformer
    clean: Inputs
    corrupted: Inputs

    def ends(self, direction: str) -> tuple[Inputs, Inputs]:
        """(source, base): where values come from and where they are written."""
        return (self.clean, self.corrupted) if direction == "denoising" else (self.corrupted, self.clean)


def pair_of(case: Case, differ: tuple[int, ...] = (1, 3)) -> Pair:
    """The case's model, and its batch with other tokens at the positions `differ` (of the source too), and with roles."""
    real = [case.length - left - right for left, right in case.padding]
    if case.prefixes is not None:
        case = replace(case, prefixes=tuple(min(one, n) for one, n in zip(case.prefixes, real, strict=True)))
    model, inputs = case.build()
    if case.choices.get("norm") == "none":  # nothing keeps the stream small
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
    roles = {"late": inputs.last(), "own": _nth(inputs, 1)}
    source_roles = {} if inputs.source is None else {"word": _nth(inputs.encoder, 1)}
    clean = replace(inputs, roles=roles, source_roles=source_roles)
    corrupted = replace(clean, tokens=_other(clean.tokens, differ))
    if clean.source is not None:
        corrupted = replace(corrupted, source=_other(clean.source, differ[:2]))
    return Pair(model, clean, corrupted)


def _nth(inputs: Inputs, seed: int) -> Tensor:
    """A real position of each example, not the same one."""
    real = torch.ones_like(inputs.tokens).bool() if inputs.mask is None else inputs.mask
    return torch.stack([row.nonzero()[(seed + i) % int(row.sum()), 0] for i, row in enumerate(real)])


def _other(tokens: Tensor, differ: tuple[int, ...]) -> Tensor:
    changed = tokens.clone()
    for position in differ:
        changed[:, position % tokens.shape[1]] = (changed[:, position % tokens.shape[1]] + 1 + position) % VOCAB
    return changed


# Full forwards


def values_of(model: Any, inputs: Inputs) -> dict[str, Tensor]:
    """Every site's value in one run."""
    kept: dict[str, Tensor] = {}

    def keep(site: Site, value: Tensor) -> Tensor:
        kept[str(site)] = value.clone()
        return value

    with torch.no_grad():
        model(inputs, keep)
    return kept


def logits_by_hand(model: Any, inputs: Inputs, cells: list[list[Write]]) -> Tensor:
    """[cell batch pos vocab]: one full forward of all cells, with what each writes."""
    many = inputs.select(torch.arange(inputs.batch).repeat(len(cells)))

    def tap(site: Site, value: Tensor) -> Tensor:
        parts = value.clone().unflatten(0, (len(cells), -1))
        for part, cell in zip(parts, cells, strict=True):
            for name, index, new in cell:
                if name == str(site):
                    part[index] = new[index]
        return parts.flatten(0, 1)

    with torch.no_grad():
        return model(many, tap).unflatten(0, (len(cells), -1))


def by_hand(pair: Pair, cells: list[list[Write]], metric: Any, direction: str = "denoising") -> Tensor:
    """The metric [cell batch] of patched runs."""
    _, base = pair.ends(direction)
    return torch.stack([evaluate(metric, logits, pair.clean) for logits in logits_by_hand(pair.model, base, cells)])


def grid_cells(model: Any, site: str, by: tuple[str, ...], source: dict[str, Tensor], inputs: Inputs, positions=None):
    """The cells of one site's sweep, in order, as an experimenter would write them down."""
    *stack, name = site.split(".")
    found = [one for one in model.sites if one.name == name and (not stack or one.stack == stack[0])]
    sites = {one.layer: str(one) for one in found}
    spec = found[0].spec
    side = inputs.encoder if stack == ["encoder"] or name in ("cross_k", "cross_v") else inputs
    value = source[str(found[0])]
    axes = []
    for axis in by:
        if axis == "layer":
            axes.append(list(sites))
        elif axis == "position":
            axes.append(list(range(side.length)) if positions is None else positions)
        elif axis == "role":
            axes.append(list(side.roles))
        else:
            at = next(i for i, one in enumerate(spec.axes, 1) if one in ("head", "kv_head", "d_ff"))
            axes.append(list(range(value.shape[at])))
    cells = []
    for place in itertools.product(*axes):
        where = dict(zip(by, place, strict=True))
        rows: Any = slice(None)
        batch: Any = slice(None)
        if "position" in where or "role" in where:
            batch = torch.arange(side.batch)
            rows = side.roles[where["role"]] if "role" in where else torch.full((side.batch,), where["position"])
            if "position" in where and where["position"] < 0:
                rows = side.last() + 1 + where["position"]
        entry = where.get("head", where.get("neuron"))
        if spec.axes[0] == "head":
            index = (batch, slice(None) if entry is None else entry)
        else:
            index = (batch, rows) if entry is None else (batch, rows, entry)
        chosen = [sites[where["layer"]]] if "layer" in where else list(sites.values())
        cells.append([(one, index, source[one]) for one in chosen])
    return cells


def sites_of(model: Any, by: tuple[str, ...]) -> list[str]:
    """Every site that can be swept over these axes, one name per layer's sites, its stack where there are two."""
    needed = {"position": {"position"}, "role": {"position"}, "head": {"head", "kv_head"}, "neuron": {"d_ff"}}
    names = []
    for site in model.sites:
        able = all(needed[axis] & set(site.spec.axes) for axis in by if axis in needed)
        if able and (site.layer is not None or "layer" not in by):
            names.append(site.name if site.stack is None else f"{site.stack}.{site.name}")
    return list(dict.fromkeys(names))


def joint(parts: Any) -> list[Write]:
    """Several cells' writes in one."""
    return list(itertools.chain.from_iterable(parts))


# What is compared with what


def metric_of(name: str, pair: Pair) -> Any:
    """A metric by a short name."""
    inputs = pair.clean
    ids = torch.arange(inputs.batch) % VOCAB
    if name == "last":
        return logit_difference(ids, ids + 1)
    if name == "middle":
        return logit_difference(ids, 3, position=2)
    if name == "role":
        return probability(ids, position="own")
    if name == "loss":
        return loss(replace(inputs, prefix_length=None))
    if name == "kl":
        return kl_divergence(run(pair.model, inputs))
    if name == "all":
        return Metric("all", lambda x: x.square().mean((1, 2)), None, torch.arange(inputs.batch)[:, None])
    return squares


def squares(logits: Tensor) -> Tensor:
    """A plain function that reads everything, padding too, so it is only for inputs without."""
    return (logits * torch.linspace(-1, 1, logits.shape[-1]).to(logits)).sum(-1).square().mean(1)


METRICS = ("last", "middle", "role", "loss", "kl", "all", "plain")


def assert_close(got: Tensor, expected: Tensor, scale: float = 1.0, what: str = "") -> None:
    """Equal to 1e-12 of the largest value (or of `scale`, such as the size of the logits)."""
    largest = max(scale, float(expected.abs().max()))
    gap = float((got - expected).abs().max())
    assert gap <= 1e-12 * largest, f"{what}: differs by {gap:.3g} of {largest:.3g}"


# Models of every kind, and batches of them. Window 1 is left out where effects are asked for: its q and k do nothing.
_BIG = {"norm": "rmsnorm", "ffn": "swiglu", "positions": "rotary", "n_heads": 4, "n_kv_heads": 2, "bias": False}
CASES = {
    "textbook": Case(small()),
    "modern": Case(small(**_BIG, d_head=4, n_layers=3)),
    "post-norm": Case(small(norm_position="post", positions="sinusoidal")),
    "sums only": Case(small(norm="none", ffn="bilinear", bias=frozenset({"qkv", "unembed"}))),
    "attention only": Case(small(ffn="none", n_layers=3)),
    "post-norm attention only": Case(small(ffn="none", norm_position="post", final_norm=True)),
    "window": Case(small(window=2, n_layers=3, positions="rotary"), length=7),
    "everything": Case(
        small(qk_norm=True, embedding_norm=True, n_segments=3, window=3, ffn="geglu", tied_embeddings=True),
        padding=((1, 0), (0, 1)),
        segments=True,
    ),
    "left padding": Case(small(positions="rotary", rotary_fraction=0.5), ((0, 0), (2, 0), (3, 0)), length=6),
    "right padding": Case(small(attention_scale=1.0, qk_norm=True), ((0, 2), (0, 0)), length=6),
    "encoder": Case(small(kind="encoder", **_BIG)),
    "encoder, padded": Case(small(kind="encoder", window=2), ((1, 0), (0, 2)), length=6),
    "prefix": Case(small(kind="prefix-decoder"), prefixes=(0, 3)),
    "prefix, padded": Case(small(kind="prefix-decoder", window=2, norm_position="post"), ((2, 0), (0, 1)), (2, 1)),
    "two stacks": Case(translator(n_encoder_layers=2)),
    "two stacks, post-norm": Case(translator(norm_position="post", positions="rotary")),
    "two stacks, padded": Case(translator(**_BIG), ((0, 0), (2, 0)), source_padding=((0, 2), (1, 0)), source_length=5),
    "two stacks, sums only": Case(translator(norm="none", ffn="none"), source_padding=((1, 1), (0, 0))),
    "two stacks, window": Case(translator(window=2, final_norm=False, qk_norm=True, ffn="reglu", n_kv_heads=1)),
}


# The default tests' share: every kind, both norm positions, padding on either side.
FEW = ("modern", "post-norm", "everything", "encoder, padded", "two stacks, padded")
AXES = (("layer", "role"), ("layer", "position"), ("layer", "head"), ("layer",), ("head",), ("layer", "neuron"), ("role",),
        ("head", "role", "layer"), ("neuron", "position"), ("position",))  # fmt: skip


def able_axes(pair: Pair, site: str) -> list[tuple[str, ...]]:
    """The combinations of axes over which a site can be swept; positions only where all prompts have them."""
    side = (
        pair.clean.encoder
        if site.startswith("encoder.") or site.split(".")[-1] in ("cross_k", "cross_v")
        else pair.clean
    )
    return [by for by in AXES if site in sites_of(pair.model, by) and (side.mask is None or "position" not in by)]
