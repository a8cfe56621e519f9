"""What holds by construction (R1, R2, R6, N1, A1, A2, A4), measured on random models of every kind.

A statement of these is no finding: it follows from the equations. It is measured all the same, so that a fault in the model
shows, and it is measured where it does not hold, so that the measurement is seen to be able to fail.
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from interp.claims.claim import Claim, Hypothesis, Reading, Study, Tables
from interp.generate import generate
from interp.interventions import Intervention, KnockOut, Replace
from interp.model.config import ModelConfig
from interp.model.inputs import Inputs
from interp.model.tap import NO_TAP
from interp.model.transformer import Transformer
from interp.run import run

KINDS = ("decoder", "prefix-decoder", "encoder", "encoder-decoder")
GENERATING = ("decoder", "prefix-decoder", "encoder-decoder")
FFNS = ("relu", "gelu", "gelu_tanh", "swish", "swiglu", "geglu", "reglu", "bilinear", "none")
VOCAB, N_CTX = 11, 12
Row = dict[str, Any]


def random_case(seed: int, kinds: tuple[str, ...] = KINDS, **fixed: Any) -> tuple[Transformer, Inputs]:
    """A float64 model with random sizes and choices, every parameter random, and a batch of two (the second one padded).

    fixed: choices that are not drawn. The choices that are drawn do not depend on those that are fixed."""
    rng = np.random.default_rng([seed, 7])
    pick = lambda *values: values[int(rng.integers(len(values)))]  # noqa: E731
    kind, heads, norm = pick(*kinds), pick(1, 2, 4), pick("layernorm", "rmsnorm", "none")
    chosen: dict[str, Any] = {
        "kind": kind, "vocab": VOCAB, "n_ctx": N_CTX, "n_layers": pick(2, 3), "n_heads": heads, "n_kv_heads": pick(1, heads),
        "d_model": pick(8, 12), "d_head": pick(4, 6), "d_ff": pick(5, 9), "norm": norm, "norm_position": pick("pre", "post"),
        "norm_eps": pick(0.0, 1e-5), "ffn": pick(*FFNS), "positions": pick("learned", "sinusoidal", "rotary", "none"),
        "bias": pick(True, False), "qk_norm": pick(True, False), "tied_embeddings": pick(True, False), **fixed,
    }  # fmt: skip
    if chosen["norm"] == "none":
        chosen["norm_position"] = "pre"
    if chosen["kind"] == "encoder-decoder":
        chosen["n_encoder_layers"] = 2
    model = Transformer(ModelConfig(**chosen), seed=None).double()
    drawn = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = (
                1.0
                if parameter.ndim < 2
                else (0.7 if chosen["norm"] == "none" else 1.5) / math.sqrt(parameter.shape[1])
            )
            parameter.copy_(torch.randn(parameter.shape, generator=drawn, dtype=torch.float64) * spread)
    return model.eval(), _random_inputs(model.config, drawn)


def _random_inputs(config: ModelConfig, drawn: torch.Generator) -> Inputs:
    tokens = torch.randint(VOCAB, (2, 5), generator=drawn)
    mask = torch.ones(2, 5, dtype=torch.bool)
    mask[1, :2] = False  # padding on the left, as in generation
    fields: dict[str, Any] = {}
    if config.kind == "prefix-decoder":
        fields["prefix_length"] = torch.tensor([3, 2])
    if config.kind == "encoder-decoder":
        fields["source"] = torch.randint(VOCAB, (2, 4), generator=drawn)
        fields["source_mask"] = torch.tensor([[True] * 4, [True, True, True, False]])
    return Inputs(tokens, mask=mask, **fields)


def measure(config: Mapping[str, int], scratch: Path) -> pd.DataFrame:
    """Every identity on the models of the seeds `first` … `last`−1.

    Columns: seed, identity, where, holds (whether the identity is stated there), kind, norm, norm_position, error, missing (how
    many things that should be there are not)."""
    rows = [row for seed in range(config["first"], config["last"]) for row in _of_seed(seed)]
    return pd.DataFrame(rows)


def _of_seed(seed: int) -> list[Row]:
    measures = {"R1": sums, "R2": mixing, "R6": stacking, "N1": normalised, "A1": parallel, "A2": edges, "A4": cached}
    return [{"seed": seed, "identity": name, **row} for name, one in measures.items() for row in one(seed)]


def _row(model: Transformer, where: str, error: float, holds: bool = True, missing: int = 0) -> Row:
    config = model.config
    return {"where": where, "holds": holds, "kind": config.kind, "norm": config.norm, "norm_position": config.norm_position,
            "error": error, "missing": missing}  # fmt: skip


def _relative(one: Tensor, other: Tensor) -> float:
    """Largest difference over the largest entry."""
    one, other = one.detach(), other.detach()
    return float((one - other).abs().max() / other.abs().max())


def sums(seed: int) -> Iterator[Row]:
    """R1: h_L against x_0 and every output, of the same model with the norms before and behind."""
    for position in ("pre", "post"):
        model, inputs = random_case(seed, norm_position=position)
        if model.config.norm_position == position:  # without norms there is no "behind"
            yield _row(model, f"{position}-norm", _sum_error(model, inputs), position == "pre")


def _sum_error(model: Transformer, inputs: Inputs) -> float:
    errors = []
    for stack in dict.fromkeys(site.stack for site in model.sites):
        mine = [site for site in model.sites if site.stack == stack]
        added = [site for site in mine if site.name in ("attn_out", "cross_out", "ffn_out")]
        first = next(site for site in mine if site.name == "resid_pre")
        last = [site for site in mine if site.name == "resid_post"][-1]
        cache = run(model, inputs, record=[first, *added, last]).cache
        total = cache[first] + sum(cache[site] for site in added)
        errors.append(_relative(total, cache[last]))
    return max(errors)


def mixing(seed: int) -> Iterator[Row]:
    """R2: what a position's output owes to other positions, with attention cut, in norms and FFNs alone, and with attention."""
    model, inputs = random_case(seed)
    inputs = dataclasses.replace(
        inputs, mask=None, source_mask=None
    )  # edges of padding cannot be named, nor are there any
    yield _row(model, "attention cut", _off_diagonal(influence(model, inputs, _cuts(model, inputs))))
    yield _row(model, "FFN and norm alone", max(map(_off_diagonal, _alone(model, inputs))))
    yield _row(model, "attention on", _off_diagonal(influence(model, inputs)), holds=False)


