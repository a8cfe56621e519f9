"""TransformerLens's hooks over our taps: hook points that only remember functions, and the tap that calls them."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from interp.bridges.lens_out.names import Fork, Part, Place, UnknownHookError, check_name
from interp.model.tap import NO_TAP
from interp.model.transformer import Transformer
from interp.sites import Site, layer_sites

Direction = Literal["fwd", "bwd"]


class HookConflictError(ValueError):
    """Hooks that cannot hold together in one run, or a hook that returned something unusable."""


@dataclass(eq=False)
class Hook:
    """A function at one hook point: `function(value, hook=point)` returns a new value, or None to keep the (edited) one."""

    point: HookPoint
    function: Callable[..., Any]
    dir: Direction = "fwd"
    is_permanent: bool = False
    level: int | None = None

    def remove(self) -> None:
        """Take this hook away; nothing if it is gone."""
        if self in self.point.registry.hooks:
            self.point.registry.hooks.remove(self)


class HookPoint:
    """One hook name: what a hook function gets as `hook`."""

    def __init__(self, name: str, registry: Registry) -> None:
        self.name, self.registry, self.ctx = name, registry, {}

    def __repr__(self) -> str:
        return f"HookPoint(name={self.name!r}, {len(self.fwd_hooks)} fwd, {len(self.bwd_hooks)} bwd)"

    @property
    def fwd_hooks(self) -> list[Hook]:
        """The forward hooks that are registered under this name, in the order in which they fire."""
        return [hook for hook in self.registry.hooks if hook.point is self and hook.dir == "fwd"]

    @property
    def bwd_hooks(self) -> list[Hook]:
        """The backward hooks that are registered under this name."""
        return [hook for hook in self.registry.hooks if hook.point is self and hook.dir == "bwd"]

    def add_hook(
        self,
        hook: Callable[..., Any],
        dir: Direction = "fwd",
        is_permanent: bool = False,
        level: int | None = None,
        prepend: bool = False,
    ) -> Hook:
        """Register a function; prepend: before every other. Returns a handle with `remove()`. ValueError: unknown dir."""
        if dir not in ("fwd", "bwd"):
            raise ValueError(f"dir={dir!r} is not allowed; allowed: 'fwd', 'bwd'")
        made = Hook(self, hook, dir, is_permanent, level)
        self.registry.hooks.insert(0 if prepend else len(self.registry.hooks), made)
        return made

    def add_perma_hook(self, hook: Callable[..., Any], dir: Direction = "fwd") -> Hook:
        """Register a function that `reset_hooks()` leaves in place."""
        return self.add_hook(hook, dir, is_permanent=True)

    def has_hooks(self, dir: str = "both", including_permanent: bool = True, level: int | None = None) -> bool:
        """Whether any hook of this name matches."""
        return any(_matches(hook, dir, including_permanent, level) for hook in self.fwd_hooks + self.bwd_hooks)

    def remove_hooks(self, dir: str = "fwd", including_permanent: bool = False, level: int | None = None) -> None:
        """Take away the matching hooks of this name; dir: "fwd" (TransformerLens's default), "bwd" or "both"."""
        self.registry.remove(dir, including_permanent, level, self)

    def clear_context(self) -> None:
        """Empty `ctx`."""
        self.ctx = {}

    def layer(self) -> int:
        """The layer in `blocks.{layer}.…`. ValueError for a name outside the blocks."""
        parts = self.name.split(".")
        if parts[0] != "blocks":
            raise ValueError(f"{self.name!r} is not in a block, so it has no layer")
        return int(parts[1])


def _matches(hook: Hook, dir: str, including_permanent: bool, level: int | None) -> bool:
    if dir not in ("fwd", "bwd", "both"):
        raise ValueError(f"dir={dir!r} is not allowed; allowed: 'fwd', 'bwd', 'both'")
    return dir in (hook.dir, "both") and (including_permanent or not hook.is_permanent) and level in (None, hook.level)


class Registry:
    """Every hook point of one adapter by name, and the functions registered at them in the order in which they fire."""

    def __init__(self, places: dict[str, Place]) -> None:
        self.places = places
        self.points = {name: HookPoint(name, self) for name in places}
        self.hooks: list[Hook] = []

    def remove(self, dir: str, including_permanent: bool, level: int | None, point: HookPoint | None = None) -> None:
        """Take away the matching hooks, of one point or of all."""
        self.hooks[:] = [
            hook
            for hook in self.hooks
            if not (point in (None, hook.point) and _matches(hook, dir, including_permanent, level))
        ]

    def find(self, asked: str | Callable[[str], bool], forks: Callable[[Fork], bool]) -> list[str]:
        """The names that a hook is for: the one given, or the first matching name of each place. UnknownHookError.

        A function of names gets a fork only where its flag is on (`forks`), or when it matches nothing else: it reads a
        stream that other matches read too, so that most functions do not mean it.
        """
        if isinstance(asked, str):
            return [check_name(asked, self.places)]
        first: dict[Place, str] = {}
        for name, place in self.places.items():
            if place not in first and asked(name):
                first[place] = name
        if not first:
            raise UnknownHookError("the filter matched no hook name of this model; model.hook_dict lists them")
        meant = [name for place, name in first.items() if isinstance(place, Site) or forks(place)]
        return meant or list(first.values())


class LensTap:
    """Calls hooks, then records; belongs to one forward pass of one model.

    hooks: in the order in which they fire at a place. record: hook names. gradients: keep what was recorded in the
    graph, in `live`, for a backward pass.
    """

    def __init__(
        self,
        model: Transformer,
        places: dict[str, Place],
        hooks: Iterable[Hook],
        record: Iterable[str] = (),
        gradients: bool = False,
    ) -> None:
        self.model, self.gradients = model, gradients
        self.forward: dict[Place, list[Hook]] = {}
        self.backward: dict[Place, list[Hook]] = {}
        for hook in hooks:
            chosen = self.forward if hook.dir == "fwd" else self.backward
            chosen.setdefault(places[hook.point.name], []).append(hook)
        self.record: dict[Place, list[str]] = {}
        for name in record:
            self.record.setdefault(places[name], []).append(name)
        self.places = {*self.forward, *self.backward, *self.record}
        self.recorded: dict[str, Tensor] = {}
        self.live: dict[str, Tensor] = {}
        self.edited: set[Place] = set()
        self.forks: dict[Fork, Tensor] = {}  # those whose reader must read them instead of the stream
        self.wanted = {place for place in self.places if isinstance(place, Site)}
        for fork in (place for place in self.places if isinstance(place, Fork)):
            s = layer_sites(fork.layer)
            self.wanted |= {s.resid_mid, s.norm2} if fork.part == "mlp" else {s.resid_pre, s.q, s.k, s.v}
        self._check_forks()

    def wants(self, site: Site) -> bool:
        return site in self.wanted

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        if site not in self.wanted:
            return value
        if site.layer is not None:
            value = self._read_fork(site, value)
        value = self._visit(site, value)
        if site.layer is not None:
            self._split(site, value)
        return value

    def _visit(self, place: Place, value: Tensor) -> Tensor:
        """Hooks, then the record, at one place."""
        if place not in self.places:
            return value
        differentiated = torch.is_grad_enabled() and self._differentiates(place)
        if differentiated and not value.requires_grad:
            value = value.detach().requires_grad_(True)  # frozen weights: the graph starts here
        if place in self.forward:
            value = self._edit(place, value)
        if differentiated:
            value = value.view_as(value)  # a node of its own, so that its gradient is this place's alone
            for hook in self.backward.get(place, ()):
                value.register_hook(_gradient_hook(hook))
        for name in self.record.get(place, ()):
            self.recorded[name] = value.detach().clone()  # a copy: later edits write elsewhere
            if self.gradients:
                self.live[name] = value
        return value

    def _edit(self, place: Place, value: Tensor) -> Tensor:
        """The forward hooks in order; each may edit in place or return a value."""
        shape = value.shape
        value = value.clone()  # so that an edit in place reaches this place and nothing before it
        for hook in self.forward[place]:
            untouched = None if value.is_inference() else value._version
            result = hook.function(value, hook=hook.point)
            if result is None:
                result = value
            elif not isinstance(result, Tensor) or result.shape != shape:
                found = f"shape {tuple(result.shape)}" if isinstance(result, Tensor) else type(result).__name__
                raise HookConflictError(f"the hook at {hook.point.name!r} returned {found}; allowed: None or a tensor "
                                        f"of shape {tuple(shape)}")  # fmt: skip
            if result is not value or untouched is None or value._version != untouched:
                self.edited.add(place)
            value = result
        return value

    def _differentiates(self, place: Place) -> bool:
        return place in self.backward or (self.gradients and place in self.record)

    def _split(self, site: Site, x: Tensor) -> None:
        """After a stream site, the copies that its readers read."""
        for fork in _forks_of(site):
            if fork not in self.places:
                continue
            n = {"q": self.model.config.n_heads, "k": self.model.config.kv_heads, "v": self.model.config.kv_heads}
            heads = n.get(fork.part, self.model.config.n_heads)
            copy = x if fork.part == "mlp" else x.unsqueeze(-2).expand(*x.shape[:-1], heads, x.shape[-1])
            copy = self._visit(fork, copy)
            followed = torch.is_grad_enabled() and (fork in self.forward or self._differentiates(fork))
            if fork in self.edited or followed:
                self.forks[fork] = copy

    def _read_fork(self, site: Site, value: Tensor) -> Tensor:
        """What a reader makes of its own copy of the stream, where that copy was edited or is differentiated."""
        part: dict[str, Part] = {"q": "q", "k": "k", "v": "v", "norm2": "mlp"}
        if not self.forks or site.name not in part or site.layer is None:
            return value
        fork = Fork(part[site.name], site.layer)
        copy = self.forks.get(fork, self.forks.get(Fork("attn", site.layer)) if fork.part != "mlp" else None)
        if copy is None:
            return value
        number = 2 if fork.part == "mlp" else 1
        self._check_norm(site.layer, number)
        block: Any = self.model.blocks[site.layer]
        if fork.part == "mlp":
            return block.norm2(copy, NO_TAP)
        letter = fork.part.upper()
        weight, bias = getattr(block.attention, f"W_{letter}"), getattr(block.attention, f"b_{letter}")
        out = torch.einsum("bphm,hmd->bphd", block.norm1(copy, NO_TAP), weight)
        return out if bias is None else out + bias

    def _check_norm(self, layer: int, number: int) -> None:
        """A copy passes the norm by itself, so hooks of the stream's own pass through that norm would be lost."""
        s = layer_sites(layer)
        inner = (s.norm1_scale, s.norm1_hat, s.norm1) if number == 1 else (s.norm2_scale, s.norm2_hat)
        for site in inner:
            if site in self.edited or (torch.is_grad_enabled() and self._differentiates(site)):
                raise HookConflictError(
                    f"blocks.{layer}.ln{number}: an edit or gradient inside this norm cannot be combined with hooks at the "
                    "copies of the stream that its readers read; use one of the two"
                )

    def _check_forks(self) -> None:
        hooked = [place for place in (*self.forward, *self.backward) if isinstance(place, Fork)]
        for fork in hooked:
            if fork.part == "attn" and any(Fork(part, fork.layer) in hooked for part in ("q", "k", "v")):
                raise HookConflictError(f"blocks.{fork.layer}: hook_attn_in and the split q, k, v inputs are two ways to "
                                        "read one stream; hook one of the two")  # fmt: skip


def _forks_of(site: Site) -> tuple[Fork, ...]:
    if site.layer is None or site.name not in ("resid_pre", "resid_mid"):
        return ()
    if site.name == "resid_mid":
        return (Fork("mlp", site.layer),)
    return tuple(Fork(part, site.layer) for part in ("attn", "q", "k", "v"))


def _gradient_hook(hook: Hook) -> Callable[[Tensor], Tensor | None]:
    def call(gradient: Tensor) -> Tensor | None:
        result = hook.function(gradient, hook=hook.point)
        return result[0] if isinstance(result, tuple) else result  # PyTorch's module hooks return a tuple

    return call
