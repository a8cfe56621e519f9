"""How a forward pass is read and changed: `tap(site, value) -> value`, called once per site, in order."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from interp.sites import Site


class Tap(Protocol):
    """A function of (site, value) that returns the value to go on with, and says which sites it wants."""

    def __call__(self, site: Site, value: Tensor) -> Tensor: ...

    def wants(self, site: Site) -> bool:
        """Whether the site must be computed; False lets the model take a fused path."""
        ...


class NoTap:
    """Reads nothing, changes nothing, wants nothing."""

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        return value

    def wants(self, site: Site) -> bool:
        return False


class EverySite:
    """A plain callable wants every site."""

    def __init__(self, function: Callable[[Site, Tensor], Tensor]) -> None:
        self.function = function

    def __call__(self, site: Site, value: Tensor) -> Tensor:
        return self.function(site, value)

    def wants(self, site: Site) -> bool:
        return True


NO_TAP = NoTap()


def as_tap(tap: Any) -> Tap:
    """None -> reads nothing; a plain callable -> wants everything; a Tap -> itself."""
    if tap is None:
        return NO_TAP
    return tap if hasattr(tap, "wants") else EverySite(tap)
