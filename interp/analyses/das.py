"""Distributed alignment search (Geiger et al. 2023): which subspace of an activation carries a variable, by interchange.

An interchange replaces the part of a base activation that lies in a subspace by a source's. If the subspace carries the variable,
the answer becomes the counterfactual one. A learned subspace can also work through directions that the model does not use
(Makelov et al. 2023: the subspace illusion), so its accuracy stands beside controls on the same held-out pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from interp.analyses.interchange import DASError, Interchange, same_size, vectors
from interp.analyses.splits import held_out_names, sequence_names
from interp.at import positions
from interp.hookable import Hookable, UnsupportedModelError, require_head
from interp.interventions import Add
from interp.metrics import wide
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.run import Run, prepare, run
from interp.sites import Site, resolve


@dataclass(frozen=True, eq=False)
class DAS:
    """A learned orthonormal basis [d dim], what it was learned on, and how it does on pairs that it was not learned on.

    held_out: indices of the pairs split off before training. history: columns step, loss (nats per pair of the step's batch).
    """

    basis: Tensor
    site: Site
    held_out: Tensor
    history: pd.DataFrame
    rows: pd.DataFrame

    def __repr__(self) -> str:
        return f"DAS({self.site}, basis {tuple(self.basis.shape)}, {len(self.held_out)} pairs held out)"

    def table(self) -> pd.DataFrame:
        """One row per arm × draw × split: columns arm, draw, split, dim, n, accuracy, kept, change_norm.

        accuracy: share of pairs whose top token is the counterfactual answer; kept: whose top token stays what it was without
        a change; change_norm: mean length of what was added. Arms: das (also on the training pairs); none (no change: pairs that
        have the answer anyway); random basis (of equal dim); placebo (a random direction, as long as das's change); full (the
        whole vector); random model (the same training on untrained weights: what search alone can find).
        """
        return self.rows.copy()

    @classmethod
    def train(
        cls,
        model: Hookable,
        base: Any,
        source: Any,
        labels: Tensor,
        site: str | Site,
        at: Any,
        dim: int,
        position: Any = -1,
        steps: int = 200,
        learning_rate: float = 1e-2,
        batch_size: int = 64,
        held_out: float | Sequence[int] = 0.25,
        draws: int = 5,
        seed: int = 0,
        random_model: Hookable | None = None,
        progress: bool = False,
        tokenizer: Any = None,
        prefix: Sequence[int] | None = None,
    ) -> DAS:
        """Learn the basis by the cross-entropy of the counterfactual answers under interchange (Adam); the model stays frozen.

        base, source: inputs, row i of both forming a pair; labels [pair]: the token that the interchange should make the answer
        at `position`. site, at: as for `interchange`. held_out: a share of the different pairs, or the indices of pairs; prompts
        that recur in other pairs stand on both sides unless the indices prevent it. draws: random bases and placebos.
        random_model: an untrained model of the same kind; default a new one of the same config for our own. Raises DASError.
        """
        require_head(model)
        base, source = (prepare(model, one, tokenizer, prefix) for one in (base, source))
        same_size(base, source)
        pairs = _Pairs(base, source, _labels(labels, base, model), resolve(site, model.sites), at, position, batch_size)
        generator = torch.Generator().manual_seed(seed)
        apart, used = _split(pairs, held_out, generator)
        if random_model is None:
            random_model = _untrained(model, seed)
        basis, history = _learn(model, pairs, used, dim, steps, learning_rate, seed, progress)
        other, _ = _learn(random_model, pairs, used, dim, steps, learning_rate, seed, progress)
        rows = _arms(model, pairs, basis, apart, used, draws, generator)
        untrained = _row(random_model, pairs, apart, _changes(random_model, pairs, apart, other))
        rows.append({"arm": "random model", "draw": 0, "split": "held_out", **untrained})
        table = pd.DataFrame(rows)
        table.insert(
            3, "dim", [basis.shape[0] if arm == "full" else 0 if arm == "none" else dim for arm in table["arm"]]
        )
        return cls(basis, pairs.site, apart, history, table)


@dataclass(frozen=True, eq=False)
class _Pairs:
    base: Inputs
    source: Inputs
    labels: Tensor
    site: Site
    at: Any
    position: Any
    size: int

    def place(self, rows: Tensor) -> Any:
        """`at` for some pairs: per-example entries follow the pairs."""
        entries = self.at if isinstance(self.at, tuple) else (self.at,)
        return tuple(one[rows.to(one.device)] if isinstance(one, Tensor) else one for one in entries)

    def logits(self, found: Run, rows: Tensor) -> Tensor:
        """What the answer is read from [pair vocab]."""
        where = self.position[rows.to(self.position.device)] if isinstance(self.position, Tensor) else self.position
        index = positions(found.inputs, where)
        return wide(found.logits[torch.arange(len(index), device=index.device), index])


def _learn(
    model: Hookable, pairs: _Pairs, used: Tensor, dim: int, steps: int, rate: float, seed: int, progress: bool
) -> tuple[Tensor, pd.DataFrame]:
    """The basis [d dim] and the curve; W is free, its QR factor is the basis."""
    theirs = _all_vectors(model, pairs, pairs.source, used)  # once: they do not depend on the basis
    d = theirs.shape[-1]
    if not isinstance(dim, int) or isinstance(dim, bool) or not 1 <= dim <= d:
        raise DASError(f"dim={dim!r} is not allowed for '{pairs.site}'; allowed: 1 … {d}")
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(d, dim, generator=generator, dtype=torch.float64).to(theirs).requires_grad_()
    descent, losses = torch.optim.Adam([W], lr=rate), []
    order = torch.empty(0, dtype=torch.long)
    for _ in tqdm(range(steps), disable=not progress, desc="DAS"):
        if not len(order):
            order = torch.randperm(len(used), generator=generator)
        some, order = order[: pairs.size], order[pairs.size :]
        rows = used[some]
        at, base = pairs.place(rows), pairs.base.select(rows)
        with torch.enable_grad():
            changed = run(
                model, base, change=Interchange(pairs.site, theirs[some], torch.linalg.qr(W).Q, at), grad=True
            )
            loss = F.cross_entropy(pairs.logits(changed, rows), pairs.labels[rows])
            (W.grad,) = torch.autograd.grad(loss, [W])  # of W alone: the model gets no gradients
        descent.step()
        losses.append(float(loss.detach()))
    return torch.linalg.qr(W.detach()).Q, pd.DataFrame({"step": range(steps), "loss": losses})


def _arms(
    model: Hookable, pairs: _Pairs, basis: Tensor, apart: Tensor, used: Tensor, draws: int, generator: torch.Generator
) -> list[dict[str, Any]]:
    """Every arm on the trained model."""
    change, whole = _changes(model, pairs, apart, basis), _changes(model, pairs, apart)
    made = [
        ("das", 0, "held_out", change),
        ("none", 0, "held_out", torch.zeros_like(whole)),
        ("full", 0, "held_out", whole),
    ]
    for draw in range(draws):
        B = torch.linalg.qr(torch.randn(basis.shape, generator=generator, dtype=torch.float64)).Q.to(basis)
        made.append(("random basis", draw, "held_out", whole @ B @ B.T))
    for draw in range(draws):
        noise = torch.randn(change.shape, generator=generator, dtype=torch.float64).to(change)
        made.append(
            ("placebo", draw, "held_out", noise / noise.norm(dim=-1, keepdim=True) * change.norm(dim=-1, keepdim=True))
        )
    rows = [
        {"arm": arm, "draw": draw, "split": split, **_row(model, pairs, apart, delta)}
        for arm, draw, split, delta in made
    ]
    learned = _row(model, pairs, used, _changes(model, pairs, used, basis))
    return [*rows, {"arm": "das", "draw": 0, "split": "train", **learned}]


def _changes(model: Hookable, pairs: _Pairs, rows: Tensor, basis: Tensor | None = None) -> Tensor:
    """source − base [pair … d], or its component in span(basis)."""
    whole = _all_vectors(model, pairs, pairs.source, rows) - _all_vectors(model, pairs, pairs.base, rows)
    return whole if basis is None else whole @ basis.to(whole) @ basis.to(whole).T


def _all_vectors(model: Hookable, pairs: _Pairs, inputs: Inputs, rows: Tensor) -> Tensor:
    """What the base or source runs of some pairs have at the site [pair … d]."""
    parts = [vectors(model, inputs.select(some), pairs.site, pairs.place(some)) for some in rows.split(pairs.size)]
    return wide(torch.cat(parts))


@torch.no_grad()
def _row(model: Hookable, pairs: _Pairs, rows: Tensor, change: Tensor) -> dict[str, Any]:
    """How the pairs answer with `change` added at the site."""
    right = same = 0
    for some, delta in zip(rows.split(pairs.size), change.split(pairs.size), strict=True):
        base = pairs.base.select(some)
        without = pairs.logits(run(model, base, wanted=[pairs.site]), some).argmax(-1)
        found = pairs.logits(run(model, base, change=Add(pairs.site, delta, pairs.place(some))), some).argmax(-1)
        right += int((found == pairs.labels[some]).sum())
        same += int((found == without).sum())
    n = len(rows)
    norm = float(change.flatten(1).norm(dim=-1).mean())
    return {"n": n, "accuracy": right / n, "kept": same / n, "change_norm": norm}


def _split(pairs: _Pairs, held_out: Any, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Indices of the pairs held out and of those trained on."""
    n = pairs.base.batch
    if isinstance(held_out, float):
        if not 0 < held_out < 1:
            raise DASError(
                f"held_out={held_out!r} is not allowed; allowed: a share between 0 and 1, or indices of pairs"
            )
        names = ["".join(pair) for pair in zip(*map(sequence_names, (pairs.base, pairs.source)), strict=True)]
        names = [f"{name} {label}" for name, label in zip(names, pairs.labels.tolist(), strict=True)]
        apart = held_out_names(names, held_out, generator)
        chosen = torch.tensor([name in apart for name in names])
    else:
        index = torch.as_tensor(held_out, dtype=torch.long)
        if index.ndim != 1 or not len(index) or int(index.min()) < 0 or int(index.max()) >= n:
            raise DASError(
                f"held_out={held_out!r} is not allowed; allowed: a share between 0 and 1, or indices in 0 … {n - 1}"
            )
        chosen = torch.zeros(n, dtype=torch.bool)
        chosen[index] = True
    if bool(chosen.all()):
        raise DASError(f"all {n} pairs would be held out and none trained on; allowed: at least two different pairs")
    return chosen.nonzero()[:, 0], (~chosen).nonzero()[:, 0]


def _untrained(model: Hookable, seed: int) -> Hookable:
    if not isinstance(model, Transformer):
        raise UnsupportedModelError(f"the untrained control of a {type(model).__name__} has to be given: random_model=, the same "
                                    "architecture with weights drawn at random")  # fmt: skip
    return Transformer(model.config, seed=seed + 1).to(device=model.device, dtype=model.dtype)


def _labels(labels: Any, base: Inputs, model: Hookable) -> Tensor:
    found = torch.as_tensor(labels).to(base.tokens.device)
    if (
        tuple(found.shape) != (base.batch,)
        or found.dtype.is_floating_point
        or not 0 <= int(found.min()) <= int(found.max()) < model.config.vocab
    ):
        raise DASError(f"labels must be token ids [pair] = ({base.batch},) in 0 … {model.config.vocab - 1}, got {found.dtype} "
                       f"{tuple(found.shape)}")  # fmt: skip
    return found.long()
