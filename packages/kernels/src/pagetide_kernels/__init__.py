"""Paged-attention kernels and the small fused operations around them."""

from pagetide_kernels.__about__ import __version__
from pagetide_kernels.backends import (
    AttentionBackend,
    BackendStatus,
    available_backends,
    select_backend,
)
from pagetide_kernels.errors import KernelError, UnsupportedError
from pagetide_kernels.metadata import AttentionBounds, AttentionMetadata, AttentionShape
from pagetide_kernels.ops import copy_blocks, paged_attention, store_kv
from pagetide_kernels.philox import philox_uniform
from pagetide_kernels.sampling import greedy, sample
from pagetide_kernels.small_ops import (
    add_rms_norm,
    gelu_tanh,
    layer_norm,
    rms_norm,
    rotary,
    rotary_table,
    silu_and_mul,
)

__all__ = [
    "AttentionBackend",
    "AttentionBounds",
    "AttentionMetadata",
    "AttentionShape",
    "BackendStatus",
    "KernelError",
    "UnsupportedError",
    "__version__",
    "add_rms_norm",
    "available_backends",
    "copy_blocks",
    "gelu_tanh",
    "greedy",
    "layer_norm",
    "paged_attention",
    "philox_uniform",
    "rms_norm",
    "rotary",
    "rotary_table",
    "sample",
    "select_backend",
    "silu_and_mul",
    "store_kv",
]
