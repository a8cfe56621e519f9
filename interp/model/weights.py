"""Named groups of a model's weights, to count, read, swap between two models, draw again and train alone.

`GROUPS` may overlap (attention = qk + ov); `PARTITION` holds every number once. Queries, keys and values share one matrix, so a
group is a choice of rows of each parameter.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch
from torch import Tensor

if TYPE_CHECKING:
    from interp.model.transformer import Transformer

PARTITION = ("embeddings", "unembedding", "qk", "ov", "ffn_in", "ffn_out", "norms")
WHOLES = {"attention": ("qk", "ov"), "ffn": ("ffn_in", "ffn_out"), "all": PARTITION}
GROUPS = (*PARTITION, *WHOLES)


class WeightsError(ValueError):
    """A group or layer that selects nothing, or two models whose weights do not correspond; the message says what is allowed."""


class Weights:
    """A model's weights by group: embeddings (token, position, segment; tied ones once), unembedding, qk (W_Q, W_K and their
    biases), ov (W_V, W_O), ffn_in (W_in, W_gate), ffn_out (W_out), norms; attention = qk + ov, ffn = ffn_in + ffn_out, all.

    groups: a name or several. layers: of the blocks (an encoder-decoder's: both stacks'), which leaves out what lies outside
    them; None is everything. Nothing changes in place: `swapped` and `reinitialised` return a new model."""

    def __init__(self, model: Transformer) -> None:
        self.model = model

    def __repr__(self) -> str:
        return "Weights(" + ", ".join(f"{name}: {self._count(name):,}" for name in PARTITION if self._count(name)) + ")"

    def select(self, groups: str | Iterable[str], layers: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Parameter name -> which of its rows belong to the groups, bool [rows]. WeightsError when none does."""
        wanted = _parts(groups)
        self._check_layers(layers)
        found: dict[str, Tensor] = {}
        for name, parameter in self.model.named_parameters():
            layer = _layer(name)
            if layers is not None and layer not in layers:
                continue
            rows = torch.zeros(parameter.shape[:1], dtype=torch.bool)
            for group, chosen in self._groups_of(name):
                if group in wanted:
                    rows[chosen] = True
            if bool(rows.any()):
                found[name] = rows.to(parameter.device)
        if not found:
            raise WeightsError(
                f"groups {sorted(wanted)} of layers {layers!r} hold no weights here; this model has {self!r}"
            )
        return found

    def read(self, groups: str | Iterable[str], layers: Sequence[int] | None = None) -> dict[str, Tensor]:
        """Parameter name -> the rows of the groups, copied."""
        named = dict(self.model.named_parameters())
        return {name: named[name].detach()[rows].clone() for name, rows in self.select(groups, layers).items()}

    def count(self, groups: str | Iterable[str] = "all", layers: Sequence[int] | None = None) -> int:
        """How many numbers."""
        sizes = {name: parameter.numel() for name, parameter in self.model.named_parameters()}
        chosen = self.select(groups, layers).items()
        return sum(int(rows.sum()) * (sizes[name] // rows.numel()) for name, rows in chosen)

    def table(self, other: Transformer | None = None) -> pd.DataFrame:
        """One row per group: group, parameters, share (of all), share_blocks (of attention + ffn; nan elsewhere), norm (‖w‖, all
        its numbers as one vector); with another model: distance ‖w − w'‖."""
        if other is not None:
            self.check_other(other)
        total, blocks = self._count("all"), self._count("attention") + self._count("ffn")
        inner = ("qk", "ov", "ffn_in", "ffn_out", "attention", "ffn")
        rows = []
        for group in GROUPS:
            if not self._count(group):
                continue
            mine = self.read(group)
            n = self._count(group)
            row = {"group": group, "parameters": n, "share": n / total,
                   "share_blocks": n / blocks if group in inner else float("nan"), "norm": _norm(mine)}  # fmt: skip
            if other is not None:
                theirs = other.weights.read(group)
                row["distance"] = _norm({name: mine[name] - theirs[name] for name in mine})
            rows.append(row)
        return pd.DataFrame(rows)

    @torch.no_grad()
    def swapped(
        self, donor: Transformer, groups: str | Iterable[str], layers: Sequence[int] | None = None
    ) -> Transformer:
        """A new model: this one with the groups' weights of `donor`, a model of the same config.

        Evidence of where a difference between the two lies only where both come from one ancestor: two trainings from different
        starts share no basis. Raises WeightsError.
        """
        self.check_other(donor)
        new, theirs = copy.deepcopy(self.model), dict(donor.named_parameters())
        for name, rows in self.select(groups, layers).items():
            dict(new.named_parameters())[name][rows] = theirs[name].detach()[rows]
        return new

    def reinitialised(self, groups: str | Iterable[str], seed: int, layers: Sequence[int] | None = None) -> Transformer:
        """A new model: this one with the groups' weights drawn again, as `Transformer(config, seed)` draws them."""
        fresh = type(self.model)(self.model.config, seed=seed).to(self.model.device, self.model.dtype)
        return self.swapped(fresh, groups, layers)

    def _count(self, group: str) -> int:
        wanted = _parts(group)
        named = self.model.named_parameters()
        return sum(p[chosen].numel() for name, p in named for found, chosen in self._groups_of(name) if found in wanted)

    def _groups_of(self, name: str) -> list[tuple[str, Any]]:
        """(group, rows) of one parameter; rows of different groups do not overlap."""
        if "norm" in name:
            return [("norms", ...)]
        if ".attention." in name or ".cross_attention." in name:
            if ".out." in name:
                return [("ov", ...)]
            config = self.model.config
            queries_keys = (config.n_heads + config.kv_heads) * config.head_size
            return [("qk", slice(None, queries_keys)), ("ov", slice(queries_keys, None))]
        if ".ffn." in name:
            return [("ffn_out" if ".down." in name else "ffn_in", ...)]
        return [("unembedding" if name.startswith("unembedding") or name == "b_U" else "embeddings", ...)]

    def _check_layers(self, layers: Sequence[int] | None) -> None:
        known = {_layer(name) for name, _ in self.model.named_parameters()} - {None}
        wrong = [layer for layer in layers or () if layer not in known]
        if wrong or (layers is not None and not len(layers)):
            raise WeightsError(f"layers={layers!r} is not allowed; allowed: some of 0 … {len(known) - 1}")

    def check_other(self, other: Transformer) -> None:
        """Raise WeightsError unless the other model's weights correspond to these."""
        if other.config != self.model.config:
            raise WeightsError(
                "the two models have different configs, so their weights do not correspond; allowed: one config"
            )


def _parts(groups: str | Iterable[str]) -> set[str]:
    """The groups of the partition that these names stand for."""
    names = [groups] if isinstance(groups, str) else list(groups)
    wrong = [name for name in names if name not in GROUPS]
    if wrong or not names:
        raise WeightsError(f"groups={groups!r} is not allowed; allowed: {', '.join(GROUPS)}")
    return {part for name in names for part in WHOLES.get(name, (name,))}


def _layer(name: str) -> int | None:
    parts = name.split(".")
    return int(parts[parts.index("blocks") + 1]) if "blocks" in parts else None


def _norm(parts: dict[str, Tensor]) -> float:
    return float(torch.stack([value.double().square().sum() for value in parts.values()]).sum().sqrt())
