"""Deliberate faults: each replaces functions of the package for the length of a `with` block.

`FAULTS[name]()` is a context manager that yields a `Calls`. Leaving it without an exception raises
`FaultNeverReached` unless a replaced function was called, so a fault that patches nothing is noticed.
To add one: decorate `def _(original, *arguments)` with `@fault(name, (owner, "attribute"), …)`; owner is the module
or class where the name is looked up (for a name imported elsewhere, the importing module).
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F

from interp.model import attention, block, feedforward, inputs, norms, positions, transformer
from interp.model.attention import Attention
from interp.model.block import PostNormBlock, PreNormBlock
from interp.model.feedforward import FeedForward
from interp.model.inputs import Edges
from interp.model.tap import as_tap
from interp.model.transformer import Transformer


class FaultNeverReached(AssertionError):
    """A fault whose replaced functions nobody called: it says nothing about the tests."""


@dataclass
class Calls:
    """How often the replaced functions were called."""

    count: int = 0


FAULTS: dict[str, Callable[[], AbstractContextManager[Calls]]] = {}


def make_fault(
    name: str, replacement: Callable[..., Any], *targets: tuple[Any, str]
) -> Callable[[], AbstractContextManager[Calls]]:
    """A context manager in which each target (owner, attribute) is `replacement(original, …)`."""

    @contextmanager
    def active() -> Iterator[Calls]:
        calls = Calls()
        originals = [(owner, attribute, vars(owner)[attribute]) for owner, attribute in targets]
        try:
            for owner, attribute, original in originals:
                setattr(owner, attribute, _counted(replacement, original, calls))
            yield calls
        finally:
            for owner, attribute, original in originals:
                setattr(owner, attribute, original)
        if calls.count == 0:
            raise FaultNeverReached(f"fault {name!r} patched {[a for _, a in targets]}, and none was called")

    return active


def _counted(replacement: Callable[..., Any], original: Callable[..., Any], calls: Calls) -> Callable[..., Any]:
    @wraps(original)
    def replaced(*arguments: Any, **named: Any) -> Any:
        calls.count += 1
        return replacement(original, *arguments, **named)

    return replaced


def fault(name: str, *targets: tuple[Any, str]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register the decorated function as the fault `name`."""

    def register(replacement: Callable[..., Any]) -> Callable[..., Any]:
        if name in FAULTS:
            raise ValueError(f"two faults are named {name!r}")
        FAULTS[name] = make_fault(name, replacement, *targets)
        return replacement

    return register


class Meddler:
    """A tap around another that changes what the model does at some sites: `before` or `after` the real tap sees it.

    Each is {site name: function(value, values seen so far by name) -> value}.
    """

    def __init__(self, tap: Any, before: dict | None = None, after: dict | None = None) -> None:
        self.tap, self.before, self.after, self.seen = as_tap(tap), before or {}, after or {}, {}

    def wants(self, site: Any) -> bool:
        return self.tap.wants(site)

    def __call__(self, site: Any, value: Any) -> Any:
        keep = lambda value, seen: value  # noqa: E731
        value = self.tap(site, self.before.get(site.name, keep)(value, self.seen))
        self.seen[site.name] = value
        return self.after.get(site.name, keep)(value, self.seen)


# The block

ATTENTION_RESIDUAL = {"resid_mid": lambda value, seen: value - seen["resid_pre"]}
FFN_RESIDUAL = {"resid_post": lambda value, seen: value - seen["resid_mid"]}


