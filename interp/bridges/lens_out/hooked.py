"""Registering hooks on an adapter, in TransformerLens's words; the model itself never holds any."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from interp.bridges.huggingface import optional
from interp.bridges.lens_out.hooks import Direction, Hook, HookPoint, LensTap, Registry
from interp.bridges.lens_out.names import Fork, Place, UnknownHookError, check_name, default_names, fork_is_on
from interp.hookable import UnsupportedModelError
from interp.model.transformer import Transformer
from interp.sites import Site

Hooks = Sequence[tuple[Any, Callable[..., Any]]]


class LensHooked:
    """Names are TransformerLens's, 3.x or 4.x; `hook.name` is the one asked for. An unknown name raises UnknownHookError."""

    model: Transformer
    cfg: Any  # a LensConfig; Any, so that type checkers take it for TransformerLens's own
    registry: Registry
    context_level: int

    def tap(self, hooks: list[Hook] | None = None, record: Any = (), gradients: bool = False) -> LensTap:
        """The registered hooks and further ones, for one forward pass."""
        hooks = self.registry.hooks + (hooks or [])
        return LensTap(self.model, self.registry.places, hooks, record, gradients)

    @property
    def hook_dict(self) -> dict[str, HookPoint]:
        """Every hook point by name, in the order reached."""
        return self.registry.points

    mod_dict = hook_dict

    def hook_points(self) -> Iterable[HookPoint]:
        """Every hook point."""
        return self.registry.points.values()

    def add_hook(
        self,
        name: str | Callable[[str], bool],
        hook: Callable[..., Any],
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> None:
        """Register a function at a name, or at the first matching name of each place, until it is reset."""
        for found in self._find(name):
            self.registry.points[found].add_hook(hook, dir, is_permanent, level, prepend)

    def add_perma_hook(
        self, name: str | Callable[[str], bool], hook: Callable[..., Any], dir: Direction = "fwd"
    ) -> None:
        """Register a function that `reset_hooks()` leaves in place."""
        self.add_hook(name, hook, dir, is_permanent=True)

    def remove_all_hook_fns(
        self, direction: str = "both", including_permanent: bool = False, level: int | None = None
    ) -> None:
        """Take away the matching hooks of every name."""
        self.registry.remove(direction, including_permanent, level)

    def clear_contexts(self) -> None:
        """Empty every hook point's `ctx`."""
        for point in self.hook_points():
            point.clear_context()

    def reset_hooks(
        self,
        clear_contexts: bool = True,
        direction: str = "both",
        including_permanent: bool = False,
        level: int | None = None,
    ) -> None:
        """Take away the matching hooks, and empty the contexts."""
        if clear_contexts:
            self.clear_contexts()
        self.remove_all_hook_fns(direction, including_permanent, level)

    @contextmanager
    def hooks(
        self,
        fwd_hooks: Hooks = (),
        bwd_hooks: Hooks = (),
        reset_hooks_end: bool = True,
        clear_contexts: bool = False,
    ) -> Iterator[Any]:
        """Hooks that hold inside the `with`, also after an exception; the caller's earlier hooks stay.

        A backward hook belongs to the graph of the forward passes run inside and fires whenever that is differentiated.
        """
        mine = self.made(fwd_hooks, bwd_hooks, self.context_level + 1)
        self.context_level += 1
        self.registry.hooks += mine
        try:
            yield self
        finally:
            self.context_level -= 1
            if reset_hooks_end:
                for hook in mine:
                    hook.remove()
            if clear_contexts:
                for hook in mine:
                    hook.point.clear_context()

    def made(self, fwd_hooks: Hooks, bwd_hooks: Hooks, level: int | None = None) -> list[Hook]:
        """Hooks of TransformerLens's pairs, not registered."""
        directions: tuple[tuple[Direction, Hooks], ...] = (("fwd", fwd_hooks), ("bwd", bwd_hooks))
        return [
            Hook(self.registry.points[name], function, dir, level=level)
            for dir, pairs in directions
            for asked, function in pairs
            for name in self._find(asked)
        ]

    def _find(self, asked: str | Callable[[str], bool]) -> list[str]:
        return self.registry.find(asked, lambda fork: fork_is_on(fork, self.cfg))

    def get_caching_hooks(
        self,
        names_filter: Any = None,
        incl_bwd: bool = False,
        device: Any = None,
        remove_batch_dim: bool = False,
        cache: dict[str, Tensor] | None = None,
        pos_slice: Any = None,
    ) -> tuple[dict[str, Tensor], list[tuple[str, Callable]], list[tuple[str, Callable]]]:
        """(cache, fwd_hooks, bwd_hooks): hooks that copy what they see into `cache`, gradients as "<name>_grad"."""
        cache = {} if cache is None else cache

        def save(value: Tensor, hook: HookPoint, suffix: str) -> None:
            kept = slice_positions(value.detach().clone().to(device), pos_slice, self.registry.places[hook.name])
            cache[hook.name + suffix] = kept[0] if remove_batch_dim and kept.shape[0] == 1 else kept

        names = self.filtered(names_filter)
        forward = [(name, partial(save, suffix="")) for name in names]
        return cache, forward, [(name, partial(save, suffix="_grad")) for name in names] if incl_bwd else []

    def add_caching_hooks(self, names_filter: Any = None, incl_bwd: bool = False, **options: Any) -> dict[str, Tensor]:
        """Register the hooks of `get_caching_hooks` and return their cache."""
        cache, forward, backward = self.get_caching_hooks(names_filter, incl_bwd, **options)
        for hook in self.made(forward, backward):
            self.registry.hooks.append(hook)
        return cache

    def filtered(self, names_filter: Any) -> list[str]:
        """The names that a filter asks for, in the order reached.

        None: each place's 3.x name, per-head results and forks where their flag is on. A name, or an iterable of names:
        those. A function of names: every name, 3.x or 4.x, for which it is true. Raises UnknownHookError for a name that
        the model does not have and for a function that matches none.
        """
        places = self.registry.places
        if names_filter is None:
            return default_names(places, self.cfg)
        if callable(names_filter):
            found = [name for name in places if names_filter(name)]
            if not found:
                raise UnknownHookError("names_filter matched no hook name of this model; model.hook_dict lists them")
            return found
        asked = [names_filter] if isinstance(names_filter, str) else list(names_filter)
        asked = {check_name(name, places) for name in asked}
        return [name for name in places if name in asked]

    def set_use_attn_result(self, use_attn_result: bool) -> None:
        """Whether a cache without a filter holds each head's result."""
        self.cfg.use_attn_result = use_attn_result

    def set_use_split_qkv_input(self, use_split_qkv_input: bool) -> None:
        """Whether a cache without a filter holds the copies of the stream that q, k and v read. UnsupportedModelError."""
        self._need(Fork("q", 0), "use_split_qkv_input", use_split_qkv_input)
        if use_split_qkv_input and self.cfg.use_attn_in:
            raise ValueError("use_split_qkv_input and use_attn_in exclude each other; allowed: one of the two")
        self.cfg.use_split_qkv_input = use_split_qkv_input

    def set_use_attn_in(self, use_attn_in: bool) -> None:
        """Whether a cache without a filter holds the copies of the stream that heads read. UnsupportedModelError."""
        self._need(Fork("attn", 0), "use_attn_in", use_attn_in)
        if use_attn_in and self.cfg.use_split_qkv_input:
            raise ValueError("use_attn_in and use_split_qkv_input exclude each other; allowed: one of the two")
        self.cfg.use_attn_in = use_attn_in

    def set_use_hook_mlp_in(self, use_hook_mlp_in: bool) -> None:
        """Whether a cache without a filter holds the copy of the stream that the FFN reads. UnsupportedModelError."""
        self._need(Fork("mlp", 0), "use_hook_mlp_in", use_hook_mlp_in)
        self.cfg.use_hook_mlp_in = use_hook_mlp_in

    def _need(self, fork: Fork, flag: str, value: bool) -> None:
        if value and fork not in self.registry.places.values():
            raise UnsupportedModelError(f"{flag}: this model's readers have no such copies of the stream; they need an additive "
                                        "stream (pre-norm, no embedding norm), use_attn_in ungrouped keys and values, "
                                        "use_hook_mlp_in an FFN")  # fmt: skip


def slice_positions(value: Tensor, pos_slice: Any, place: Place) -> Tensor:
    """The chosen positions (queries, for scores and pattern): None, an int (the axis stays), a tuple for slice(), a slice,
    indices, or a TransformerLens Slice."""
    axis = 2 if isinstance(place, Site) and place.name in ("scores", "pattern") else 1
    if pos_slice is None:
        return value
    if hasattr(pos_slice, "apply"):
        return pos_slice.apply(value, dim=axis)
    if isinstance(pos_slice, tuple):
        pos_slice = slice(*pos_slice)
    if isinstance(pos_slice, slice):
        return value[(slice(None),) * axis + (pos_slice,)]
    index = torch.as_tensor(np.asarray(pos_slice)).reshape(-1).to(value.device)
    return value.index_select(axis, index % value.shape[axis])


def activation_cache(model: Transformer, values: dict[str, Tensor], adapter: Any) -> Any:
    """TransformerLens's ActivationCache; of a model whose stream is no plain sum, one that refuses to decompose it."""
    lens = optional("transformer_lens", "lens")
    return _cache_class(lens.ActivationCache, _undecomposable(model))(values, adapter)


def _undecomposable(model: Transformer) -> str:
    """Why the stream is not embeddings + components, or nothing."""
    if not model.additive_stream:
        return "its stream is normed on the way (post-norm or embedding norm)"
    return "segment embeddings are part of its stream and have no hook" if model.config.n_segments else ""


@lru_cache(maxsize=8)
def _cache_class(base: type, why: str) -> type:
    if not why:
        return base

    def refuse(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            raise UnsupportedModelError(f"{name} would not sum to this model's stream: {why}")

        return method

    names = (
        "decompose_resid",
        "get_full_resid_decomposition",
        "stack_head_results",
        "stack_neuron_results",
        "logit_attrs",
    )
    return type("ActivationCache", (base,), {name: refuse(name) for name in names})
