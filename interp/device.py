"""Which device a name means on this machine."""

from __future__ import annotations

import torch


def device_named(name: str) -> torch.device:
    """ "auto" (a GPU where there is one), "cpu", "cuda", "cuda:1", "mps". ValueError names the devices that are here."""
    here = ["cpu"]
    if torch.backends.mps.is_available():
        here.append("mps")
    if torch.cuda.is_available():
        here.append("cuda")
    try:
        device = torch.device(here[-1] if name == "auto" else name)
        torch.empty(0, device=device)
        if device.type not in here:
            raise RuntimeError
    except (RuntimeError, AssertionError, NotImplementedError):
        raise ValueError(f"device {name!r} cannot be used; allowed: 'auto', {', '.join(map(repr, here))}") from None
    return device
