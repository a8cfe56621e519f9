"""How an effect divides among parts that do not add up: exact Shapley shares over groups of weights, or over sites × roles.

Weight interchange asks where a change of what a model knows is stored: two models of one ancestor, the groups of one put into the
other in every combination. Site shares ask what carries an effect through one model: every combination of patches (mediation)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.func import functional_call

from interp.hookable import Hookable
from interp.interventions import Replace
from interp.metrics import Metric, evaluate
from interp.model.transformer import Transformer
from interp.run import prepare, run
from interp.sites import Site, resolve
from interp.stats import Shapley, coalitions, shapley
from interp.sweep import run_many


class SharesError(ValueError):
    """Players that overlap or select nothing; the message says what is allowed."""


@torch.no_grad()
def weight_shares(
    old: Transformer,
    new: Transformer,
    inputs: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    players: Mapping[str, Sequence[str]] | Sequence[str] = ("embeddings", "attention", "ffn"),
    layers: Sequence[int] | None = None,
) -> Shapley:
    """v(S) = the metric [example] of `old` with the groups of S from `new`; its Shapley values say what each group's change adds.

    players: names of weight groups, or name -> groups. What is in no player stays old. Only models of one ancestor (one
    fine-tuned, or both) share a basis. A metric that saturates (probability, accuracy) makes parts look like a combination
    lock where logits add. Raises SharesError, WeightsError.
    """
    named = (
        {name: (name,) for name in players}
        if not isinstance(players, Mapping)
        else {k: tuple(v) for k, v in players.items()}
    )
    inputs, theirs, mine = prepare(old, inputs), dict(new.named_parameters()), dict(old.named_parameters())
    old.weights.check_other(new)
    chosen = {name: old.weights.select(groups, layers) for name, groups in named.items()}
    _check_overlap(chosen)
    values = {}
    for coalition in coalitions(list(named)):
        weights = {name: value.detach().clone() for name, value in mine.items()}
        for player in coalition:
            for name, rows in chosen[player].items():
                weights[name][rows] = theirs[name].detach()[rows]
        values[coalition] = evaluate(metric, functional_call(old, weights, (inputs,)), inputs).double().cpu().numpy()
    return shapley(list(named), values)


def _check_overlap(chosen: Mapping[str, Mapping[str, Tensor]]) -> None:
    seen: dict[str, tuple[str, Tensor]] = {}
    for player, parameters in chosen.items():
        for name, rows in parameters.items():
            if name in seen and bool((seen[name][1] & rows).any()):
                raise SharesError(
                    f"players {seen[name][0]!r} and {player!r} both hold {name}; allowed: groups without overlap"
                )
            before = seen[name][1] if name in seen else torch.zeros_like(rows)
            seen[name] = player, before | rows


def site_shares(
    model: Hookable,
    clean: Any,
    corrupted: Any,
    metric: Metric | Callable[[Tensor], Tensor],
    players: Mapping[str, Sequence[Any]] | Sequence[str] = ("attn_out", "ffn_out"),
    roles: Sequence[str] = (),
    direction: Literal["denoising", "noising"] = "denoising",
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
    **sweep: Any,
) -> Shapley:
    """v(S) = the metric [example] with the players of S patched: denoising, clean values into the corrupted run; noising the
    reverse.

    players: site names (each in all its layers), or name -> list of sites. roles: each player at each of these roles alone,
    as players "name@role"; without any, at all positions. Up to 10 players; every coalition is one cell of one sweep
    (`run_many`, whose further arguments may follow). Raises SharesError, SweepError, UnknownSiteError."""
    if direction not in ("denoising", "noising"):
        raise SharesError(f"direction={direction!r} is not allowed; allowed: 'denoising', 'noising'")
    clean, corrupted = (prepare(model, x, tokenizer, prefix) for x in (clean, corrupted))
    base, other = (corrupted, clean) if direction == "denoising" else (clean, corrupted)
    given = players if isinstance(players, Mapping) else {name: [name] for name in players}
    sites = {name: [site for one in parts for site in _sites(model, one)] for name, parts in given.items()}
    every = [site for parts in sites.values() for site in parts]
    if len(set(every)) < len(every):
        raise SharesError(f"players {list(sites)} share a site; allowed: every site in one player")
    source = run(model, other, record=every)
    moves: dict[str, list[Any]] = {
        f"{name}@{role}" if role else name: [Replace(site, source, at=(role,) if role else ()) for site in parts]
        for name, parts in sites.items() for role in (roles or ("",))
    }  # fmt: skip
    sets = coalitions(list(moves))
    cells = {
        str(i): [move for name in moves if name in one for move in moves[name]] for i, one in enumerate(sets) if one
    }
    found = run_many(model, base, cells, metric, **sweep)
    values = {one: found.clean if not one else found.values["cells"][i - 1] for i, one in enumerate(sets)}
    return shapley(list(moves), {one: value.double().cpu().numpy() for one, value in values.items()})


def _sites(model: Hookable, one: Any) -> list[Site]:
    """All layers of a site's name, or the site itself."""
    if isinstance(one, str) and "." not in one:
        found = [site for site in model.sites if site.name == one]
        if found:
            return found
    return [resolve(one, model.sites)]
