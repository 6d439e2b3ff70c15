"""Continuous batching over a paged KV cache, without torch."""

from pagetide_scheduler.__about__ import __version__

__all__ = ["__version__"]
