"""Paged-attention kernels and the small fused operations around them."""

from pagetide_kernels.__about__ import __version__

__all__ = ["__version__"]
