"""What a bridge really offers: its sites are looked for, counted and measured before they are advertised."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from interp.bridges.huggingface import BridgeError
from interp.bridges.lens_in.places import OUTER, POST_NORM, PRE_NORM, Place
from interp.bridges.lens_in.selftest import Found, adds_up, near, write
from interp.model.inputs import Inputs
from interp.sites import Site


def survey(model: Any, architecture: str, self_test: bool) -> Found:
    """Three short forward passes that look, then (self_test) one for every 32 sites that writes.

    Raises BridgeError when the head cannot be repeated; warns once when sites are dropped.
    """
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the bridge's own remarks on edits, which are judged here
        found = _survey(model, architecture, self_test)
    if found.dropped:
        reasons: dict[tuple[str, str], list[int | None]] = {}
        for site, why in found.dropped.items():
            reasons.setdefault((site.name, why), []).append(site.layer)
        n_layers = found.sizes["n_layers"]
        told = "; ".join(f"{name}{_layers(layers, n_layers)} {why}" for (name, why), layers in reasons.items())
        warnings.warn(
            f"{architecture}: dropped sites of the bridge: {told}. All other sites work as listed in .sites; only "
            "these cannot be read or changed here",
            stacklevel=4,
        )
    return found


def _survey(model: Any, architecture: str, self_test: bool) -> Found:
    cfg = model.bridge.cfg
    length = max(2, min(4, int(cfg.n_ctx) - 2))
    tokens = torch.randint(0, int(cfg.d_vocab), (1, length), generator=torch.Generator().manual_seed(0)).repeat(2, 1)
    tokens[1, -1] = (tokens[1, -1] + 1) % int(cfg.d_vocab)  # causal where this changes nothing before it
    inputs = Inputs(tokens.to(model.device))
    try:
        model.forward(inputs, [])
    except (RuntimeError, TypeError, ValueError, AttributeError) as error:
        raise BridgeError(f"TransformerLens cannot run {architecture} in {model.dtype}: {error}") from error
    look = _Look(model, inputs)
    sizes = _sizes(model, look, architecture)
    found = Found({}, sizes, False, False, _pads(model, inputs, look.logits))
    look.judge(found)
    last = Site("resid_post", sizes["n_layers"] - 1)
    rebuilt = model.unembed(look.values[last]) if last in look.values else None
    if rebuilt is None or not near(rebuilt, look.logits):
        raise BridgeError(f"{architecture}: final norm and head of the last block's stream do not give the model's logits; "
                          "allowed: models whose bridge has resid_post, ln_final and unembed")  # fmt: skip
    found.blocks_add = look.blocks_add()
    found.additive = found.blocks_add and look.embeddings_add(found)
    if self_test:
        write(model, inputs, found)
    return found


def _layers(layers: list[int | None], n_layers: int) -> str:
    return "" if layers == [None] or len(layers) == n_layers else f" (layer {', '.join(map(str, layers))})"


def _pads(model: Any, inputs: Inputs, logits: Tensor) -> bool:
    """Whether two tokens of padding on the left leave the logits of real tokens as they were."""
    if inputs.length + 2 > int(model.bridge.cfg.n_ctx):
        return False
    padding = inputs.tokens[:, :1].expand(-1, 2)
    padded = torch.cat([padding, inputs.tokens], 1)
    mask = torch.ones_like(padded, dtype=torch.bool)
    mask[:, :2] = False
    return near(model.forward(Inputs(padded, mask=mask), [])[:, 2:], logits)


class _Look:
    """One forward pass that reads every hook point which could be a site."""

    def __init__(self, model: Any, inputs: Inputs) -> None:
        self.model, self.inputs = model, inputs
        self.hooks = model.bridge.hook_dict
        self.n_layers = len(model.bridge.blocks)
        names = {*OUTER.values(), *(f"blocks.{layer}.{name}" for layer in range(self.n_layers)
                                    for name in {*PRE_NORM.values(), *POST_NORM.values()})}  # fmt: skip
        points = {id(self.hooks[name]): self.hooks[name] for name in names if name in self.hooks}
        self.fired: list[int] = []
        self.read: dict[int, Tensor] = {}
        kept: dict[int, Tensor] = {}

        def reader(key: int) -> Callable[[Tensor], None]:
            def read(value: Tensor) -> None:
                self.fired.append(key)
                kept[key], self.read[key] = value, value.clone()

            return read

        self.logits = model.forward(inputs, [(point, reader(key)) for key, point in points.items()])
        # A tensor that changed after it was read is one that the model writes into.
        self.fragile = {key for key, value in kept.items()
                        if not torch.equal(value.nan_to_num(), self.read[key].nan_to_num())}  # fmt: skip
        self.candidates = dict(self._candidates())
        self.values = {site: self.read[id(point)] for site, point in self.candidates.items() if id(point) in self.read}

    def _candidates(self) -> Iterator[tuple[Site, Any]]:
        """Every site that the bridge has a hook point for."""
        for name, hook in OUTER.items():
            if hook in self.hooks:
                yield Site(name), self.hooks[hook]
        for layer in range(self.n_layers):
            for name, hook in (POST_NORM if self._post_norm(layer) else PRE_NORM).items():
                point = self.hooks.get(f"blocks.{layer}.{hook}")
                if point is not None:
                    yield Site(name, layer), point

    def _post_norm(self, layer: int) -> bool:
        """Whether ln1 stands behind attention."""
        points = [self.hooks.get(f"blocks.{layer}.{name}") for name in ("ln1.hook_out", "attn.hook_z")]
        keys = [id(point) for point in points]
        return all(key in self.read for key in keys) and self.fired.index(keys[0]) > self.fired.index(keys[1])

    def judge(self, found: Found) -> None:
        """Sort the candidates into places and dropped sites, by how often they fired and by their axes."""
        count, found.places = Counter(self.fired), {}
        for site, point in self.candidates.items():
            why = self._fault(site, point, count[id(point)], found)
            if why:
                found.dropped[site] = why
            else:
                side = site.name == "resid_mid" and not self._post_norm(site.layer or 0)
                found.places[site] = Place(site, point, side=side, fragile=id(point) in self.fragile)
        for layer in range(self.n_layers):
            self._heads(layer, found)
        order = {key: index for index, key in enumerate(self.fired)}
        found.places = dict(sorted(found.places.items(), key=lambda item: order[id(item[1].point)]))

    def _fault(self, site: Site, point: Any, times: int, found: Found) -> str | None:
        if times != 1:
            return f"fired {times} times in one forward pass" if times else "never fires"
        block = self.model.bridge.blocks[site.layer or 0]
        inner = [getattr(getattr(block, "mlp", None), name, None) for name in ("hook_in", "hook_out")]
        if site.name in ("ffn_pre", "ffn_act") and any(point is edge for edge in inner):
            return "is only the FFN's input or output: its neurons have no hook"
        sizes = {**found.sizes, "position": self.inputs.length, "one": 1, "head": found.sizes["n_heads"],
                 "kv_head": found.sizes["n_kv_heads"], "query": self.inputs.length, "key": self.inputs.length}  # fmt: skip
        value, wanted = self.values[site], (2, *(sizes[axis] for axis in site.spec.axes))
        if value.ndim == 2:
            value = value.unflatten(0, (2, -1)) if value.shape[0] == 2 * self.inputs.length else value
        if tuple(value.shape) != wanted:
            return f"has shape {tuple(value.shape)}, not [batch {' '.join(site.spec.axes)}] = {wanted}"
        if site.name == "scores" and found.sizes["kind"] == "decoder":
            future = torch.ones(value.shape[-2:], dtype=torch.bool, device=value.device).triu(1)
            if not bool((value[..., future] <= torch.finfo(value.dtype).min / 2).all()):
                return "holds other numbers than the lowest where keys are masked"
        if (
            site.name == "resid_mid"
            and not self._post_norm(site.layer or 0)
            and not self._sums(site.layer, "resid_mid")
        ):
            return "cannot be written: resid_post is not resid_mid + ffn_out"
        return None

    def _heads(self, layer: int, found: Found) -> None:
        """head_out, where the heads' z W_O and the bias do add up to attn_out."""
        z, out = Site("z", layer), Site("attn_out", layer)
        if z not in found.places or out not in found.places:
            return
        weight, bias, site = self.model.weight("W_O", layer), self.model.weight("b_O", layer), Site("head_out", layer)
        shape = (found.sizes["n_heads"], found.sizes["d_head"], found.sizes["d_model"])
        if weight is None or tuple(weight.shape) != shape:
            found.dropped[site] = "has no W_O [head d_head d_model] to be computed with"
            return
        offset = torch.zeros_like(self.values[out][0, 0]) if bias is None else bias
        rebuilt, size = (torch.einsum("bphd,hdm->bpm", value, matrix) + added for value, matrix, added in (
            (self.values[z], weight, offset), (self.values[z].abs(), weight.abs(), offset.abs())))  # fmt: skip
        if not adds_up(rebuilt, self.values[out], size):
            found.dropped[site] = "does not add up to attn_out (something stands between the heads and the stream)"
            return
        before = {}
        for known, place in found.places.items():
            if known == out:
                before[site] = replace(place, site=site)
            before[known] = place
        found.places = before

    def _sums(self, layer: int | None, start: str) -> bool:
        """Whether resid_post is the sum of `start` and what is written after it."""
        written = ("ffn_out",) if start == "resid_mid" else ("attn_out", "ffn_out")
        found = [self.values.get(Site(name, layer)) for name in (start, *written)]
        parts = [part for part in found if part is not None]
        end = self.values.get(Site("resid_post", layer))
        if end is None or len(parts) < len(found) or any(part.shape != end.shape for part in parts):
            return False
        return adds_up(_total(parts), end, _total([part.abs() for part in parts]))

    def blocks_add(self) -> bool:
        """Whether every block only adds to the stream, and adds what its sites say."""
        return all(self._sums(layer, "resid_pre") for layer in range(self.n_layers))

    def embeddings_add(self, found: Found) -> bool:
        """Whether the stream starts as the sum of the embeddings."""
        start = [self.values[site] for site in (Site("embed"), Site("pos_embed")) if site in found.places]
        first = self.values.get(Site("resid_pre", 0))
        if first is None or not start or any(part.shape != first.shape for part in start):
            return False
        return adds_up(_total(start), first, _total([part.abs() for part in start]))