def _cuts(model: Transformer, inputs: Inputs) -> list[Intervention]:
    """Every edge between two positions cut, in both stacks, and all of cross-attention."""
    cuts: list[Intervention] = []
    for site in model.sites:
        if site.name == "cross_scores":
            cuts.append(KnockOut(site))
        if site.name == "scores":
            n = inputs.encoder.length if site.stack == "encoder" else inputs.length
            cuts += [KnockOut(site, (slice(None), i, [j for j in range(n) if j != i])) for i in range(n)]
    return cuts


def influence(model: Transformer, inputs: Inputs, change: list[Intervention] | None = None) -> Tensor:
    """Largest |∂ logits_i / ∂ embedding_j| over their entries [batch i j]; for an encoder-decoder j counts the source's
    positions behind the target's."""
    run_with, given = _embedded(model, inputs)
    changes = [] if change is None else change
    logits = run(model, run_with, change=[*changes, *_source_embeddings(model, given)], grad=True).logits
    return _jacobian(logits, given)


def _embedded(model: Transformer, inputs: Inputs) -> tuple[Inputs, list[Tensor]]:
    """The inputs with embeddings that gradients are taken of, and those, the target's first."""
    tokens = [inputs.tokens] if inputs.source is None else [inputs.tokens, inputs.source]
    given = [model.W_E.detach()[one].requires_grad_() for one in tokens]
    return dataclasses.replace(inputs, embeddings=given[0]), given


