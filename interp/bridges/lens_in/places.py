"""Our sites at the hook points of a TransformerLens bridge, and one forward pass tapped there."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from interp.model.inputs import Inputs
from interp.sites import Site

OUTER = {
    "embed": "embed.hook_out", "pos_embed": "pos_embed.hook_out", "final_scale": "ln_final.hook_scale",
    "final_hat": "ln_final.hook_normalized", "final": "ln_final.hook_out",
}  # fmt: skip
# Without "blocks.L."; head_out has no hook of its own: it is z W_O, read and summed where attn_out is.
PRE_NORM = {
    "resid_pre": "hook_resid_pre", "norm1_scale": "ln1.hook_scale", "norm1_hat": "ln1.hook_normalized",
    "norm1": "ln1.hook_out", "q": "attn.hook_q", "k": "attn.hook_k", "v": "attn.hook_v", "q_rot": "attn.hook_rot_q",
    "k_rot": "attn.hook_rot_k", "scores": "attn.hook_attn_scores", "pattern": "attn.hook_pattern", "z": "attn.hook_z",
    "attn_out": "hook_attn_out", "resid_mid": "hook_resid_mid", "norm2_scale": "ln2.hook_scale",
    "norm2_hat": "ln2.hook_normalized", "norm2": "ln2.hook_out", "ffn_pre": "mlp.hook_pre",
    "ffn_up": "mlp.hook_pre_linear", "ffn_act": "mlp.hook_post", "ffn_out": "hook_mlp_out",
    "resid_post": "hook_resid_post",
}  # fmt: skip
# A norm after each sum: the normed value is the stream, and TransformerLens's own hook_attn_out and hook_resid_mid
# (named for pre-norm blocks) hold other values than their names say.
POST_NORM = {
    **{name: hook for name, hook in PRE_NORM.items() if name not in ("norm1", "norm2")},
    "attn_out": "attn.o.hook_out", "resid_mid_sum": "ln1.hook_in", "resid_mid": "ln1.hook_out",
    "resid_post_sum": "ln2.hook_in",
}  # fmt: skip

# A bridge keeps what belongs to one forward pass on its modules, so passes cannot overlap; nested ones may.
_ONE_AT_A_TIME = threading.RLock()
_NORM_EDIT = "A forward hook edited hook_scale/hook_normalized"  # which is what was asked for


@dataclass(frozen=True)
class Place:
    """One site at one hook point.

    side: the hook lies on a module's input while the stream runs past it, so a change must be carried to resid_post.
    fragile: the model later writes into the tensor, so the tap gets a copy.
    """

    site: Site
    point: Any
    side: bool = False
    fragile: bool = False


@contextmanager
def attached(hooks: list[tuple[Any, Callable[[Tensor], Tensor | None]]]) -> Iterator[None]:
    """Hooks on a bridge for one forward pass of this thread, removed whatever happens; a nested pass ignores them."""
    handles: list[tuple[Any, Any]] = []
    _ACTIVE.append(marker := object())
    thread = threading.get_ident()

    def mine(function: Callable[[Tensor], Tensor | None]) -> Callable[..., Tensor | None]:
        def hooked(value: Tensor, hook: Any = None) -> Tensor | None:
            if _ACTIVE[-1] is not marker or threading.get_ident() != thread:
                return None
            return function(value)

        return hooked

    try:
        for point, function in hooks:
            handles.append((point, point.add_hook(mine(function))))
        yield
    finally:
        _ACTIVE.remove(marker)
        for point, handle in handles:
            handle.hook.remove()
            point.fwd_hooks = [kept for kept in point.fwd_hooks if kept is not handle]


_ACTIVE: list[object] = []  # the passes under way, innermost last; only touched under the lock


@contextmanager
def undisturbed(bridge: Any) -> Iterator[None]:
    """The bridge to this thread alone, in eval mode; every module's mode is put back."""
    with _ONE_AT_A_TIME, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=_NORM_EDIT)
        modules = {*bridge.modules(), *bridge.original_model.modules()}  # neither holds all of the other
        training = [module for module in modules if module.training]
        positions = getattr(bridge, "pos_embed", None)  # holds the batch size of the pass under way
        batch = None if positions is None else positions.__dict__.get("_current_batch_size")
        try:
            for module in training:
                module.training = False
            yield
        finally:
            for module in training:
                module.training = True
            if positions is not None and batch is not None:
                positions._current_batch_size = batch


