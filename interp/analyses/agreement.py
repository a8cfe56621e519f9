"""Do keys and values of an FFN agree? Geva 2021's agreement rate, against a permuted pairing."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.analyses.ffn_memory import signs_of
from interp.at import positions
from interp.hookable import Hookable, UnsupportedModelError, require_weight
from interp.run import prepare, run
from interp.sites import output_sites


@torch.no_grad()
def key_value_agreement(
    model: Hookable, inputs: Any, answers: Tensor, position: Any = -1, permutations: int = 1000, seed: int = 0
) -> pd.DataFrame:
    """Per layer and sign: the share of neurons whose value promotes most the answer of the prompt that excites them most.

    inputs, answers [batch]: prompts and the token that follows at `position`, where the neurons are read. Gated neurons
    count once per sign, with sign · v_i. Null: values permuted among the layer's neurons, which keeps how
    often each token is promoted. Columns: layer, sign, n (neurons that fire with that sign), agreement, null_mean,
    null_high (97.5th percentile), p (one-sided, (1 + #{null >= observed})/(1 + permutations)).
    The unit is the neuron of one trained model: p says nothing about other seeds.
    """
    inputs = prepare(model, inputs)
    answers, rows = answers.to(inputs.tokens.device), torch.arange(inputs.batch, device=inputs.tokens.device)
    index = positions(inputs, position)
    if tuple(answers.shape) != (inputs.batch,):
        raise ValueError(f"answers must be token ids [batch] = ({inputs.batch},), got shape {tuple(answers.shape)}")
    sites = output_sites("ffn_act", model.sites)
    if not sites:
        raise UnsupportedModelError("key-value agreement needs FFNs, and this model has none")
    recorded = run(model, inputs, record=sites)
    unembedding = require_weight(model, "W_U")
    signs = signs_of(model)
    generator, table = torch.Generator().manual_seed(seed), []
    for site in sites:
        layer, act = site.layer, recorded.cache[site][rows, index]  # [example neuron]
        written = require_weight(model, "W_out", layer) @ unembedding  # [neuron vocab]
        for sign in signs:
            strongest, example = (sign * act).max(0)
            fires = strongest > 0
            expected = answers[example[fires]].cpu()
            promoted = (sign * written).argmax(-1)[fires].cpu()
            observed = float((promoted == expected).double().mean())  # NaN when no neuron fires with this sign
            null = torch.stack([
                (promoted[torch.randperm(len(promoted), generator=generator)] == expected).double().mean()
                for _ in range(permutations)
            ])  # fmt: skip
            table.append({
                "layer": layer, "sign": sign, "n": int(fires.sum()), "agreement": observed,
                "null_mean": float(null.mean()), "null_high": float(null.quantile(0.975)),
                "p": (1 + int((null >= observed - 1e-12).sum())) / (1 + permutations) if len(promoted) else math.nan,
            })  # fmt: skip
    return pd.DataFrame(table)
