"""What a norm does to what its readers see, apart from the scale: x̂ = (x − μ)/σ, then gain and offset.

A circuit of weights and a logit attribution both need the gain of a norm, which no protocol hands out; writing to the norm's
inner site shows it on every model that has that site, ours or bridged.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from interp.hookable import Hookable, UnsupportedModelError
from interp.interventions import Add, Replace
from interp.model.inputs import Inputs
from interp.run import run
from interp.sites import Site

STREAMS = {"norm1": "resid_pre", "cross_norm": "resid_mid", "final": "resid_post"}


@dataclass(frozen=True, eq=False)
class NormReading:
    """A norm with its scale frozen: x -> gain · (x − μ if centred)/σ + offset; gain and offset are [d_model]."""

    gain: Tensor
    offset: Tensor
    centred: bool
    exists: bool = True

    def read(self, weight: Tensor) -> Tensor:
        """A reader's weight [d_model n] as the stream sees it: gain and centring moved into it (σ stays outside)."""
        folded = self.gain.to(weight)[:, None] * weight
        return folded - folded.mean(0, keepdim=True) if self.centred else folded

    def centre(self, writers: Tensor) -> Tensor:
        """What is left of vectors written to the stream [… d_model] once this norm has centred them."""
        return writers - writers.mean(-1, keepdim=True) if self.centred else writers


@torch.no_grad()
def norm_readings(model: Hookable, name: str = "norm1") -> list[NormReading]:
    """The norm called `name` ("norm1", "cross_norm" of every layer of the output's stack; "final": one) as `NormReading`s.

    Found by three runs on two tokens: one with the stream shifted off mean 0, two with x̂ set to 0 and to 1. A norm that the
    model does not have reads the stream itself. Raises UnsupportedModelError for a norm whose inner sites the model does not
    offer, or that does something else.
    """
    stack = model.sites[-1].stack
    layers = [None] if name == "final" else list(range(model.config.n_layers))
    outs = [Site(name, layer, stack) for layer in layers]
    hats, scales = ([Site(f"{name}_{part}", layer, stack) for layer in layers] for part in ("hat", "scale"))
    streams = [Site(STREAMS[name], model.config.n_layers - 1 if layer is None else layer, stack) for layer in layers]
    tokens = torch.arange(2)[None] % model.config.vocab
    tokens = tokens[:, : model.config.n_ctx]
    inputs = Inputs(tokens, source=tokens if model.config.kind == "encoder-decoder" else None)
    missing = [str(site) for site in streams if site not in model.sites]
    if missing:
        raise UnsupportedModelError(
            f"reading a norm needs the site(s) {', '.join(missing)}, which this model does not offer"
        )
    have = [site for site in (*outs, *hats, *scales, *streams) if site in model.sites]
    # A stream whose mean happens to be 0 would not show whether the norm centres it.
    base = run(model, inputs, record=have, change=[Add(site, 1.0) for site in streams]).cache
    normed = [i for i in range(len(layers)) if all(one[i] in base for one in (outs, hats, scales))]
    edits = []
    for fill in (0.0, 1.0):
        change = [Replace(hats[i], torch.full_like(base[hats[i]], fill)) for i in normed]
        edits.append(run(model, inputs, record=[outs[i] for i in normed], change=change).cache if normed else {})
    found = []
    for i, (out, stream) in enumerate(zip(outs, streams, strict=True)):
        x = base[stream]
        if i not in normed:
            found.append(_without(model, out, x, base.get(out)))
            continue
        offset = edits[0][out][0, 0]
        found.append(
            NormReading(edits[1][out][0, 0] - offset, offset, _centres(out, x, base[hats[i]] * base[scales[i]]))
        )
    return found


def _centres(norm: Site, x: Tensor, scaled: Tensor) -> bool:
    """Whether x̂ σ is x or x − μ; UnsupportedModelError when it is neither."""
    errors = [float((scaled - one).abs().max()) for one in (x, x - x.mean(-1, keepdim=True))]
    if min(errors) > 0.02 * float(x.abs().max()):
        raise UnsupportedModelError(f"'{norm}' of this model neither only scales nor also centres the stream: x̂ σ misses both "
                                    f"x and x − μ (by {errors[0]:.3g}, {errors[1]:.3g})")  # fmt: skip
    return errors[1] < errors[0]


def _without(model: Hookable, norm: Site, x: Tensor, out: Tensor | None) -> NormReading:
    """The reading of a norm without inner sites: nothing at all, if the value it hands on is the stream."""
    known = getattr(model.config, "norm", None)
    absent = out is None and (known is not None or norm.name == "final")
    if not absent and (out is None or not torch.equal(out, x)):
        raise UnsupportedModelError(f"this needs the gain of '{norm}', read at its sites '{norm}_scale', '{norm}_hat' and "
                                    f"'{norm}', which this model does not offer")  # fmt: skip
    return NormReading(torch.ones_like(x[0, 0]), torch.zeros_like(x[0, 0]), centred=False, exists=False)
