"""Logit lens (nostalgebraist 2020): what the model would predict if the stream went straight to the head.

softmax(N_f(h) W_U) with the final norm recomputed on each h, so the last layer's row is the model's own output.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from interp.at import positions as locate
from interp.hookable import Hookable, require_head
from interp.metrics import wide
from interp.model.inputs import Inputs
from interp.run import prepare, record_sites, run
from interp.sites import Site
from interp.tokens import labels

Lens = Callable[[Tensor, Site], Tensor]  # stream [n d_model], where it was read -> logits [n vocab]


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
    next_token: Tensor | None = None,
) -> pd.DataFrame:
    """One row per site × example × position: the distribution read there, against the model's final one.

    sites: stream sites; the default is the stream before and after every block. positions: an int (negative from the
    last real token), int tensor [batch], role, "all", or a list of these. targets: token ids [batch] whose
    probability is followed; default: the model's own prediction at that position. next_token: token ids that truly follow
    [batch] (of the one position asked for) or [batch pos]; default: the inputs' own next real token.
    Columns: site, layer, name, example, position, role, token (read there), target, target_token, probability, rank
    (0 = top), top, top_token, top_probability, entropy and kl_to_final (nats), agrees (top = the final top), next_token
    (missing where none follows) and cross_entropy to it (nats; NaN there).
    It reads every stream through the last layer's norm and head, so an early site can hold what it cannot show.
    """
    require_head(model)
    inputs = prepare(model, inputs, tokenizer, prefix)
    wanted = stream_sites(model, sites)
    recorded = run(model, inputs, record=wanted)
    if targets is not None and tuple(targets.shape) != (inputs.batch,):
        raise LensError(f"targets must be token ids [batch] = ({inputs.batch},), got shape {tuple(targets.shape)}")
    frames, places = [], _places(inputs, positions)
    following, known = _following(model, inputs, next_token, places)
    rows = torch.arange(inputs.batch, device=inputs.tokens.device)
    for place in places:
        index = locate(inputs, place)
        follows = following[rows, index], known[rows, index]
        final = wide(recorded.logits[rows, index]).log_softmax(-1)
        target = final.argmax(-1) if targets is None else targets.to(final.device)
        for site in wanted:
            with torch.no_grad():
                lens = wide(model.unembed(recorded.cache[site][rows, index])).log_softmax(-1)
            one = _rows(site, place, index, lens, final, target, inputs.tokens[rows, index], tokenizer)
            frames.append(one.assign(**_next_columns(lens, *follows)))
    return pd.concat(frames, ignore_index=True)


def _next_columns(lens: Tensor, following: Tensor, known: Tensor) -> dict[str, Any]:
    nats = -lens.gather(-1, following[:, None])[:, 0]
    token = pd.Series(following.tolist(), dtype="Int64").mask(~pd.Series(known.tolist(), dtype=bool))
    return {"next_token": token, "cross_entropy": torch.where(known, nats, math.nan).tolist()}


def _following(model: Hookable, inputs: Inputs, given: Any, places: list[Any]) -> tuple[Tensor, Tensor]:
    """The token that truly follows each position [batch pos], and whether one is known (else the id is 0)."""
    tokens, shape = inputs.tokens, tuple(inputs.tokens.shape)
    if given is None:
        return _true_next(model, inputs)
    given = torch.as_tensor(given).to(tokens.device)
    if given.shape == shape[:1] and len(places) == 1:
        given = given[:, None].expand(shape)
    if (
        given.shape != shape
        or given.dtype.is_floating_point
        or not 0 <= int(given.min()) <= int(given.max()) < model.config.vocab
    ):
        one = f" or [batch] = {shape[:1]}" if len(places) == 1 else f" (for {len(places)} positions)"
        raise LensError(f"next_token must be token ids [batch pos] = {shape}{one} in 0 … {model.config.vocab - 1}, got "
                        f"{given.dtype} {tuple(given.shape)}")  # fmt: skip
    return given.long(), torch.ones(shape, dtype=torch.bool, device=tokens.device)


def _true_next(model: Hookable, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """As `_following`, from the inputs: nothing follows padding, the last real token, or what the model has already seen."""
    tokens = inputs.tokens
    following = torch.cat([tokens[:, 1:], torch.zeros_like(tokens[:, :1])], 1)
    real = _real(inputs)
    known = torch.cat([real[:, :-1] & real[:, 1:], torch.zeros_like(real[:, :1])], 1)
    if getattr(model.config, "kind", None) == "encoder":  # every position reads the next one
        known = torch.zeros_like(known)
    if inputs.prefix_length is not None:  # inside the prefix the next token is seen, not predicted
        known &= real.long().cumsum(1) >= inputs.prefix_length[:, None].to(tokens.device)
    return following * known, known


def _real(inputs: Inputs) -> Tensor:
    return torch.ones_like(inputs.tokens, dtype=torch.bool) if inputs.mask is None else inputs.mask


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


def stream_sites(model: Hookable, sites: Any) -> list[Site]:
    """The sites that a lens can read, those that `sites` names. Raises LensError, UnknownSiteError."""
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


def lens_bias(
    model: Hookable,
    inputs: Any,
    sites: str | Site | Sequence[str | Site] = ("resid_pre", "resid_post"),
    batch_tokens: int = 1024,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> pd.DataFrame:
    """One row per site: KL(mean lens distribution ‖ mean model distribution) over all real tokens, in nats (Belrose et al. 2023).

    inputs: anything `run` accepts, or an iterable of batches; many tokens, since with few the means are the tokens' own. Columns:
    site, layer, name, bias (nats), n (tokens). 0 at the last layer's end: a lens with bias prefers tokens whatever it reads.
    """
    table = lens_scores(model, inputs, {"logit": plain_lens(model)}, sites, batch_tokens, tokenizer, prefix)
    return table[["site", "layer", "name", "bias", "n"]]


def plain_lens(model: Hookable) -> Lens:
    """The logit lens: final norm and head on the stream as it is."""
    return lambda stream, site: model.unembed(stream)


@torch.no_grad()
def lens_scores(
    model: Hookable,
    inputs: Any,
    lenses: Mapping[str, Lens],
    sites: str | Site | Sequence[str | Site],
    batch_tokens: int = 1024,
    tokenizer: Any = None,
    prefix: Sequence[int] | None = None,
) -> pd.DataFrame:
    """One row per site × lens: how its distributions differ from the model's over all real tokens of all inputs.

    Columns: site, layer, name, lens, kl_to_final and cross_entropy to the true next token (nats per token, means), bias (nats,
    see `lens_bias`), agreement (share of tokens with the model's top), n (tokens), n_next (tokens that another follows),
    sequences; with several lenses, against the first: kl_minus_first and its standard error over sequences, kl_minus_first_se.
    Every pass holds about `batch_tokens` tokens' logits, one site at a time.
    """
    require_head(model)
    wanted = stream_sites(model, sites)
    sums = {(site, name): _Sums() for site in wanted for name in lenses}
    marginal = torch.zeros(())
    for part in lens_batches(model, inputs, batch_tokens, tokenizer, prefix):
        recorded = run(model, part, record=wanted)
        real = _real(part)
        final = wide(recorded.logits[real]).log_softmax(-1)
        marginal = final.double().exp().sum(0) + marginal.to(final.device)
        example = torch.arange(part.batch, device=real.device)[:, None].expand(real.shape)[real]
        following, known = (one[real] for one in _true_next(model, part))
        for (site, name), total in sums.items():
            lens = wide(lenses[name](recorded.cache[site][real], site)).log_softmax(-1)
            total.add(lens, final, following, known, example)
    if not marginal.ndim:
        raise LensError("inputs hold no sequence; allowed: at least one")
    rows = []
    for (site, name), total in sums.items():
        first = None if len(lenses) == 1 else sums[site, next(iter(lenses))]
        about = {"site": str(site), "layer": site.layer, "name": site.name, "lens": name}
        rows.append({**about, **total.row(marginal, first)})
    return pd.DataFrame(rows)


def lens_batches(
    model: Hookable, inputs: Any, batch_tokens: int, tokenizer: Any = None, prefix: Sequence[int] | None = None
) -> Iterator[Inputs]:
    """Checked inputs in parts of about `batch_tokens` tokens, at least one sequence each; inputs: one batch or an iterable."""
    if not isinstance(batch_tokens, int) or isinstance(batch_tokens, bool) or batch_tokens < 1:
        raise LensError(f"batch_tokens={batch_tokens!r} is not allowed; allowed: an int >= 1")
    for batch in batches_of(inputs):
        batch = prepare(model, batch, tokenizer, prefix)
        size = max(1, batch_tokens // batch.length)
        for begin in range(0, batch.batch, size):
            yield batch.select(slice(begin, begin + size))


def batches_of(inputs: Any) -> Iterable[Any]:
    """One batch (tokens, Inputs, text, ids) as a list of one; an iterable of tensors or Inputs as it is."""
    if isinstance(inputs, Tensor | Inputs | str) or not isinstance(inputs, Iterable):
        return [inputs]
    if isinstance(inputs, list | tuple) and not any(isinstance(one, Tensor | Inputs) for one in inputs[:1]):
        return [inputs]
    return inputs


class _Sums:
    """Running sums of one lens at one site."""

    def __init__(self) -> None:
        self.marginal: Tensor | float = 0.0
        self.nats, self.agree, self.n, self.n_next = 0.0, 0, 0, 0
        self.kl: list[Tensor] = []  # per sequence: sum over its tokens
        self.tokens: list[Tensor] = []

    def add(self, lens: Tensor, final: Tensor, following: Tensor, known: Tensor, example: Tensor) -> None:
        """lens, final: log-probabilities [n vocab]; following, known, example [n]."""
        self.marginal = self.marginal + lens.double().exp().sum(0)
        kl = (final.exp() * (final - lens)).sum(-1).double()
        count = torch.bincount(example)
        self.kl.append(kl.new_zeros(len(count)).index_add_(0, example, kl).cpu())
        self.tokens.append(count.cpu())
        self.nats -= float(lens.gather(-1, following[:, None])[:, 0][known].double().sum())
        self.agree += int((lens.argmax(-1) == final.argmax(-1)).sum())
        self.n, self.n_next = self.n + len(kl), self.n_next + int(known.sum())

    def row(self, model_marginal: Tensor, first: _Sums | None) -> dict[str, Any]:
        p, q = torch.as_tensor(self.marginal / self.n), model_marginal / self.n
        kl, tokens = torch.cat(self.kl), torch.cat(self.tokens)
        row = {
            "kl_to_final": float(kl.sum()) / self.n, "cross_entropy": self.nats / self.n_next if self.n_next else math.nan,
            "bias": float((torch.xlogy(p, p) - torch.xlogy(p, q)).sum()), "agreement": self.agree / self.n,
            "n": self.n, "n_next": self.n_next, "sequences": len(kl),
        }  # fmt: skip
        if first is not None:
            each = kl - torch.cat(first.kl)
            mean, count = float(each.sum()) / self.n, len(kl)
            # A ratio of sums over sequences of unequal length: its linearised standard error.
            error = float((each - mean * tokens).square().sum().sqrt()) / self.n if count > 1 else math.nan
            row |= {"kl_minus_first": mean, "kl_minus_first_se": error * math.sqrt(count / max(count - 1, 1))}
        return row
