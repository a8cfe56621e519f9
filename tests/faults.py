"""Deliberate faults: each replaces functions of the package for the length of a `with` block.

`FAULTS[name]()` is a context manager that yields a `Calls`. Leaving it without an exception raises
`FaultNeverReached` unless a replaced function was called, so a fault that patches nothing is noticed.
To add one: decorate `def _(original, *arguments)` with `@fault(name, (owner, "attribute"), …)`; owner is the module
or class where the name is looked up (for a name imported elsewhere, the importing module). Not a constructor: the
checks share models built before.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import wraps
from typing import Any

import torch
import torch.nn.functional as F

from interp.model import attention, block, feedforward, inputs, norms, positions, transformer
from interp.model.attention import Attention, CrossAttention
from interp.model.block import PostNormBlock, PreNormBlock
from interp.model.feedforward import FeedForward
from interp.model.inputs import Edges, Memory
from interp.model.tap import as_tap
from interp.model.transformer import Encoder, Transformer


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
        originals = [(owner, attribute, _found(owner, attribute)) for owner, attribute in targets]
        inherited = {(owner, attribute) for owner, attribute in targets if attribute not in vars(owner)}
        try:
            for owner, attribute, original in originals:
                setattr(owner, attribute, _counted(replacement, original, calls))
            yield calls
        finally:
            for owner, attribute, original in originals:
                if (owner, attribute) in inherited:
                    delattr(owner, attribute)
                else:
                    setattr(owner, attribute, original)
        if calls.count == 0:
            raise FaultNeverReached(f"fault {name!r} patched {[a for _, a in targets]}, and none was called")

    return active


def _found(owner: Any, attribute: str) -> Any:
    """What `owner` has under a name, its own or inherited. KeyError for a name that it has not."""
    for where in (owner, *getattr(owner, "__mro__", ())):
        if attribute in vars(where):
            return vars(where)[attribute]
    raise KeyError(attribute)


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


@fault("prefix one too long", EDGES)
def _(original, config, batch, cache=None):
    return original(config, longer_prefix(batch, 1), cache)


@fault("prefix one too short", EDGES)
def _(original, config, batch, cache=None):
    return original(config, longer_prefix(batch, -1), cache)


def longer_prefix(batch, by):
    """The same inputs, their prefixes longer by so much."""
    return batch if batch.prefix_length is None else replace(batch, prefix_length=batch.prefix_length + by)


@fault("encoder made causal", EDGES)
def _(original, config, batch, cache=None):
    return original(replace(config, kind="decoder") if config.kind == "encoder" else config, batch, cache)


@fault("an encoder-decoder's decoder made bidirectional", EDGES)
def _(original, config, batch, cache=None):
    return original(config.encoder if config.kind == "encoder-decoder" else config, batch, cache)


@fault("an encoder-decoder's window ignored", EDGES)
def _(original, config, batch, cache=None):
    return original(replace(config, window=None) if config.kind == "encoder-decoder" else config, batch, cache)


# The encoder and what the decoder reads of it

CROSS_EDGES = (transformer, "cross_edges")


@fault("source padding read by cross-attention", CROSS_EDGES)
def _(original, batch):
    return original(replace(batch, source_mask=None))


@fault("source padding read by the encoder", (Encoder, "forward"))
def _(original, self, x, tap, batch):
    return original(self, x, tap, replace(batch, mask=None))


@fault("target mask used for the source", CROSS_EDGES)
def _(original, batch):
    same = batch.tokens.shape == batch.source.shape
    return original(replace(batch, source_mask=batch.mask) if same else batch)


@fault("cross-attention made causal", (Transformer, "encode"))
def _(original, self, batch, tap=None, cache=None):
    return narrowed(original, self, batch, tap, cache, lambda query, key: key <= query)


@fault("window applied to cross edges", (Transformer, "encode"))
def _(original, self, batch, tap=None, cache=None):
    width = self.config.window or 1000
    return narrowed(original, self, batch, tap, cache, lambda query, key: (query - key).abs() < width)


def narrowed(original, self, batch, tap, cache, sees):
    """What cross-attention reads, with fewer edges (of a single pass, without a cache)."""
    memory = original(self, batch, tap, cache)
    if cache is not None:
        return memory
    n_query, n_key = batch.length, memory.states.shape[1]
    mask = sees(torch.arange(n_query)[:, None], torch.arange(n_key)[None])[None, None]
    return Memory(memory.states, Edges(mask if memory.edges.mask is None else mask & memory.edges.mask, False, True))


@fault("cross-attention reads the encoder's embeddings", (Encoder, "forward"))
def _(original, self, x, tap, batch):
    original(self, x, tap, batch)
    return x


@fault("cross-attention skips the encoder's final norm", (Encoder, "forward"))
def _(original, self, x, tap, batch):
    return original(self, x, Meddler(tap, after={"final": lambda value, seen: seen["resid_post"]}), batch)


@fault("encoder's last layer left out", (Encoder, "forward"))
def _(original, self, x, tap, batch):
    if len(self.blocks) < 2:
        return original(self, x, tap, batch)
    states = self.blocks(x, 0, len(self.blocks) - 1, tap, batch)
    return tap(self.site_names.final, states if self.final_norm is None else self.final_norm(states, tap))


@fault("encoder.final not tapped", (Encoder, "forward"))
def _(original, self, x, tap, batch):
    return original(self, x, Deaf(tap, "final"), batch)


class Deaf:
    """A tap around another that never hears of one site."""

    def __init__(self, tap: Any, name: str) -> None:
        self.tap, self.name = tap, name

    def wants(self, site: Any) -> bool:
        return site.name != self.name and self.tap.wants(site)

    def __call__(self, site: Any, value: Any) -> Any:
        return value if site.name == self.name else self.tap(site, value)


@fault("an edit of encoder.final changes nothing", (Encoder, "forward"))
def _(original, self, x, tap, batch):
    kept = []
    keep, give = lambda value, seen: kept.append(value) or value, lambda value, seen: kept[-1]
    return original(self, x, Meddler(tap, {"final": keep}, {"final": give}), batch)


@fault("encoder uses the decoder's embedding norm", (Transformer, "_embed"))
def _(original, self, batch, tap, s, cache, norm):
    return original(self, batch, tap, s, cache, self.embedding_norm)


@fault("the source's positions count its padding", (Transformer, "_embed"))
def _(original, self, batch, tap, s, cache, norm):
    source = self.encoder is not None and norm is self.encoder.embedding_norm and s.embed.stack == "encoder"
    return original(self, replace(batch, mask=None) if source else batch, tap, s, cache, norm)


@fault("the source is encoded again at every step", (Transformer, "encode"))
def _(original, self, batch, tap=None, cache=None):
    return original(self, batch, tap, None) if batch.source is not None else original(self, batch, tap, cache)


# Cross-attention

CROSS = (CrossAttention, "forward")


@fault("cross-attention's queries from the encoder", CROSS)
def _(original, self, t, tap, memory, cache=None):
    return original(self, memory.states.mean(1, keepdim=True).expand_as(t), tap, memory, cache)


@fault("cross-attention's keys and values from the decoder", CROSS)
def _(original, self, t, tap, memory, cache=None):
    return original(self, t, tap, Memory(t, Edges(None, False, False)), cache)


@fault("cross-attention's keys and values swapped", (CrossAttention, "_project"))
def _(original, self, x, first, last):
    out = original(self, x, first, last)
    return out if first == 0 else torch.cat(out.chunk(2, -2)[::-1], -2)


@fault("cross-attention's bias dropped", (CrossAttention, "_project"))
def _(original, self, x, first, last):
    width, bias = self.config.head_size, self.qkv.bias
    dropped = 0 if bias is None else bias.unflatten(-1, (-1, width))[first:last]
    return original(self, x, first, last) - dropped


@fault("cross-attention's 1/sqrt(d) dropped", (Attention, "_attend"))
def _(original, self, q, *rest):
    return original(self, q / self.config.attention_scale if isinstance(self, CrossAttention) else q, *rest)


@fault("cross-attention's b_O dropped when the heads are written out", CROSS)
def _(original, self, t, tap, *rest):
    out = original(self, t, tap, *rest)
    return out - self.b_O if tap.wants(self.sites.head_out) and self.b_O is not None else out


@fault("rotary applied in cross-attention", (CrossAttention, "_project"))
def _(original, self, x, first, last):
    out = original(self, x, first, last)
    if self.config.positions != "rotary":
        return out
    table = positions.rotary_table(self.config, torch.arange(x.shape[1])[None], x.dtype)
    if first == 0:
        return positions.rotate(out, table)
    k, v = out.chunk(2, -2)
    return torch.cat([positions.rotate(k, table), v], -2)


@fault("q/k norm applied in cross-attention", (CrossAttention, "_project"))
def _(original, self, x, first, last):
    out = original(self, x, first, last)
    return F.rms_norm(out, out.shape[-1:]) if self.config.qk_norm and first == 0 else out


@fault("cross-attention reads the cached keys of another layer", CROSS)
def _(original, self, t, tap, memory, cache=None):
    if cache is not None and cache.cross and self.layer not in cache.cross:
        cache.cross[self.layer] = cache.cross[0]
    return original(self, t, tap, memory, cache)


CROSS_SUM = {"resid_cross": lambda value, seen: value - seen["resid_mid"]}


@fault("residual dropped after cross-attention", (PreNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    return original(self, x, Meddler(tap, CROSS_SUM), *rest)


@fault("residual dropped after cross-attention, post-norm", (PostNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    change = {"resid_cross_sum": lambda value, seen: value - seen["resid_mid"]}
    return original(self, x, Meddler(tap, change), *rest)


@fault("cross_norm skipped", (PreNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    return original(self, x, Meddler(tap, {"cross_norm": lambda value, seen: seen["resid_mid"]}), *rest)


@fault("cross_norm skipped, post-norm", (PostNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    return original(self, x, Meddler(tap, {"resid_cross": lambda value, seen: seen["resid_cross_sum"]}), *rest)


@fault("cross-attention's queries skip self-attention", (PreNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    crosses = self.cross_attention is not None
    change = {"cross_norm": lambda value, seen: self.cross_norm(seen["resid_pre"], as_tap(None))} if crosses else {}
    return original(self, x, Meddler(tap, change), *rest)


@fault("the FFN of a decoder skips cross-attention", (PreNormBlock, "forward"))
def _(original, self, x, tap, *rest):
    if self.cross_attention is None or self.ffn is None:
        return original(self, x, tap, *rest)
    change = {"norm2": lambda value, seen: self.norm2(seen["resid_mid"], as_tap(None))}
    return original(self, x, Meddler(tap, change), *rest)


# Weights by name, teacher forcing


@fault("weight reads the decoder for the encoder", (Transformer, "weight"))
def _(original, self, kind, layer=None, stack=None):
    return original(self, kind, None if layer is None else min(layer, self.config.n_layers - 1))


@fault("weight gives self-attention's for cross-attention's", (Transformer, "weight"))
def _(original, self, kind, layer=None, stack=None):
    return original(self, kind.removeprefix("cross_"), layer, stack)


TEACHER = (inputs, "teacher_forced")


@fault("teacher forcing shifts the wrong way", TEACHER)
def _(original, targets, bos, **fields):
    forced = original(targets, bos, **fields)
    return replace(forced, tokens=torch.cat([targets[:, 1:], torch.full_like(targets[:, :1], bos)], 1))


@fault("teacher forcing does not shift", TEACHER)
def _(original, targets, bos, **fields):
    return replace(original(targets, bos, **fields), tokens=targets)


@fault("teacher forcing without BOS", TEACHER)
def _(original, targets, bos, **fields):
    return replace(original(targets, bos, **fields), tokens=torch.cat([targets[:, :1], targets[:, :-1]], 1))


@fault("teacher forcing puts BOS before left padding", TEACHER)
def _(original, targets, bos, **fields):
    shifted = torch.cat([torch.full_like(targets[:, :1], bos), targets[:, :-1]], 1)
    return replace(original(targets, bos, **fields), tokens=shifted)


@fault("teacher forcing loses the source", TEACHER)
def _(original, targets, bos, **fields):
    forced = original(targets, bos, **fields)
    return forced if forced.source is None else replace(forced, source=forced.source.flip(1))


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


@fault("1/sqrt(d) dropped", (Attention, "_attend"))
def _(original, self, q, *rest):
    return original(self, q / self.config.attention_scale, *rest)


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
