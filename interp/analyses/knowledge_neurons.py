"""Knowledge neurons (Dai et al. 2022): FFN neurons whose activation, scaled from nothing to its own value, raises a fact's
probability.

Attr(wᵢ) = wᵢ · mean over α of ∂P(answer)/∂wᵢ at α·w, one layer's activations at the answer's position scaled together. The
published programs sum the gradient at α = 0, 1/m … (m−1)/m (the original) or at m points from 0 to 1 with both ends (a port);
the middles of m equal parts miss the integral least, and are the default. A neuron found so is one that the fact's
probability is sensitive to: the same neurons move syntax too (Niu et al. 2024), so effects on other facts stand beside it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.at import positions
from interp.hookable import Hookable, UnsupportedModelError, require_head
from interp.interventions import Replace, Scale
from interp.model.inputs import Inputs
from interp.run import prepare, run
from interp.sites import Site
from interp.tasks.facts import Prompts

Rule = Literal["midpoint", "original", "port"]


class KnowledgeNeuronError(ValueError):
    """A choice that finds no neurons or makes no sense; the message says what is allowed."""


@dataclass(frozen=True, eq=False)
class NeuronAttribution:
    """scores [layer example neuron], in probability. completeness [layer example]: |Σ scores − (P(α=1) − P(α=0))| over |P(1)
    − P(0)|, the share of the layer's effect that the sum misses. p [example]: P(answer); activations [layer example
    neuron]."""

    scores: Tensor
    activations: Tensor
    completeness: Tensor
    p: Tensor
    layers: tuple[int, ...]
    rule: Rule
    steps: int

    def table(self) -> pd.DataFrame:
        """One row per layer and example: layer, example, sum (of its neurons' scores), largest, completeness_error, p."""
        layers, examples = self.scores.shape[:2]
        return pd.DataFrame({
            "layer": np.repeat(self.layers, examples), "example": np.tile(np.arange(examples), layers),
            "sum": self.scores.sum(-1).flatten().tolist(), "largest": self.scores.amax(-1).flatten().tolist(),
            "completeness_error": self.completeness.flatten().tolist(), "p": self.p.repeat(layers).tolist(),
            "rule": self.rule, "steps": self.steps,
        })  # fmt: skip


def neuron_attribution(
    model: Hookable,
    inputs: Any,
    answers: Tensor,
    position: Any = -1,
    steps: int = 20,
    rule: Rule = "midpoint",
    layers: Sequence[int] | None = None,
    batch_size: int = 64,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> NeuronAttribution:
    """Every FFN neuron's integrated gradient of P(answer) at `position`, from 0 to its own activation, layer by layer.

    answers [batch]: token ids. steps: m. batch_size: runs at once, of which each example needs m per layer. Raises
    KnowledgeNeuronError, UnsupportedModelError."""
    if rule not in get_args(Rule):
        raise KnowledgeNeuronError(f"rule={rule!r} is not allowed; allowed: {', '.join(map(repr, get_args(Rule)))}")
    if not isinstance(steps, int) or steps < 2:
        raise KnowledgeNeuronError(f"steps={steps!r} is not allowed; allowed: 2 or more")
    require_head(model)
    inputs = prepare(model, inputs, tokenizer, prefix)
    known = [site.layer for site in model.sites if site.name == "ffn_act" and site.stack in (None, "decoder")]
    if not known:
        raise UnsupportedModelError("this model has no site 'ffn_act'; knowledge neurons are FFN neurons")
    chosen = known if layers is None else list(layers)
    if not chosen or set(chosen) - set(known):
        raise KnowledgeNeuronError(f"layers={layers!r} is not allowed; allowed: some of 0 … {len(known) - 1}")
    stack = model.sites[-1].stack
    sites = [Site("ffn_act", layer, stack) for layer in chosen]
    at = positions(inputs, position)
    rows = torch.arange(inputs.batch, device=at.device)
    with torch.no_grad():
        base = run(model, inputs, record=sites)
    acts = torch.stack([base.cache[site][rows, at] for site in sites])
    p = _probability(base.logits, inputs, answers)
    alphas = {"midpoint": (torch.arange(steps) + 0.5) / steps, "original": torch.arange(steps) / steps,
              "port": torch.linspace(0, 1, steps)}[rule].to(acts)  # fmt: skip
    each = max(1, batch_size // steps)
    scores, errors = torch.zeros_like(acts), torch.zeros(acts.shape[:2])
    for i, site in enumerate(sites):
        for begin in range(0, inputs.batch, each):
            part = slice(begin, begin + each)
            gradient, ends = _along(model, inputs.select(part), site, at[part], acts[i, part], answers[part], alphas)
            scores[i, part] = acts[i, part] * gradient
            wanted = ends[1] - ends[0]
            errors[i, part] = ((scores[i, part].sum(-1) - wanted).abs() / wanted.abs().clamp(min=1e-12)).cpu().float()
    return NeuronAttribution(scores, acts, errors, p, tuple(chosen), rule, steps)  # type: ignore[arg-type]


def _along(
    model, inputs: Inputs, site: Site, at: Tensor, act: Tensor, answers: Tensor, alphas: Tensor
) -> tuple[Tensor, Tensor]:
    """∂P/∂w averaged over α [example neuron], and P at α = 0 and 1 [2 example]."""
    n, m = inputs.batch, len(alphas)
    many = inputs.select(torch.arange(n, device=at.device).repeat(m))
    scaled = (alphas[:, None, None] * act).flatten(0, 1).detach().requires_grad_()
    with torch.enable_grad():
        logits = run(model, many, change=Replace(site, scaled, at=(at.repeat(m),)), grad=True).logits
        total = _probability(logits, many, answers.repeat(m)).sum()
    (gradient,) = torch.autograd.grad(total, scaled)
    with torch.no_grad():
        two = inputs.select(torch.arange(n, device=at.device).repeat(2))
        ends = torch.cat([torch.zeros_like(act), act])
        found = run(model, two, change=Replace(site, ends, at=(at.repeat(2),))).logits
    return gradient.unflatten(0, (m, n)).mean(0), _probability(found, two, answers.repeat(2)).unflatten(0, (2, n))


def _probability(logits: Tensor, inputs: Inputs, answers: Tensor) -> Tensor:
    last = logits[torch.arange(inputs.batch, device=logits.device), inputs.last()].float()
    return last.softmax(-1).gather(-1, answers.to(logits.device)[:, None])[:, 0]


def knowledge_neurons(
    found: NeuronAttribution,
    facts: Sequence[Any],
    threshold: float = 0.2,
    share: float = 0.7,
    wanted: tuple[int, int] | None = (2, 5),
    by: Literal["attribution", "activation"] = "attribution",
) -> pd.DataFrame:
    """Each fact's neurons: at least `threshold` of the prompt's largest score over all layers, in at least `share` of the
    fact's prompts.

    facts [example]: which fact each prompt states (Dai: several prompts per fact). wanted: where a fact has fewer or more
    neurons than this, the share moves by .05 until it has (the original; None: the share as given, as the port does with
    threshold .3, share .5). by: "activation" takes the activations instead of the attributions (the published baseline, with
    threshold .5). Columns: fact, layer, neuron, score (mean over the fact's prompts), prompts (share of them), share (the
    final threshold), n_prompts. A fact without neurons has no row. Raises KnowledgeNeuronError."""
    for name, value in (("threshold", threshold), ("share", share)):
        if not 0 < value <= 1:
            raise KnowledgeNeuronError(f"{name}={value!r} is not allowed; allowed: above 0, at most 1")
    if by not in ("attribution", "activation"):
        raise KnowledgeNeuronError(f"by={by!r} is not allowed; allowed: 'attribution', 'activation'")
    values = (
        (found.scores if by == "attribution" else found.activations).transpose(0, 1).flatten(1)
    )  # [example layer·neuron]
    ids = np.asarray(facts)
    if ids.shape != (len(values),):
        raise KnowledgeNeuronError(
            f"facts of shape {ids.shape} are not allowed; allowed: one per example, ({len(values)},)"
        )
    coarse = values >= threshold * values.amax(1, keepdim=True).clamp(min=1e-30)
    width, rows = found.scores.shape[-1], []
    for fact in dict.fromkeys(ids.tolist()):
        mine = torch.as_tensor(np.flatnonzero(ids == fact))
        held = coarse[mine].double().mean(0)
        at = _share(held, share, wanted)
        for index in (held >= at - 1e-9).nonzero()[:, 0].tolist():
            rows.append({"fact": fact, "layer": found.layers[index // width], "neuron": index % width,
                         "score": float(values[mine, index].mean()), "prompts": float(held[index]), "share": at,
                         "n_prompts": len(mine)})  # fmt: skip
    return pd.DataFrame(rows, columns=["fact", "layer", "neuron", "score", "prompts", "share", "n_prompts"])


def _share(held: Tensor, share: float, wanted: tuple[int, int] | None) -> float:
    """The share at which a fact has as many neurons as wanted, in steps of .05; where none does, the last before it turns
    back."""
    if wanted is None:
        return share
    low, high = wanted
    seen = set[float]()
    while share not in seen:
        seen.add(share)
        n = int((held >= share - 1e-9).sum())
        step = 0.05 if n > high else -0.05 if n < low else 0.0
        if not step or not 0.05 <= round(share + step, 2) <= 1.0:
            break
        share = round(share + step, 2)
    return share


def neuron_effects(
    model: Hookable,
    prompts: Prompts,
    neurons: pd.DataFrame,
    factor: float = 0.0,
    position: Any = -1,
    batch_size: int = 64,
) -> pd.DataFrame:
    """P(answer) of every prompt with each fact's neurons scaled by `factor` at `position`: 0 suppresses, 2 amplifies.

    neurons: of `knowledge_neurons`, whose facts are `prompts.table["fact"]`. Columns: fact (whose neurons), prompt, own
    (whether the prompt states that fact), same_relation, factor, n_neurons, clean, changed (probabilities). `relative_change`
    sums it up."""
    if not np.isfinite(factor):
        raise KnowledgeNeuronError(f"factor={factor!r} is not allowed; allowed: a finite number")
    if not len(neurons):
        raise KnowledgeNeuronError("no fact has neurons; allowed: a table of knowledge_neurons with one row or more")
    table, stack, frames = prompts.table, model.sites[-1].stack, []
    require_head(model)
    clean = _all(model, prompts, (), batch_size)
    for fact, mine in neurons.groupby("fact", sort=False):
        places = positions(prompts.inputs, position)
        layers: list[int] = mine["layer"].unique().tolist()
        changes = [
            (Site("ffn_act", layer, stack), mine.loc[mine["layer"] == layer, "neuron"].tolist()) for layer in layers
        ]
        changed = _all(model, prompts, [(site, places, ids, factor) for site, ids in changes], batch_size)
        own = (table["fact"] == fact).to_numpy()
        relation = table.loc[own, "relation"].iloc[0] if own.any() else None
        frames.append(pd.DataFrame({
            "fact": fact, "prompt": range(len(prompts)), "own": own, "same_relation": (table["relation"] == relation).to_numpy(),
            "factor": factor, "n_neurons": len(mine), "clean": clean, "changed": changed,
        }))  # fmt: skip
    return pd.concat(frames, ignore_index=True)


def _all(
    model, prompts: Prompts, changes: Sequence[tuple[Site, Tensor, list[int], float]], batch_size: int
) -> list[float]:
    found: list[float] = []
    for begin in range(0, len(prompts), batch_size):
        part = slice(begin, begin + batch_size)
        inputs = prompts.inputs.select(part)
        edits = [Scale(site, factor, at=(at[part], ids)) for site, at, ids, factor in changes]
        with torch.no_grad():
            found += _probability(run(model, inputs, change=edits).logits, inputs, prompts.answers[part]).tolist()
    return found


def relative_change(effects: pd.DataFrame) -> pd.DataFrame:
    """One row per fact whose neurons were scaled: fact, factor, n_neurons, own, same_relation, other (the change of the mean
    probability over those prompts, relative to it; other = facts of other relations)."""
    rows = []
    for (fact, factor), part in effects.groupby(["fact", "factor"], sort=False):  # type: ignore[misc]
        sets = {
            "own": part["own"],
            "same_relation": part["same_relation"] & ~part["own"],
            "other": ~part["same_relation"],
        }
        means = {name: part.loc[chosen, ["clean", "changed"]].mean() for name, chosen in sets.items()}  # of none: nan
        change = {name: float(mean["changed"] / mean["clean"] - 1) for name, mean in means.items()}
        rows.append({"fact": fact, "factor": factor, "n_neurons": int(part["n_neurons"].iloc[0]), **change})
    return pd.DataFrame(rows)
