"""What a sweep refuses, and how it stops."""

from __future__ import annotations


class SweepError(ValueError):
    """A sweep that cannot be run as asked; the message names the value and what is allowed."""


class SweepCheckError(RuntimeError):
    """A cell whose fast value differs from a full run's by more than rounding."""


class SweepInterrupted(KeyboardInterrupt):
    """A sweep that was stopped; what it had finished lies in `checkpoint`."""

    def __init__(self, message: str, checkpoint: object) -> None:
        super().__init__(message)
        self.checkpoint = checkpoint
