"""The runtime's own errors."""

from __future__ import annotations

__all__ = ["EngineDeadError", "MemoryPlanError"]


class EngineDeadError(RuntimeError):
    """The device can no longer be used; the engine has ended every request with an error."""


class MemoryPlanError(ValueError):
    """The KV pool asked for does not fit, or is too small for a single request."""