def _source_embeddings(model: Transformer, given: list[Tensor]) -> list[Intervention]:
    return [Replace("encoder.embed", given[1])] if len(given) > 1 else []


def _jacobian(out: Tensor, given: list[Tensor]) -> Tensor:
    """Largest |∂ out_i / ∂ given_j| [batch i j], the given ones' positions behind each other."""
    batch, n, size = out.shape
    each = (
        torch.eye(n * size, dtype=out.dtype).view(-1, 1, n, size).expand(-1, batch, -1, -1)
    )  # the batch's rows at once
    found = torch.autograd.grad(out, given, each, is_grads_batched=True, allow_unused=True)
    sizes = [out.new_zeros(batch, n, one.shape[1]) if grad is None
             else grad.unflatten(0, (n, size)).abs().amax((1, -1)).transpose(0, 1)
             for one, grad in zip(given, found, strict=True)]  # fmt: skip
    return torch.cat(sizes, 2)


def _off_diagonal(size: Tensor) -> float:
    """The largest entry that is not a position's own."""
    own = torch.eye(size.shape[1], size.shape[2], dtype=torch.bool)
    return float(size.masked_fill(own, 0.0).max())


def _alone(model: Transformer, inputs: Inputs) -> Iterator[Tensor]:
    """The Jacobians of every FFN, and of every norm, on a random stream."""
    stream = torch.randn(2, 4, model.config.d_model, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    stream.requires_grad_()
    blocks: Any = model.blocks
    for block in blocks:
        for part in (block.norm1, block.norm2, block.cross_norm, block.ffn):
            if part is not None:
                yield _jacobian(part(stream, NO_TAP), [stream])


def stacking(seed: int) -> Iterator[Row]:
    """R6: every block left out in turn, by handing on what entered it, against the model built without it."""
    model, inputs = random_case(seed)
    clean = run(model, inputs, record=["resid_pre", "resid_post"])
    for stack in dict.fromkeys(site.stack for site in model.sites):
        before = [site for site in model.sites if site.stack == stack and site.name == "resid_pre"]
        behind = [site for site in model.sites if site.stack == stack and site.name == "resid_post"]
        for layer, (first, last) in enumerate(zip(before, behind, strict=True)):
            alike = clean.cache[first].shape == clean.cache[last].shape
            without = run(model, inputs, change=[Replace(last, clean.cache[first])]).logits
            runs = alike and without.shape == clean.logits.shape and bool(torch.isfinite(without).all())
            error = _relative(without, shorter(model, layer, stack)(inputs)) if runs else math.inf
            yield _row(model, f"without a block of {len(before)}", error, missing=0 if runs else 1)


def shorter(model: Transformer, layer: int, stack: str | None = None) -> Transformer:
    """A new model without one block of a stack, the other weights the same."""
    inside = "encoder.blocks." if stack == "encoder" else "blocks."
    name = "n_encoder_layers" if stack == "encoder" else "n_layers"
    weights = {}
    for key, value in model.state_dict().items():
        if key.startswith(inside):
            number, rest = key.removeprefix(inside).split(".", 1)
            if int(number) == layer:
                continue
            key = f"{inside}{int(number) - (int(number) > layer)}.{rest}"
        weights[key] = value
    config = dataclasses.replace(model.config, **{name: getattr(model.config, name) - 1})
    new = Transformer(config, seed=None).to(model.dtype)
    new.load_state_dict(copy.deepcopy(weights))
    return new.eval()


def normalised(seed: int) -> Iterator[Row]:
    """N1: every normalised vector before gain and offset, ε = 0: its mean from 0, its standard deviation (RMSNorm: root mean
    square) from 1; and RMSNorm's mean, which is not 0."""
    for norm in ("layernorm", "rmsnorm"):
        model, inputs = random_case(seed, norm=norm, norm_eps=0.0)
        hats = [site for site in model.sites if site.name.endswith("_hat")]
        cache = run(model, inputs, record=hats).cache
        means = max(float(cache[site].mean(-1).abs().max()) for site in hats)
        sizes = max(float((_deviation(cache[site], norm) - 1).abs().max()) for site in hats)
        if norm == "layernorm":
            yield _row(model, "LayerNorm", max(means, sizes))
        else:
            yield _row(model, "RMSNorm's root mean square", sizes)
            yield _row(model, "RMSNorm's mean", means, holds=False)


def _deviation(x: Tensor, norm: str) -> Tensor:
    centred = x - x.mean(-1, keepdim=True) if norm == "layernorm" else x
    return centred.square().mean(-1).sqrt()  # population: divided by d (7.24)


def parallel(seed: int) -> Iterator[Row]:
    """A1: the logits of one pass over all tokens against those of the first i tokens alone, for every i."""
    model, inputs = random_case(seed, GENERATING)
    yield _row(model, "causal", _stepwise(model, inputs))
    model, inputs = random_case(seed, ("encoder",))
    yield _row(model, "encoder (no causal mask)", _stepwise(model, inputs), holds=False)


def _stepwise(model: Transformer, inputs: Inputs) -> float:
    whole = run(model, inputs).logits
    first = 3 if model.config.kind == "prefix-decoder" else 1  # tokens of a prefix see all of it
    differences = []
    for i in range(first, inputs.length + 1):
        some = dataclasses.replace(inputs, tokens=inputs.tokens[:, :i], mask=inputs.mask[:, :i])  # type: ignore[index]
        rows = some.mask.any(1) & some.mask[:, -1]  # type: ignore[union-attr]
        if inputs.prefix_length is not None:
            rows &= some.mask.sum(1) >= inputs.prefix_length  # type: ignore[union-attr]
        if bool(rows.any()):
            chosen = some.select(rows.nonzero()[:, 0])
            differences.append(float((run(model, chosen).logits[:, -1] - whole[rows, i - 1]).abs().max()))
    return max(differences) / float(whole.abs().max())


def edges(seed: int) -> Iterator[Row]:
    """A2: which embeddings each position's output depends on, against those that the kind admits; padding is never read."""
    model, inputs = random_case(seed, (KINDS[seed % 4],))
    real = inputs.mask
    assert real is not None
    size, wanted = influence(model, inputs), admitted(model.config.kind, inputs)
    size, wanted = size[real], wanted[real]  # the queries that are real tokens
    yield _row(model, model.config.kind, float(size[~wanted].max()), missing=int((size[wanted] == 0).sum()))


def admitted(kind: str, inputs: Inputs) -> Tensor:
    """Who may depend on whom [batch i j]; for an encoder-decoder the source's positions stand behind the target's."""
    n, real = inputs.length, inputs.mask
    assert real is not None
    sees = torch.zeros(inputs.batch, n, n, dtype=torch.bool)
    for b in range(inputs.batch):
        start = int(real[b].long().argmax())
        end = start + (0 if inputs.prefix_length is None else int(inputs.prefix_length[b]))
        for i in range(n):
            for j in range(n):
                sees[b, i, j] = bool(real[b, j]) and (kind == "encoder" or j <= i or j < end)
    if inputs.source_mask is None:
        return sees
    return torch.cat([sees, inputs.source_mask[:, None].expand(-1, n, -1)], 2)


def cached(seed: int) -> Iterator[Row]:
    """A4: five generated tokens and their logits, with keys and values kept against everything computed again."""
    model, inputs = random_case(seed, GENERATING)
    kept, anew = (generate(model, inputs, max_new=5, use_cache=use) for use in (True, False))
    yield _row(
        model, "five new tokens", _relative(kept.logits, anew.logits), missing=int((kept.tokens != anew.tokens).sum())
    )


def by_construction(tables: Tables, identity: str, tolerance: float, must_fail: bool = False) -> Reading:
    """The largest error over all models of which the identity is stated; `must_fail`: it has to be above 0 where it is not."""
    rows = tables["identities"]
    rows = rows[rows["identity"] == identity]
    stated, others = rows[rows["holds"]], rows[~rows["holds"]]
    error = float(stated["error"].max()) if bool(stated["error"].notna().all()) else math.nan
    holds = error <= tolerance and int(stated["missing"].sum()) == 0
    note = "; ".join(f"{where}: {part['error'].min():.2g} to {part['error'].max():.2g} ({len(part)} models)"
                     for where, part in others.groupby("where"))  # fmt: skip
    if must_fail and not (len(others) and float(others["error"].min()) > 0):
        holds, note = False, f"the measurement does not see it fail: {note}"
    missing = int(stated["missing"].sum())
    note = "; ".join(filter(None, [f"{missing} that should be there are missing" if missing else "", note]))
    return Reading(
        "by construction" if holds else "refuted", error, error, error, int(stated["seed"].nunique()), None, note
    )


def r1(tables: Tables) -> Reading:
    """R1.sum."""
    return by_construction(tables, "R1", 1e-10, must_fail=True)


def r2(tables: Tables) -> Reading:
    """R2.mixing."""
    return by_construction(tables, "R2", 0.0, must_fail=True)


def r6(tables: Tables) -> Reading:
    """R6.removed."""
    return by_construction(tables, "R6", 1e-10)


def n1(tables: Tables) -> Reading:
    """N1.normalised."""
    return by_construction(tables, "N1", 1e-10)


def a1(tables: Tables) -> Reading:
    """A1.parallel."""
    return by_construction(tables, "A1", 1e-10, must_fail=True)


def a2(tables: Tables) -> Reading:
    """A2.edges."""
    return by_construction(tables, "A2", 0.0)


def a4(tables: Tables) -> Reading:
    """A4.cached."""
    return by_construction(tables, "A4", 1e-10)


def _shown(identity: str, tables: Tables) -> pd.DataFrame:
    rows = tables["identities"]
    rows = rows[rows["identity"] == identity]
    groups = rows.groupby(["identity", "where", "kind", "norm_position", "holds"], sort=False)
    found = groups.agg(models=("seed", "nunique"), smallest_error=("error", "min"), largest_error=("error", "max"))
    return found.reset_index()


HALVES = {"models_0_29": {"first": 0, "last": 30}, "models_30_59": {"first": 30, "last": 60}}
STUDIES = (
    Study("identities", "Do the equations' identities hold on random models of every kind?", measure,
          dict.fromkeys(("quick", "standard", "full"), HALVES), dict.fromkeys(("quick", "standard", "full"), 1.0)),
)  # fmt: skip
SCOPE = ("60 random models in 64-bit numbers: decoder, prefix decoder, encoder and encoder-decoder, pre- and post-norm, "
         "LayerNorm, RMSNorm and no norm, every FFN and kind of positions, grouped keys, biases or none")  # fmt: skip


def _identity(name: str, rule: Callable[[Tables], Reading], **texts: str) -> Hypothesis:
    statistic = "The largest error over all models; n counts models."
    common: dict[str, Any] = {
        "scope": SCOPE,
        "null": "None: it is an identity, not an estimate.",
        "statistic": statistic,
    }
    shown = partial(_shown, name.partition(".")[0])
    return Hypothesis(id=name, rule=rule, studies=("identities",), shown=shown, **{**common, **texts})


CLAIMS = (
    Claim(id="R1", source="7.27-7.32", sentence="Attention and FFN only add to the residual stream.", hypotheses=(
        _identity(
            "R1.sum", r1, unit="of the largest |h_L|",
            quantity="The difference between the last block's stream and the sum of the first block's input, all attention "
                     "outputs and all FFN outputs.",
            prediction="It is rounding, at most 1e-10, for pre-norm models.",
            controls="The same models with post-norm, where each norm rescales the stream, must show an error above 0.",
            falsified="Any pre-norm model with an error above 1e-10, or a post-norm model without one.",
        ),
    )),
    Claim(id="R2", source="7.27-7.32", sentence="Attention is the only component that mixes positions.", hypotheses=(
        _identity(
            "R2.mixing", r2, unit="largest derivative",
            quantity="The derivative of one position's logits with respect to another position's embedding when every attention "
                     "edge between two positions is cut, and the same derivative through each FFN and norm alone.",
            prediction="It is exactly 0.",
            controls="With attention on, some derivative between positions must differ from 0 in every model.",
            falsified="Any derivative that is not 0, or a model with attention on in which all are.",
        ),
    )),
    Claim(id="R6", source="7.27-7.32", sentence="A block's input and output have one width, so blocks stack to any depth and any "
          "one can be left out.", hypotheses=(
        _identity(
            "R6.removed", r6, unit="of the largest |logit|",
            quantity="The difference between the logits when a block hands on what entered it and those of a model that is built "
                     "without that block, for every block of every stack.",
            prediction="It is rounding, at most 1e-10, and all logits are finite and of the same shape.",
            falsified="A block whose output has another shape than its input, a model that does not run without one of its "
                      "blocks, or an error above 1e-10.",
        ),
    )),
    Claim(id="N1", source="7.23-7.26", sentence="Normalisation leaves a vector with mean 0 and standard deviation 1 before gain "
          "and offset.", hypotheses=(
        _identity(
            "N1.normalised", n1, unit="distance from 0 and 1",
            quantity="The mean's distance from 0 and the population standard deviation's distance from 1 of every vector that "
                     "LayerNorm has normalised with ε = 0, and for RMSNorm the root mean square's distance from 1.",
            prediction="Both are rounding, at most 1e-10.",
            controls="RMSNorm does not subtract the mean, which therefore is not 0; its size is in the note.",
            falsified="Any vector further than 1e-10 from it.",
        ),
    )),
    Claim(id="A1", source="causal self-attention", sentence="The causal mask makes one parallel pass equal to step-by-step "
          "decoding.", hypotheses=(
        _identity(
            "A1.parallel", a1, unit="of the largest |logit|",
            quantity="The difference between each position's logits in one pass over all tokens and in a pass over the tokens up "
                     "to it alone (a prefix decoder's from the end of its prefix on).",
            prediction="It is rounding, at most 1e-10, for decoders, prefix decoders and encoder-decoders.",
            controls="Encoders, which have no causal mask, must show an error above 0.",
            falsified="Any model with an error above 1e-10, or an encoder without one.",
        ),
    )),
    Claim(id="A2", source="masks of the three kinds", sentence="The masks of encoder, causal decoder and prefix decoder admit "
          "exactly the edges they should.", hypotheses=(
        _identity(
            "A2.edges", a2, unit="largest derivative along an edge that is not admitted",
            quantity="The derivative of each real position's logits with respect to every embedding, against the edges that the "
                     "model's kind admits; padding is never admitted, and an encoder-decoder's target reads its whole source.",
            prediction="It is exactly 0 where no edge is admitted and not 0 where one is.",
            falsified="Any derivative that is not 0 without an edge, or is 0 along one.",
        ),
    )),
    Claim(id="A4", source="autoregressive generation", sentence="With cached keys and values, generation gives the same tokens.",
          hypotheses=(
        _identity(
            "A4.cached", a4, unit="of the largest |logit|",
            quantity="The difference between the logits of five greedily generated tokens with keys and values kept and with "
                     "everything computed again, and the number of tokens that differ.",
            prediction="The difference is rounding, at most 1e-10, and no token differs.",
            falsified="Any token that differs, or an error above 1e-10.",
        ),
    )),
)  # fmt: skip