@fault("residual dropped after attention", (PreNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    return original(self, x, Meddler(tap, ATTENTION_RESIDUAL), *rest)


@fault("residual dropped after the FFN", (PreNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    return original(self, x, Meddler(tap, {} if self.ffn is None else FFN_RESIDUAL), *rest)


@fault("residual dropped after attention, post-norm", (PostNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    return original(self, x, Meddler(tap, {"resid_mid_sum": lambda value, seen: value - seen["resid_pre"]}), *rest)


@fault("FFN reads t3 instead of t4", (PreNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    return original(self, x, Meddler(tap, {"norm2": lambda value, seen: seen["resid_mid"]}), *rest)


@fault("attention reads x instead of t1", (PreNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    return original(self, x, Meddler(tap, {"norm1": lambda value, seen: seen["resid_pre"]}), *rest)


# Norms


def norm_with(sigma: Callable[[Any, float], Any], centred: bool = True, offset: bool = True) -> Callable[..., Any]:
    """A norm whose divisor is sigma(centred x, ε), on both of its routes."""

    def forward(original, self, x, tap):
        wide = self.centre(x) if centred else x
        scale, x_hat = sigma(wide, self.eps), None
        if self.scale_site is not None:
            scale = tap(self.scale_site, scale)
        x_hat = wide / scale
        if self.hat_site is not None:
            x_hat = tap(self.hat_site, x_hat)
        return self.weight * x_hat + (self.bias if offset and self.bias is not None else 0)

    return forward


def root(x, eps):
    """The right divisor."""
    return (x.square().mean(-1, keepdim=True) + eps).sqrt()


NORM = (norms._Norm, "forward")
fault("epsilon outside the root", NORM)(norm_with(lambda x, eps: x.square().mean(-1, keepdim=True).sqrt() + eps))
fault("variance divided by d - 1", NORM)(
    norm_with(lambda x, eps: (x.square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1) + eps).sqrt())
)
fault("LayerNorm does not centre", NORM)(norm_with(root, centred=False))
fault("norm offset dropped", NORM)(norm_with(root, offset=False))


@fault("final norm dropped", (Transformer, "unembed"))
def _(original, self, stream, tap=None):
    return original(self, stream, Meddler(tap, {"final": lambda value, seen: stream}))


# Who sees whom

EDGES = (block, "attention_edges")


def shifted(original, config, batch, cache, by):
    """Causal edges with the diagonal moved."""
    edges = original(config, batch, cache)
    if config.kind != "decoder" or cache is not None:
        return edges
    n = batch.length
    mask = torch.ones(n, n, dtype=torch.bool).tril(by)[None, None]
    real = mask if batch.mask is None else mask & batch.mask[:, None, None]
    return Edges(real, False, True)


@fault("causal mask removed", EDGES)
def _(original, config, batch, cache=None):
    return Edges(None, False, False)


@fault("causal mask lets the next token in", EDGES)
def _(original, config, batch, cache=None):
    return shifted(original, config, batch, cache, 1)


@fault("causal mask hides the token itself", EDGES)
def _(original, config, batch, cache=None):
    return shifted(original, config, batch, cache, -1)


@fault("window one too wide", EDGES)
def _(original, config, batch, cache=None):
    return original(config if config.window is None else replace(config, window=config.window + 1), batch, cache)


@fault("padding mask ignored", EDGES)
def _(original, config, batch, cache=None):
    return original(config, replace(batch, mask=None), cache)


@fault("prefix ignored", EDGES)
def _(original, config, batch, cache=None):
    return original(config, replace(batch, prefix_length=None), cache)


@fault("prefix counts padding", EDGES)
def _(original, config, batch, cache=None):
    edges = original(config, batch, cache)
    if batch.mask is None or batch.prefix_length is None:
        return edges
    inside = torch.arange(batch.length) < batch.prefix_length[:, None]
    causal = torch.ones(batch.length, batch.length, dtype=torch.bool).tril()
    return Edges((causal[None] | inside[:, None])[:, None] & batch.mask[:, None, None], False, True)


# Positions

IDS = ((transformer, "position_ids"), (block, "position_ids"))


@fault("position ids count padding", *IDS)
def _(original, batch, cache=None):
    return original(replace(batch, mask=None), None) + (0 if cache is None else cache.length)


@fault("position ids restart after the cache", *IDS)
def _(original, batch, cache=None):
    return original(batch, None)


@fault("rotary pairs neighbours", (attention, "rotate"))
def _(original, x, table):
    half = table[0].shape[-1]
    order = torch.arange(2 * half).view(half, 2).T.flatten()
    turned = original(torch.cat([x[..., order], x[..., 2 * half :]], -1), table)
    out = turned.clone()
    out[..., order] = turned[..., : 2 * half]
    return out


@fault("rotary turns backwards", (attention, "rotate"))
def _(original, x, table):
    return original(x, (table[0], -table[1]))


@fault("rotary scaling ignored", (positions, "rotary_frequencies"))
def _(original, config, device):
    return original(replace(config, rotary_scaling=None), device)


@fault("rotary tables in 32 bits", (block, "rotary_table"))
def _(original, config, ids, dtype):
    return tuple(table.to(dtype) for table in original(config, ids, torch.float32))


@fault("sinusoids not interleaved", (transformer, "sinusoidal"))
def _(original, ids, d_model, dtype):
    table = original(ids, d_model, dtype)
    return torch.cat([table[..., 0::2], table[..., 1::2]], -1)


# Attention


@fault("1/sqrt(d) dropped", (Attention, "__init__"))
def _(original, self, config, *rest):
    original(self, config, *rest)
    self.config = replace(config, attention_scale=1.0)


@fault("key-value heads repeated in the wrong order", (Attention, "_explicit"), (Attention, "_fused"))
def _(original, self, q, k, v, *rest):
    group = q.shape[2] // k.shape[2]
    return original(self, q, k.repeat(1, 1, group, 1), v.repeat(1, 1, group, 1), *rest)


@fault("W_O's heads permuted", (Attention, "forward"))
def _(original, self, t1, tap, *rest):
    return original(self, t1, Meddler(tap, after={"z": lambda value, seen: value.flip(2)}), *rest)


@fault("softmax over queries", (attention, "softmax_or_zero"))
def _(original, scores):
    return scores.softmax(-2).nan_to_num()


@fault("NaN for a row without edges", (attention, "softmax_or_zero"))
def _(original, scores):
    return scores.softmax(-1)


@fault("query bias dropped", (Attention, "forward"))
def _(original, self, t1, tap, *rest):
    change = {} if self.b_Q is None else {"q": lambda value, seen: value - self.b_Q}
    return original(self, t1, Meddler(tap, change), *rest)


@fault("b_O dropped when the heads are written out", (Attention, "forward"))
def _(original, self, t1, tap, *rest):
    out = original(self, t1, tap, *rest)
    return out - self.b_O if tap.wants(self.sites.head_out) and self.b_O is not None else out


@fault("q/k norm dropped", (Attention, "_into_scores"))
def _(original, self, x, norm, rotary):
    return original(self, x, None, rotary)


@fault("an edit of the pattern changes nothing", (Attention, "_explicit"))
def _(original, self, q, k, v, tap, edges):
    change = {"pattern": lambda value, seen: seen["scores"].softmax(-1).nan_to_num()}
    return original(self, q, k, v, Meddler(tap, after=change), edges)


@fault("the fused route ignores the mask", (Attention, "_fused"))
def _(original, self, q, k, v, edges):
    return original(self, q, k, v, Edges(None, edges.causal, False))


@fault("the cache forgets", (inputs.KVCache, "extend"))
def _(original, self, layer, k, v):
    joined = original(self, layer, k, v)
    new = k.shape[1]
    return tuple(torch.cat([torch.zeros_like(x[:, :-new]), x[:, -new:]], 1) for x in joined)


# The FFN, the head


@fault("gate and up swapped", (FeedForward, "forward"))
def _(original, self, t4, tap):
    if not self.config.gated:
        return original(self, t4, tap)
    up, gate = self.gate_up(t4).chunk(2, -1)
    gate, up = tap(self.sites.ffn_pre, gate), tap(self.sites.ffn_up, up)
    return self.down(tap(self.sites.ffn_act, self.activation(gate) * up))


@fault("swish's beta ignored", (feedforward, "swish"))
def _(original, x, beta):
    return F.silu(x)


@fault("exact gelu replaced by its tanh approximation", (FeedForward, "activation"))
def _(original, self, x):
    return F.gelu(x, approximate="tanh") if self.config.ffn in ("gelu", "geglu") else original(self, x)


@fault("FFN bias dropped", (FeedForward, "forward"))
def _(original, self, t4, tap):
    return original(self, t4, tap) - (0 if self.b_out is None else self.b_out)


@fault("tied head reads the wrong rows", (Transformer, "unembed"))
def _(original, self, stream, tap=None):
    change = {"logits": lambda value, seen: value.roll(1, -1)} if self.config.tied_embeddings else {}
    return original(self, stream, Meddler(tap, change))
