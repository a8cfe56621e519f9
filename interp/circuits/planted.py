"""Models whose circuit is known because their weights were set by hand, to see which methods find it (as Tracr's programs do
for ACDC).

Every model has two layers of four attention heads and no FFN or norm. The program's heads have the weights that the program
needs; all weights also carry noise, so that every other edge does a little. In a null model the program's heads write nothing
but noise: there is nothing to be found."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal, get_args

import pandas as pd
import torch
from torch import Tensor

from interp.circuits.acdc import acdc
from interp.circuits.attribution import Method, edge_attribution
from interp.circuits.graph import CircuitError, Graph
from interp.circuits.patching import Ablation
from interp.metrics import Metric, evaluate, logit_difference
from interp.model.config import ModelConfig
from interp.model.inputs import Inputs
from interp.model.transformer import Transformer
from interp.run import run

Program = Literal["induction", "previous", "relay"]
N = 8  # symbols, places, and the size of each part of the stream
TOKEN, PLACE, MOVED, OUT, REST = (slice(i * N, (i + 1) * N) for i in range(5))
LARGE = 0.5  # logits
SHARP = 40.0  # times 1/√8: a score that leaves softmax nothing to share

# Per program: its edges, and which of them carry symbols (the others carry places, the same in every prompt).
PLACES = {
    "induction": ("input->a0.h0<q>", "input->a0.h0<k>"),
    "previous": ("input->a0.h1<q>", "input->a0.h1<k>"),
    "relay": ("input->a0.h2<q>", "input->a0.h2<k>", "input->a1.h3<q>", "input->a1.h3<k>"),
}
SYMBOLS = {
    "induction": ("input->a0.h0<v>", "a0.h0->a1.h1<k>", "input->a1.h1<q>", "input->a1.h1<v>", "a1.h1->logits"),
    "previous": ("input->a0.h1<v>", "a0.h1->logits"),
    "relay": ("input->a0.h2<v>", "a0.h2->a1.h3<v>", "a1.h3->logits"),
}


@dataclass(frozen=True)
class Planted:
    """A model, prompts that need its program [example 8], and the metric: logit of the answer minus that of the corrupted
    one's."""

    program: Program
    model: Transformer
    clean: Tensor
    corrupted: Tensor
    metric: Metric

    def edges(self, ablation: Ablation) -> Tensor:
        """The program's edges [receiver sender]. Those that carry places count only for "zero": any other ablation replaces a
        place by the same place, and so has nothing to find there."""
        names = SYMBOLS[self.program] + (PLACES[self.program] if ablation == "zero" else ())
        return Graph.of(self.model).mask(names)


def planted(program: Program, seed: int = 0, n: int = 32, noise: float = 0.02, null: bool = False) -> Planted:
    """A model that runs `program`, and `n` pairs of prompts. noise: standard deviation added to every weight.

    induction: x₁ … a b … a -> b (head 0.0 notes the symbol before, head 1.1 looks for the place where this symbol was
    before). previous: the symbol before the last (head 0.1). relay: the first symbol, carried to place 4 by head 0.2 and from
    there to the end by head 1.3. Corrupted prompts are other prompts with another answer. CircuitError for another program.
    """
    if program not in get_args(Program):
        raise CircuitError(f"program={program!r} is not allowed; allowed: {', '.join(map(repr, get_args(Program)))}")
    generator = torch.Generator().manual_seed(seed)
    config = ModelConfig(
        vocab=N, n_layers=2, n_heads=4, d_model=5 * N, d_head=N, n_ctx=N, norm="none", ffn="none", bias=False
    )
    model = Transformer(config, seed=None).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(noise * torch.randn(parameter.shape, generator=generator))
        _write(model, program if not null else None)
    clean, answers = _prompts(program, n, generator)
    corrupted, others = _prompts(program, n, generator)
    while bool((same := answers == others).any()):
        again, new = _prompts(program, n, generator)
        corrupted, others = torch.where(same[:, None], again, corrupted), torch.where(same, new, others)
    return Planted(program, model, clean, corrupted, logit_difference(answers, others))