class Pass:
    """The hooks of one tapped forward pass, and what they tell one another."""

    def __init__(self, places: Mapping[Site, Place], tap: Any, inputs: Inputs, weight: Callable[..., Any]) -> None:
        self.places, self.tap, self.weight = places, tap, weight
        self.batch, self.length = inputs.tokens.shape
        self.z: dict[int | None, Tensor] = {}
        self.moved: dict[int | None, Tensor] = {}  # what a change of resid_mid added
        self.dead: dict[int | None, Tensor] = {}  # rows of attention that the tap left without an edge

    def hooks(self) -> list[tuple[Any, Callable[[Tensor], Tensor | None]]]:
        """(hook point, function) in the order in which those of one point apply."""
        wanted = {site for site in self.places if self.tap.wants(site)}
        found = []
        for site, place in self.places.items():
            layer = site.layer
            if site.name == "resid_post" and Site("resid_mid", layer) in wanted:
                found.append((place.point, lambda value, layer=layer: self._carry(layer, value)))
            if site.name == "pattern" and Site("scores", layer) in wanted:
                found.append((place.point, lambda value, layer=layer: self._empty(layer, value)))
            if site in wanted:
                found.append((place.point, self._reader(place)))
            if site.name == "z" and Site("head_out", layer) in wanted:
                found.append((place.point, lambda value, layer=layer: self.z.__setitem__(layer, value)))
        return found

    def _reader(self, place: Place) -> Callable[[Tensor], Tensor | None]:
        special = {"scores": self._scores, "head_out": self._heads}.get(place.site.name, self._read)
        return lambda value: special(place, value)

    def _read(self, place: Place, value: Tensor) -> Tensor | None:
        shown = value.clone() if place.fragile else value
        flat = value.ndim == 2  # OPT joins batch and position around its FFN
        if flat:
            shown = shown.view(self.batch, self.length, -1)
        new = self.tap(place.site, shown)
        if place.side and new is not shown:
            self.moved[place.site.layer] = new - shown
        norm = place.site.name.endswith(("_scale", "_hat"))
        if torch.is_grad_enabled():
            # What the tap saw must lie on the way to the logits, and here it can be a view (heads split) or a copy. A norm
            # whose hooks hand back the very tensor takes its own route, past them.
            new = new.view_as(new) if norm and new is value else new
        elif new is shown or (norm and torch.equal(new, shown)):
            return None  # an edit takes the norm's other route, which rounds differently
        return (new.clone() if place.fragile else new).reshape(value.shape)

    def _scores(self, place: Place, value: Tensor) -> Tensor | None:
        """Masked scores are the lowest number here and −∞ to the tap; a row that the tap leaves empty gives z = 0."""
        masked = value <= torch.finfo(value.dtype).min / 2
        shown = value.masked_fill(masked, -torch.inf)
        new = self.tap(place.site, shown)
        if new is shown and not torch.is_grad_enabled():
            return None
        dead = torch.isneginf(new).all(-1, keepdim=True)
        padding = masked.all(-1, keepdim=True)  # queries without a key: the model's own convention stays
        self.dead[place.site.layer] = dead & ~padding
        return torch.where(dead, torch.where(padding, value, torch.zeros_like(value)), new)

    def _empty(self, layer: int | None, value: Tensor) -> Tensor | None:
        dead = self.dead.pop(layer, None)
        return None if dead is None else value.masked_fill(dead, 0.0)

    def _heads(self, place: Place, value: Tensor) -> Tensor:
        layer = place.site.layer
        heads = torch.einsum("bphd,hdm->bphm", self.z.pop(layer), self.weight("W_O", layer))
        out, bias = self.tap(place.site, heads).sum(2), self.weight("b_O", layer)
        return out if bias is None else out + bias

    def _carry(self, layer: int | None, value: Tensor) -> Tensor | None:
        moved = self.moved.pop(layer, None)
        return None if moved is None else value + moved
