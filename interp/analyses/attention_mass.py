"""How much of each head's attention lies where it should: on a known key position of every query (A3).

Attention weights say where a head looks, not what the output needs of it; patching or knock-out tells that.
"""

from __future__ import annotations

from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.at import SelectionError
from interp.hookable import Hookable
from interp.run import prepare, run
from interp.sites import Site, expand


def attention_mass(model: Hookable, inputs: Any, keys: Tensor, site: str = "pattern") -> pd.DataFrame:
    """One row per layer × head: the mean attention on `keys` over all counted queries of all examples.

    keys [batch query] int: the key position that each query should look at, −1 where a query does not count. site:
    "pattern", "cross_pattern" (keys are source positions), or with a stack, "encoder.pattern".
    Columns: site, layer, head, mass, chance (the mean of 1/number of keys that the mask admits: attention without preference), n
    (queries counted). Raises SelectionError when keys has another shape, is out of range, or counts no query.
    """
    inputs, keys = prepare(model, inputs), torch.as_tensor(keys)
    sites = expand(site, model.sites)
    wrong = [str(one) for one in sites if one.name not in ("pattern", "cross_pattern")]
    if wrong or len({one.stack for one in sites}) > 1:
        allowed = dict.fromkeys(
            ".".join(filter(None, (s.stack, s.name))) for s in model.sites if s.name.endswith("pattern")
        )
        raise SelectionError(
            f"site={site!r} is not one stack's attention pattern; allowed: {', '.join(map(repr, allowed))}"
        )
    scores = {one: Site(one.name.replace("pattern", "scores"), one.layer, one.stack) for one in sites}
    got = run(model, inputs, record=[*sites, *scores.values()])
    rows = []
    for place in sites:
        pattern = got.cache[place]
        batch, _, n_queries, n_keys = pattern.shape
        if tuple(keys.shape) != (batch, n_queries) or keys.dtype.is_floating_point or keys.dtype == torch.bool:
            raise SelectionError(
                f"keys must be ints [batch query] = ({batch}, {n_queries}), got {keys.dtype} {tuple(keys.shape)}"
            )
        if int(keys.max()) >= n_keys or int(keys.max()) < 0:
            raise SelectionError(
                f"keys holds {int(keys.max())} at most; allowed: 0 … {n_keys - 1}, −1 for queries not counted"
            )
        index = keys.to(pattern.device)
        counts = index >= 0
        on_key = pattern.gather(-1, index.clamp(min=0)[:, None, :, None].expand(-1, pattern.shape[1], -1, -1))[..., 0]
        # Edges of the mask, not weights above 0: sharp attention rounds to 0.
        admitted = (got.cache[scores[place]] > float("-inf")).sum(-1)
        chance = 1 / admitted.clamp(min=1).double()
        for head in range(pattern.shape[1]):
            rows.append({
                "site": str(place), "layer": place.layer, "head": head, "mass": float(on_key[:, head][counts].double().mean()),
                "chance": float(chance[:, head][counts].mean()), "n": int(counts.sum()),
            })  # fmt: skip
    return pd.DataFrame(rows)


def permuted_keys(keys: Tensor, seed: int = 0) -> Tensor:
    """`keys` with the counted queries of each example in another order: the null of `attention_mass` (same shape)."""
    generator, out = torch.Generator().manual_seed(seed), keys.clone()
    for row in out:
        counted = (row >= 0).nonzero()[:, 0]
        row[counted] = row[counted[torch.randperm(len(counted), generator=generator)]]
    return out