def _write(model: Any, program: Program | None) -> None:
    """The program's weights, added in place; without one, only what reads and writes tokens."""
    eye, before = torch.eye(N, dtype=torch.float64), torch.eye(N, dtype=torch.float64).roll(-1, 1)
    first, fourth = (torch.zeros(N, N, dtype=torch.float64).index_fill(1, torch.tensor([i]), 1.0) for i in (0, 3))
    model.W_E[:, TOKEN] += eye
    model.W_pos[:, PLACE] += eye
    model.W_U[OUT] += 5 * eye
    # head: (layer, head): query part and pattern of what it looks for, key part, where it writes what it read of which part
    heads = {
        "induction": {(0, 0): (PLACE, before, PLACE, TOKEN, MOVED), (1, 1): (TOKEN, eye, MOVED, TOKEN, OUT)},
        "previous": {(0, 1): (PLACE, before, PLACE, TOKEN, OUT)},
        "relay": {(0, 2): (PLACE, first, PLACE, TOKEN, MOVED), (1, 3): (PLACE, fourth, PLACE, MOVED, OUT)},
        None: {},
    }[program]
    for (layer, head), (query, looks_for, key, value, to) in heads.items():
        attention = model.blocks[layer].attention
        attention.W_Q[head, query] += SHARP * looks_for
        attention.W_K[head, key] += eye
        attention.W_V[head, value] += eye
        attention.W_O[head, :, to] += eye


def _prompts(program: Program, n: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [n 8] and answers [n]."""
    tokens = torch.rand(n, N, generator=generator).argsort(1)
    if program == "relay":
        return tokens, tokens[:, 0]
    if program == "previous":
        return tokens, tokens[:, -2]
    at = torch.randint(N - 2, (n, 1), generator=generator)
    answers = tokens.gather(1, at + 1)[:, 0]
    tokens[:, -1:] = tokens.gather(1, at)
    return tokens, answers


def auc(scores: Tensor, true: Tensor, admitted: Tensor) -> float:
    """The chance that an edge of the program has a larger score than another edge, ties counted half."""
    values, labels = scores[admitted].numpy(), true[admitted].numpy()
    ranks, n = pd.Series(values).rank().to_numpy(), int(labels.sum())
    return float((ranks[labels].sum() - n * (n + 1) / 2) / (n * (len(labels) - n)))


def recovery(
    programs: Iterable[Program] = get_args(Program),
    methods: Sequence[Method | Literal["acdc"]] = ("eap", "eap-ig", "dose", "exact", "acdc"),
    ablations: Sequence[Ablation] = get_args(Ablation),
    seeds: Iterable[int] = range(5),
    thresholds: Sequence[float] = tuple(LARGE * 2.0**k for k in range(0, -12, -1)),
) -> pd.DataFrame:
    """How well each method tells the program's edges from all others, for real models and null ones.

    thresholds: those of ACDC (its damage is the fall of the metric); an edge's score is at how many of them it stays.
    Columns: program, null, seed, method, ablation, auc, edges, of_program. "eap-ig" is defined between two prompts only."""
    asked: list[tuple[Any, Any]] = [
        (method, one) for method in methods for one in (("corrupted",) if method == "eap-ig" else ablations)
    ]
    rows = []
    for program, null, seed in product(programs, (False, True), tuple(seeds)):
        found = planted(program, seed, null=null)
        graph = Graph.of(found.model)
        for method, ablation in asked:
            scores, true = _scores(found, method, ablation, thresholds), found.edges(ablation)
            large = scores >= (len(thresholds) if method == "acdc" else LARGE)
            rows.append({
                "program": program, "null": null, "seed": seed, "method": method, "ablation": ablation,
                "auc": auc(scores, true, graph.admitted), "edges": len(graph.edges), "of_program": int(true.sum()),
                "found": int((large & true).sum()), "false": int((large & graph.admitted & ~true).sum()),
            })  # fmt: skip
    return pd.DataFrame(rows)


def _scores(found: Planted, method: Any, ablation: Any, thresholds: Sequence[float]) -> Tensor:
    """A score [receiver sender] per edge, larger for one that is to be kept."""
    given = found.model, found.clean, found.corrupted
    if method != "acdc":
        return edge_attribution(*given, found.metric, method, ablation=ablation).mean.abs()
    whole = evaluate(
        found.metric, run(found.model, found.clean).logits, Inputs(found.clean)
    )  # a null model's may even rise
    damage = Metric("fall", lambda x: whole - found.metric(x), found.metric.positions, found.metric.entries)
    return torch.stack([acdc(*given, t, damage, ablation).kept.double() for t in thresholds]).sum(0)