def _total(parts: list[Tensor]) -> Tensor:
    return torch.stack(parts).sum(0)


def _sizes(model: Any, look: _Look, architecture: str) -> dict[str, Any]:
    """The config's numbers: those of activations where there are any, else the bridge's own."""
    cfg, values = model.bridge.cfg, look.values
    q, k, act = (values.get(Site(name, 0)) for name in ("q", "k", "ffn_act"))
    n_heads, d_head = q.shape[2:] if q is not None and q.ndim == 4 else (int(cfg.n_heads), int(cfg.d_head))
    n_kv_heads = (
        k.shape[2] if k is not None and k.ndim == 4 else int(getattr(cfg, "n_key_value_heads", None) or n_heads)
    )
    before = (slice(None, 1), slice(None, -1)), (slice(1, None), slice(None, -1))
    causal = near(*(look.logits[rows] for rows in before))
    if look.logits.shape[:2] != look.inputs.tokens.shape:
        raise BridgeError(
            f"{architecture} gives output of shape {tuple(look.logits.shape)}; allowed: [batch pos vocab]"
        )
    theirs = getattr(model.bridge.original_model, "config", None)
    window, kinds = getattr(theirs, "sliding_window", None), set(getattr(theirs, "layer_types", None) or ())
    return {
        "kind": "decoder" if causal else "encoder", "vocab": int(cfg.d_vocab), "n_layers": look.n_layers,
        "n_ctx": int(cfg.n_ctx), "n_heads": int(n_heads), "n_kv_heads": int(n_kv_heads), "d_model": int(cfg.d_model),
        "d_head": int(d_head), "d_ff": None if act is None else int(act.shape[-1]),
        "window": window if kinds <= {"sliding_attention"} else None,
        "n_segments": int(getattr(theirs, "type_vocab_size", 0) or 0) if hasattr(model.bridge, "token_type_embed") else 0,
    }  # fmt: skip
