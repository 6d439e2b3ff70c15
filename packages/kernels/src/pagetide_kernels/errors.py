"""What can go wrong in a kernel call, as exceptions a caller can catch."""

from __future__ import annotations

__all__ = ["KernelError", "UnsupportedError"]


class KernelError(Exception):
    """Base of every error that is this package's own."""


class UnsupportedError(KernelError, ValueError):
    """A well-formed request that the back end cannot serve; the message names one that can."""
