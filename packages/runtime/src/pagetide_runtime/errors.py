"""The runtime's own errors."""

from __future__ import annotations

__all__ = ["EngineDeadError", "MemoryPlanError"]


class EngineDeadError(RuntimeError):
    """The engine can no longer be used, because its device failed or a step was cut in two; build a
    new one. No request of it goes on.
    """


class MemoryPlanError(ValueError):
    """The KV pool asked for does not fit, or is too small for a single request."""
