"""Logit lens (nostalgebraist 2020): what the model would predict if the stream went straight to the head.

softmax(N_f(h) W_U) with the final norm recomputed on each h, so the last layer's row is the model's own output.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.at import positions as locate
from interp.hookable import Hookable, require_head
from interp.metrics import wide
from interp.run import prepare, record_sites, run
from interp.sites import Site
from interp.tokens import labels


class LensError(ValueError):
    """A site whose value is not a vector of the stream, or targets that do not fit the batch."""


def logit_lens(
    model: Hookable,
    inputs: Any,
    sites: str | Site | Sequence[str | Site] = ("resid_pre", "resid_post"),
    positions: Any = -1,
    targets: Tensor | None = None,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> pd.DataFrame:
    """One row per site × example × position: the distribution read there, against the model's final one.

    sites: stream sites; the default is the stream before and after every block. positions: an int (negative from the
    last real token), int tensor [batch], role, "all", or a list of these. targets: token ids [batch] whose
    probability is followed; default: the model's own prediction at that position.
    Columns: site, layer, name, example, position, role, token (read there), target, target_token, probability, rank
    (0 = top), top, top_token, top_probability, entropy and kl_to_final (nats), agrees (top = the final top).
    It reads every stream through the last layer's norm and head, so an early site can hold what it cannot show.
    """
    require_head(model)
    inputs = prepare(model, inputs, tokenizer, prefix)
    wanted = _stream_sites(model, sites)
    recorded = run(model, inputs, record=wanted)
    if targets is not None and tuple(targets.shape) != (inputs.batch,):
        raise LensError(f"targets must be token ids [batch] = ({inputs.batch},), got shape {tuple(targets.shape)}")
    frames = []
    rows = torch.arange(inputs.batch, device=inputs.tokens.device)
    for place in _places(inputs, positions):
        index = locate(inputs, place)
        final = wide(recorded.logits[rows, index]).log_softmax(-1)
        target = final.argmax(-1) if targets is None else targets.to(final.device)
        for site in wanted:
            with torch.no_grad():
                lens = wide(model.unembed(recorded.cache[site][rows, index])).log_softmax(-1)
            frames.append(_rows(site, place, index, lens, final, target, inputs.tokens[rows, index], tokenizer))
    return pd.concat(frames, ignore_index=True)


def _rows(
    site, place, index: Tensor, lens: Tensor, final: Tensor, target: Tensor, read: Tensor, tokenizer
) -> pd.DataFrame:
    chance, top = lens.gather(-1, target[:, None])[:, 0], lens.argmax(-1)
    return pd.DataFrame({
        "site": str(site), "layer": site.layer, "name": site.name,
        "example": range(len(index)), "position": index.tolist(), "role": place if isinstance(place, str) else None,
        "token": labels(tokenizer, read), "target": target.tolist(), "target_token": labels(tokenizer, target),
        "probability": chance.exp().tolist(), "rank": (lens > chance[:, None]).sum(-1).tolist(),
        "top": top.tolist(), "top_token": labels(tokenizer, top), "top_probability": lens.amax(-1).exp().tolist(),
        "entropy": (-lens.exp() * lens).sum(-1).tolist(),
        "kl_to_final": (final.exp() * (final - lens)).sum(-1).tolist(), "agrees": (top == final.argmax(-1)).tolist(),
    })  # fmt: skip


def _stream_sites(model: Hookable, sites: Any) -> list[Site]:
    asked, output = [sites] if isinstance(sites, str | Site) else list(sites), model.sites[-1].stack
    found = [site for site in record_sites(model, asked) if site.stack == output or site.name not in asked]
    bad = [
        s for s in found if s.spec.axes != ("position", "d_model") or s.name.startswith(("final", "norm", "cross_norm"))
        or s.stack != output
    ]  # fmt: skip
    if bad:
        raise LensError(
            f"the lens reads vectors of the stream that ends in the head [position d_model], not {', '.join(map(str, bad))}"
        )
    return found


def _places(inputs, positions: Any) -> list[Any]:
    if isinstance(positions, str) and positions == "all":
        if inputs.mask is not None:
            raise LensError("positions='all' with padding would read padding; give positions or roles")
        return list(range(inputs.length))
    return list(positions) if isinstance(positions, list | tuple) else [positions]
