"""The self-test of a bridged model: noise is written to every site, and must do what a write there does."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from interp.bridges.huggingface import BridgeError
from interp.bridges.lens_in.places import Pass, Place
from interp.model.inputs import Inputs
from interp.sites import Site

CHUNK = 32  # how many sites are written to in one forward pass, each in its own row of the batch
# One tensor of the stream and what was added to it: a write to either must have the same consequences.
_PAIRS = (("attn_out", ("resid_mid_sum", "resid_mid")), ("ffn_out", ("resid_post_sum", "resid_post")))


@dataclass
class Found:
    """The survey's result: sizes for the config, the places in the order reached, and what was left out, why."""

    places: dict[Site, Place]
    sizes: dict[str, Any]
    additive: bool
    blocks_add: bool  # every block's resid_post is its resid_pre plus attn_out plus ffn_out
    left_padding: bool  # leaves the logits of real tokens as they are
    dropped: dict[Site, str] = field(default_factory=dict)


def near(found: Tensor, wanted: Tensor, slack: float = 1) -> bool:
    """Whether two routes gave the same, up to the rounding of a whole forward pass (times `slack`)."""
    if found.shape != wanted.shape:
        return False
    relative = min(slack * max(1e-4, 20 * torch.finfo(wanted.dtype).eps), 0.3)
    return bool((found - wanted).abs().max() <= relative * wanted.abs().max())


def adds_up(found: Tensor, wanted: Tensor, parts: Tensor) -> bool:
    """Whether a sum is right entry by entry, up to the rounding of one sum whose terms' magnitudes add to `parts`.

    A stream with a few huge entries must not hide that a small term is missing from the others.
    """
    if found.shape != wanted.shape:
        return False
    return bool(((found - wanted).abs() <= 16 * torch.finfo(wanted.dtype).eps * parts).all())


class _Writer:
    """A tap that adds noise to each of some sites in its own row of the batch, and notes what it sees of all."""

    def __init__(self, rows: dict[Site, int], noise: dict[Site, Tensor]) -> None:
        self.rows, self.noise = rows, noise
        self.seen: dict[Site, Tensor] = {}  # the first row's value, in the order reached
        self.again: list[Site] = []
        self.uncut: list[Site] = []

    def wants(self, site: Site) -> bool:
        return site.name != "logits"

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        if site in self.seen:
            self.again.append(site)
        self.seen[site] = value[0]
        scores = Site("scores", site.layer) if site.name == "pattern" else None
        if scores in self.rows and bool((value[self.rows[scores], :, -1, 0] != 0).any()):
            self.uncut.append(scores)
        if site not in self.rows:
            return value
        row, value = self.rows[site], value.clone()
        value[row] = value[row] + self.noise[site].to(value)
        if site.name == "scores":
            value[row, :, -1, 0] = -torch.inf  # must cut that edge
        return value


def write(model: Any, inputs: Inputs, found: Found) -> None:
    """Noise into every site, one per row; drop those whose row does not differ as it must."""
    plain, sites = model.forward(inputs, []), list(found.places)
    noise = _noise(_tapped(model, inputs, found, _Writer({}, {}))[0], found.sizes["n_layers"])
    outputs: dict[Site, Tensor] = {}
    waiting = [sites[start : start + CHUNK] for start in range(0, len(sites), CHUNK)]
    while waiting:
        chunk = waiting.pop()
        tap = _Writer({site: row + 2 for row, site in enumerate(chunk)}, noise)
        batch = Inputs(inputs.tokens[:1].expand(len(chunk) + 3, -1))
        try:
            logits = _tapped(model, batch, found, tap)[1]
        except (AttributeError, RuntimeError, TypeError) as error:  # the bridge's own code, on one of these sites
            if len(chunk) == 1:
                found.dropped[chunk[0]] = f"raises {type(error).__name__} when written: {error}"
            else:
                waiting += [chunk[: len(chunk) // 2], chunk[len(chunk) // 2 :]]
            continue
        base = logits[0]
        spread = (logits[[1, -1]] - base).abs().max()  # rows of a batch round differently; these three hold the same
        least = 3 * spread + 10 * torch.finfo(torch.float32).eps * base.abs().max()
        outputs |= {site: logits[row] - base for site, row in tap.rows.items()}
        for site in chunk:
            if bool(outputs[site].abs().max() <= least):
                found.dropped[site] = "changes nothing when written"
        for site in tap.uncut:
            found.dropped.setdefault(site, "cannot cut an edge")
    _same_consequences(outputs, found)
    found.places = {site: place for site, place in found.places.items() if site not in found.dropped}
    found.dropped = {site: found.dropped[site] for site in sorted(found.dropped, key=lambda site: site.layer or 0)}
    if not torch.equal(plain.nan_to_num(), model.forward(inputs, []).nan_to_num()):
        raise BridgeError("the bridge's output changed by being read and written to; allowed: models without state")


def _tapped(model: Any, inputs: Inputs, found: Found, tap: _Writer) -> tuple[dict[Site, Tensor], Tensor]:
    """(first row's value by site, logits); every site once and in the order of the survey, or BridgeError."""
    logits = model.forward(inputs, Pass(found.places, tap, inputs, model.weight).hooks())
    if tap.again or list(tap.seen) != list(found.places):
        raise BridgeError("a second forward pass reached other sites than the first, or in another order; allowed: models whose "
                          "course does not depend on their input")  # fmt: skip
    return tap.seen, logits


def _noise(seen: dict[Site, Tensor], n_layers: int) -> dict[Site, Tensor]:
    """As large as the value itself; the same for every site that is added to the stream, so that writes compare."""
    generator = torch.Generator().manual_seed(1)
    last = seen[Site("resid_post", n_layers - 1)]
    stream = torch.randn(last.shape, generator=generator).to(last) * last.std()
    paired = {name for one, others in _PAIRS for name in (one, *others)}
    noise = {}
    for site, value in seen.items():
        finite = value[torch.isfinite(value)]
        own = torch.randn(value.shape, generator=generator).to(value) * (finite.std() + finite.abs().mean())
        own = own.abs() if site.name.endswith("_scale") else own  # a divisor near 0 overflows 16 bits
        noise[site] = stream if site.name in paired else own
    return noise


def _same_consequences(outputs: dict[Site, Tensor], found: Found) -> None:
    """Adding to what is written to the stream must be adding to the stream."""
    for site in list(outputs):
        for name, sums in _PAIRS:
            if site.name != name or site in found.dropped:
                continue
            others = [Site(other, site.layer) for other in sums]
            if name == "attn_out" and not any(other in outputs for other in others) and found.blocks_add:
                others = [Site("resid_post", site.layer)]  # a parallel block
            other = next((other for other in others if other in outputs), None)
            if other is None or other in found.dropped or not (found.blocks_add or other.name.endswith("_sum")):
                continue
            if not near(outputs[site], outputs[other], slack=10):
                wrong = other if other.name == "resid_mid" else site
                found.dropped[wrong] = f"does not act as the same change at {site if wrong is other else other} does"
