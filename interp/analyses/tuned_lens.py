"""Tuned lens (Belrose et al. 2023): a logit lens with one learned affine map per layer, which undoes what the plain one mistakes.

softmax(N_f(h + A h + b) W_U), A and b trained to minimise KL(final ‖ lens); at A = 0, b = 0 it is the logit lens itself. It can
learn to predict what the model has not yet computed: a low KL says that h suffices, not that the model reads h so.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from interp.analyses.lens_folder import fingerprint, read_lens, refuse_other, write_lens
from interp.analyses.logit_lens import LensError, batches_of, lens_batches, lens_scores, plain_lens, stream_sites
from interp.analyses.splits import held_out_names, sequence_names
from interp.hookable import Hookable, require_head
from interp.metrics import wide
from interp.model.inputs import Inputs
from interp.run import prepare, run
from interp.sites import Site

MOMENTUM, DECAY, CLIP = 0.9, 1e-3, 1.0


@dataclass(frozen=True, eq=False)
class TunedLens:
    """One affine translator h + A h + b per site, for one model.

    A [d_model d_model] and b [d_model] by site. settings: how it was trained. history: columns step, site, loss (KL of the
    step's batch, nats per token). held_out: the sequences split off before training (not saved). trained_on: a hash per
    sequence that it was trained on.
    """

    model: Hookable
    A: dict[Site, Tensor]
    b: dict[Site, Tensor]
    settings: dict[str, Any] = field(default_factory=dict)
    history: pd.DataFrame = field(default_factory=pd.DataFrame)
    held_out: tuple[Inputs, ...] = ()
    trained_on: frozenset[str] = frozenset()

    @property
    def sites(self) -> tuple[Site, ...]:
        """Where it has a translator, in order."""
        return tuple(self.A)

    def __repr__(self) -> str:
        return f"TunedLens({len(self.A)} sites {self.sites[0]} … {self.sites[-1]}, {self.settings})"

    def __call__(self, stream: Tensor, site: str | Site) -> Tensor:
        """Logits [… vocab] of a stream [… d_model] recorded at `site`. LensError for a site without a translator."""
        found = Site.parse(site)
        if found not in self.A:
            allowed = ", ".join(map(str, self.A))
            raise LensError(f"the lens has no translator for '{site}'; allowed: {allowed}")
        return _translated(self.model, stream, self.A[found], self.b[found])

    @classmethod
    def train(
        cls,
        model: Hookable,
        inputs: Any,
        sites: str | Site | Sequence[str | Site] = "resid_pre",
        held_out: float = 0.1,
        steps: int = 300,
        learning_rate: float | None = None,
        optimizer: Literal["adam", "sgd"] = "adam",
        batch_tokens: int = 1024,
        seed: int = 0,
        progress: bool = False,
        tokenizer: Any = None,
        prefix: Sequence[int] | None = None,
    ) -> TunedLens:
        """A lens for `model`, trained on activations of the given sequences; the model itself gets no gradients.

        inputs: anything `run` accepts, or an iterable of batches, whose tokens are kept in memory; activations never are beyond
        one step's. held_out: the share of different sequences split off before training. batch_tokens: tokens of a step.
        optimizer: "adam" (learning rate 1e-3), or "sgd", the paper's: Nesterov momentum .9, learning rate 1·(1 − .9), weight
        decay 1e-3. Both decay linearly to 0, the gradient of each translator clipped to length 1. Sites are independent of each
        other. One forward of the model per step, and one of its head, back and forth, per site. Raises LensError.
        """
        require_head(model)
        rate = learning_rate if learning_rate is not None else {"adam": 1e-3, "sgd": 1 - MOMENTUM}.get(optimizer, 1.0)
        _check(held_out, steps, rate, optimizer)
        wanted = stream_sites(model, sites)
        generator = torch.Generator().manual_seed(seed)
        batches = [prepare(model, one, tokenizer, prefix) for one in batches_of(inputs)]
        kept, used, hashes = _split(batches, held_out, generator)
        parts = _endless(model, used, batch_tokens, generator)
        A, b = _zeros(model, wanted, used[0])
        translators = [(A[site], b[site]) for site in wanted]
        descent = _optimizer([one for pair in translators for one in pair], optimizer, rate)
        rows: list[dict[str, Any]] = []
        for step in tqdm(range(steps), disable=not progress, desc="tuned lens"):
            for group in descent.param_groups:
                group["lr"] = rate * (1 - step / steps)
            losses = _step(model, next(parts), wanted, translators)
            descent.step()
            rows += [{"step": step, "site": str(site), "loss": loss} for site, loss in zip(wanted, losses, strict=True)]
            if not all(map(math.isfinite, losses)):
                raise LensError(
                    f"training diverged at step {step}: a loss is not finite; learning_rate={rate:g} is too high"
                )
        settings = {"steps": steps, "learning_rate": rate, "optimizer": optimizer, "batch_tokens": batch_tokens, "seed": seed,
                    "held_out": held_out}  # fmt: skip
        done = [{site: one[site].detach() for site in wanted} for one in (A, b)]
        return cls(model, done[0], done[1], settings, pd.DataFrame(rows), kept, hashes)

    def compare(
        self,
        model: Hookable | None = None,
        inputs: Any = None,
        batch_tokens: int = 1024,
        tokenizer: Any = None,
        prefix: Sequence[int] | None = None,
    ) -> pd.DataFrame:
        """The plain and the tuned lens beside each other, two rows per site; inputs: default the sequences held out.

        Columns: those of `lens_scores` (site, layer, name, lens, kl_to_final, cross_entropy, bias, agreement, n, …), with
        kl_minus_plain (nats, below 0: better than the plain lens) and its standard error over sequences, worse (kl_minus_plain
        above 0), and seen: how many of the sequences the lens was trained on. Raises LensError, also for another model.
        """
        if model not in (None, self.model):
            refuse_other(fingerprint(self.model), model)
        inputs = self.held_out if inputs is None else inputs
        if isinstance(inputs, tuple) and not inputs:
            raise LensError("a loaded lens has no held-out sequences with it; give inputs= that it was not trained on")
        batches = [prepare(self.model, one, tokenizer, prefix) for one in batches_of(inputs)]
        seen = sum(one in self.trained_on for batch in batches for one in sequence_names(batch))
        lenses = {"logit": plain_lens(self.model), "tuned": self}
        table = lens_scores(self.model, batches, lenses, self.sites, batch_tokens)
        table = table.rename(columns=lambda name: name.replace("minus_first", "minus_plain"))
        return table.assign(worse=table["kl_minus_plain"] > 0, seen=seen)

    def save(self, folder: str | Path) -> Path:
        """Write `lens.json` and `weights.safetensors` into a new folder, whole or not at all. FileExistsError if it exists."""
        weights = {f"{site}.{name}": one for name, by in (("A", self.A), ("b", self.b)) for site, one in by.items()}
        about = {"sites": [str(site) for site in self.sites], "settings": self.settings,
                 "model": fingerprint(self.model), "trained_on": sorted(self.trained_on)}  # fmt: skip
        return write_lens(folder, about, weights)

    @classmethod
    def load(cls, folder: str | Path, model: Hookable) -> TunedLens:
        """The lens that `save` wrote, for the model that it was trained on. LensError names what is wrong with the folder."""
        require_head(model)
        about, weights = read_lens(folder, model)
        sites = [Site.parse(one) for one in about["sites"]]
        A, b = ({site: weights[f"{site}.{name}"] for site in sites} for name in ("A", "b"))
        return cls(model, A, b, about["settings"], trained_on=frozenset(about["trained_on"]))


def _translated(model: Hookable, stream: Tensor, A: Tensor, b: Tensor) -> Tensor:
    h = stream.to(A.dtype)
    return model.unembed((h + h @ A.T + b).to(stream.dtype))


@torch.enable_grad()
def _step(model: Hookable, part: Inputs, sites: list[Site], translators: list[tuple[Tensor, Tensor]]) -> list[float]:
    """Gradients of one step; the mean KL(final ‖ lens) of each site. One site's logits in memory at a time."""
    recorded = run(model, part, record=sites)
    real = torch.ones_like(part.tokens, dtype=torch.bool) if part.mask is None else part.mask
    final, losses = wide(recorded.logits[real]).log_softmax(-1), []
    for site, pair in zip(sites, translators, strict=True):
        lens = wide(_translated(model, recorded.cache[site][real], *pair)).log_softmax(-1)
        loss = (final.exp() * (final - lens)).sum(-1).mean()
        # Asked of the translator alone: a frozen or trainable model stays without gradients.
        for parameter, gradient in zip(pair, torch.autograd.grad(loss, pair), strict=True):
            parameter.grad = gradient
        torch.nn.utils.clip_grad_norm_(pair, CLIP)
        losses.append(float(loss.detach()))
    return losses


def _zeros(model: Hookable, sites: list[Site], used: Inputs) -> tuple[dict[Site, Tensor], dict[Site, Tensor]]:
    """A = 0 and b = 0 in the stream's type, 32-bit at least."""
    streams, A, b = run(model, used.select(slice(0, 1)), record=sites).cache, {}, {}
    for site in sites:
        like = wide(streams[site])
        A[site] = like.new_zeros(like.shape[-1], like.shape[-1]).requires_grad_()
        b[site] = like.new_zeros(like.shape[-1]).requires_grad_()
    return A, b


def _optimizer(parameters: list[Tensor], name: str, rate: float) -> torch.optim.Optimizer:
    if name == "adam":
        return torch.optim.Adam(parameters, lr=rate)
    return torch.optim.SGD(parameters, lr=rate, momentum=MOMENTUM, nesterov=True, weight_decay=DECAY)


def _split(
    batches: list[Inputs], share: float, generator: torch.Generator
) -> tuple[tuple[Inputs, ...], list[Inputs], frozenset]:
    """Held-out batches, training batches, and the training sequences' hashes; equal sequences fall on the same side."""
    hashes = [sequence_names(batch) for batch in batches]
    different = list(dict.fromkeys(one for batch in hashes for one in batch))
    if len(different) < 2:
        raise LensError(
            f"inputs hold {len(different)} different sequence(s); allowed: at least 2, one of them held out"
        )
    apart = held_out_names(different, share, generator)
    sides: tuple[list[Inputs], list[Inputs]] = ([], [])
    for batch, names in zip(batches, hashes, strict=True):
        for side, wanted in zip(sides, (True, False), strict=True):
            rows = [i for i, name in enumerate(names) if (name in apart) == wanted]
            if rows:
                side.append(batch.select(rows))
    return tuple(sides[0]), sides[1], frozenset(different) - apart


def _endless(
    model: Hookable, used: Iterable[Inputs], batch_tokens: int, generator: torch.Generator
) -> Iterator[Inputs]:
    """Parts of about `batch_tokens` tokens of one length, in a new order every time that all have been read."""
    used = list(used)
    while True:
        orders = [torch.randperm(batch.batch, generator=generator) for batch in used]
        mixed = [batch.select(order.to(batch.tokens.device)) for batch, order in zip(used, orders, strict=True)]
        parts = list(lens_batches(model, mixed, batch_tokens))
        for i in torch.randperm(len(parts), generator=generator).tolist():
            yield parts[i]


def _check(held_out: float, steps: int, rate: float, optimizer: str) -> None:
    for what, value, good, allowed in (
        ("held_out", held_out, isinstance(held_out, float) and 0 < held_out < 1, "a share between 0 and 1"),
        ("steps", steps, isinstance(steps, int) and not isinstance(steps, bool) and steps >= 0, "an int >= 0"),
        ("learning_rate", rate, isinstance(rate, int | float) and 0 < rate < math.inf, "a number > 0"),
        ("optimizer", optimizer, optimizer in ("adam", "sgd"), "'adam', 'sgd'"),
    ):
        if not good:
            raise LensError(f"{what}={value!r} is not allowed; allowed: {allowed}")
