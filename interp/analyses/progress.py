"""Progress measures of grokking on modular addition (Nanda et al. 2023): which Fourier frequencies a model adds by, and its loss
with these alone and without them.

The generalising model computes logit(c) = Σ_k A_k cos(w_k(a+b−c)) with w_k = 2πk/p over few key frequencies k. In the Fourier
basis over all p × p inputs these are the components cos w_k(a+b) and sin w_k(a+b) of every logit. Restricted loss keeps them
alone, excluded loss removes them: the first falls while the circuit forms, the second rises while it takes over from memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import pandas as pd
import torch
import torch.nn.functional as F
from torch import Tensor

from interp.hookable import Hookable, require_head, require_weight
from interp.run import run
from interp.tasks.modular_addition import ModularAddition

Basis = Literal["logits", "embedding"]
BASES = ("logits", "embedding")


class ProgressError(ValueError):
    """A task, frequencies, logits or a rule that these measures are not defined for."""


def key_frequencies(
    model: Hookable, task: ModularAddition, by: Basis = "logits", multiple: float = 2.0
) -> pd.DataFrame:
    """One row per frequency 1 … p//2 (k cycles over the p numbers): its power in W_E and in the logits, and whether it is key.

    by: what a key frequency is one of. It is key where its share of the frequencies' norms (roots of power, so that a dominant
    one does not hide the others) is above `multiple` times the uniform 1/(p//2); fewer than (p//2)/multiple can be key. The
    paper reads its key frequencies off the sparse spectra of W_E and of the map from neurons to logits; the threshold is ours.
    "logits" is the end of that map and what restricted and excluded loss act on: an embedding may hold a frequency that no
    logit uses.
    Columns: frequency; embedding_power, the sum of squares of W_E's cos and sin components over numbers, embedding_share, of all
    frequencies' power; logit_power (logits²) and logit_share, of the logits' cos w(a+b) and sin w(a+b) components, after each
    input's mean logit, to which softmax is blind; key. Raises ProgressError, UnsupportedModelError.
    """
    logits = logit_table(model, task)
    return _frequency_table(_embedding_power(model, task), logit_power(logits), by, multiple)


def progress_measures(model: Hookable, task: ModularAddition, frequencies: Sequence[int] | None = None) -> pd.DataFrame:
    """Losses over the full table of inputs, with all logits, with the key frequencies alone and without them, one per row.

    frequencies: the key ones; None is the model's own (`key_frequencies`). Along a training give those of its last model.
    Columns: measure, frequency (missing where the row is of all key ones or of none), split (train, held_out, all; missing for
    weights), value, unit. Measures: those of `logit_measures`; embedding_key_share (the key frequencies' share of W_E's power
    but the constant), embedding_gini (Gini coefficient of the frequencies' norms in W_E: 0 all alike, towards 1 few) and
    squared_weights (sum over all parameters). Exact in float64 but for the model's own rounding.
    Raises ProgressError, UnsupportedModelError.
    """
    logits = logit_table(model, task)
    embedding = _embedding_power(model, task)
    if frequencies is None:
        found = _frequency_table(embedding, logit_power(logits), "logits", 2.0)
        frequencies = found.loc[found["key"], "frequency"].tolist()
    measured = logit_measures(logits, task, frequencies)
    share = float(embedding[[k - 1 for k in frequencies]].sum() / embedding.sum())
    squares = sum(float(one.detach().double().square().sum()) for one in model.parameters())  # type: ignore[attr-defined]
    weights = [
        _row("embedding_key_share", None, share, "share"),
        _row("embedding_gini", None, gini(embedding.sqrt()), "coefficient"),
        _row("squared_weights", None, squares, "weights²"),
    ]
    return pd.concat([measured, _table(weights)], ignore_index=True)


def logit_measures(logits: Tensor, task: ModularAddition, frequencies: Sequence[int]) -> pd.DataFrame:
    """Losses of a table of logits [p p vocab] for a, b in order, one row per measure and split; columns as `progress_measures`.

    loss and accuracy, of the logits as they are, over the whole vocabulary as in training; restricted_loss, with the key
    frequencies' cos w(a+b) and sin w(a+b) components alone, beside each logit's mean over inputs; excluded_loss, with these
    components removed, of all key frequencies at once (frequency missing) and of each. Nats per input, means over the split;
    the paper's restricted loss is of all inputs, its excluded loss of the train split. Raises ProgressError.
    """
    p = task.modulus
    logits = _checked_table(logits, task)
    chosen = _checked_frequencies(frequencies, p)
    sums = (torch.arange(p)[:, None] + torch.arange(p)) % p  # [a b]
    parts = {k: component(logits, [k])[sums] for k in chosen}
    together = component(logits, chosen)[sums]
    tables: list[tuple[str, int | None, Tensor]] = [
        ("loss", None, logits),
        ("restricted_loss", None, together + logits.mean((0, 1))),
        ("excluded_loss", None, logits - together),
        *(("excluded_loss", k, logits - part) for k, part in parts.items()),
    ]
    everything = torch.cartesian_prod(torch.arange(p), torch.arange(p))
    rows = []
    for split, pairs in {**task.splits, "all": everything}.items():
        a, b, answers = pairs[:, 0], pairs[:, 1], task.answers(pairs)
        right = float((logits[a, b].argmax(-1) == answers).double().mean())
        rows.append(_row("accuracy", split, right, "share"))
        for measure, k, table in tables:
            rows.append(_row(measure, split, float(F.cross_entropy(table[a, b], answers)), "nats", k))
    return _table(rows)


def logit_table(model: Hookable, task: ModularAddition) -> Tensor:
    """The logits at "=" of all p × p inputs, [a b vocab], float64 on the CPU. Raises ProgressError, UnsupportedModelError."""
    if not isinstance(task, ModularAddition):
        raise ProgressError(f"task must be interp.tasks.ModularAddition, got {type(task).__name__} {task!r}")
    require_head(model)
    p, vocab = task.modulus, model.config.vocab
    if vocab < len(task.vocabulary):
        raise ProgressError(f"a model with vocab={vocab} cannot add mod {p}; allowed: at least {p + 1} token ids")
    rows = []
    for a in range(p):  # one first number at a time: the activations of p² inputs at once would be gigabytes
        pairs = torch.stack([torch.full((p,), a), torch.arange(p)], 1)
        rows.append(run(model, task.inputs(pairs)).logits[:, 2].detach().cpu().double())
    return torch.stack(rows)


def component(logits: Tensor, frequencies: Sequence[int]) -> Tensor:
    """The cos w(a+b) and sin w(a+b) components of logits [p p vocab], summed over frequencies, by a+b mod p -> [p vocab].

    They are the terms (k, k) of the 2-D Fourier series over inputs. All of these depend on a + b alone, and together with the
    constant they are the mean over the inputs with the same sum, whose 1-D series is read here.
    """
    spectrum = torch.fft.rfft(_by_sum(logits), dim=0)
    kept = torch.zeros_like(spectrum)
    index = torch.tensor(list(frequencies), dtype=torch.long, device=logits.device)
    kept[index] = spectrum[index]
    return torch.fft.irfft(kept, n=len(logits), dim=0)


def logit_power(logits: Tensor) -> Tensor:
    """Per frequency 1 … p//2, mean square over inputs, summed over outputs, of the logits' cos and sin w(a+b) components."""
    return _power(_by_sum(logits - logits.mean(-1, keepdim=True))) / len(logits)


def gini(values: Tensor) -> float:
    """The Gini coefficient of numbers of 0 or more [n]: half their mean difference over their mean; 0 where all are 0."""
    n, ordered = len(values), values.sort()[0]
    if not float(ordered.sum()):
        return 0.0
    ranks = torch.arange(1, n + 1, dtype=ordered.dtype, device=ordered.device)
    return float(((2 * ranks - n - 1) * ordered).sum() / (n * ordered.sum()))


def _by_sum(logits: Tensor) -> Tensor:
    """The mean over the p inputs with the same (a + b) mod p -> [p vocab]."""
    p = len(logits)
    a, total = torch.arange(p)[:, None], torch.arange(p)
    return logits[a, (total - a) % p].mean(0)


def _power(series: Tensor) -> Tensor:
    """Sum of squares over the p places and columns of [p n] that each frequency 1 … p//2 makes (Parseval)."""
    p = len(series)
    power = torch.fft.rfft(series, dim=0).abs().square().sum(-1)[1:] * 2 / p
    if p % 2 == 0:
        power[-1] /= 2  # p/2 has a cosine alone
    return power


def _embedding_power(model: Hookable, task: ModularAddition) -> Tensor:
    return _power(require_weight(model, "W_E").detach().cpu().double()[: task.modulus])


def _frequency_table(embedding: Tensor, logits: Tensor, by: str, multiple: float) -> pd.DataFrame:
    if by not in BASES:
        raise ProgressError(f"by={by!r} is not allowed; allowed: {', '.join(map(repr, BASES))}")
    if not (isinstance(multiple, int | float) and math.isfinite(multiple) and multiple >= 1):
        raise ProgressError(f"multiple={multiple!r} is not allowed; allowed: a finite number of 1 or more")
    powers = {"embedding": embedding, "logits": logits}
    shares = {name: _shares(power) for name, power in powers.items()}
    return pd.DataFrame({
        "frequency": range(1, len(embedding) + 1),
        "embedding_power": embedding.tolist(), "embedding_share": shares["embedding"].tolist(),
        "logit_power": logits.tolist(), "logit_share": shares["logits"].tolist(),
        "key": (_shares(powers[by].sqrt()) > multiple / len(embedding)).tolist(),
    })  # fmt: skip


def _shares(values: Tensor) -> Tensor:
    return values / values.sum().clamp(min=torch.finfo(values.dtype).tiny)  # all 0 where nothing is there to share


def _checked_table(logits: Tensor, task: ModularAddition) -> Tensor:
    p = task.modulus
    if logits.ndim != 3 or tuple(logits.shape[:2]) != (p, p) or logits.shape[2] < p:
        raise ProgressError(f"logits must be [a b vocab] = ({p}, {p}, {p} or more), got {tuple(logits.shape)}")
    return logits.detach().cpu().double()


def _checked_frequencies(frequencies: Sequence[int], p: int) -> list[int]:
    chosen: list[Any] = list(frequencies)
    bad = [k for k in chosen if isinstance(k, bool) or not hasattr(k, "__index__") or not 1 <= k <= p // 2]
    if bad or len(set(chosen)) < len(chosen):
        raise ProgressError(f"frequencies={chosen} are not allowed; allowed: different integers in 1 … {p // 2}")
    return [int(k) for k in chosen]


def _row(measure: str, split: str | None, value: float, unit: str, frequency: int | None = None) -> dict[str, Any]:
    return {"measure": measure, "frequency": frequency, "split": split, "value": value, "unit": unit}


def _table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    table = pd.DataFrame(rows)
    return table.assign(frequency=table["frequency"].astype("Int64"), split=table["split"].astype("string"))
