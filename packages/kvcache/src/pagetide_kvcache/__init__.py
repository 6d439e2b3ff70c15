"""Paged KV-cache bookkeeping: reference-counted blocks, prefix sharing, copy-on-write."""

from pagetide_kvcache.__about__ import __version__

__all__ = ["__version__"]
