"""What the contract's test files share: the back ends, a plain case, a unit in the last place."""

from __future__ import annotations

import pytest
import torch
from contract_axes import Case
from contract_harness import backends_here

import pagetide_kernels as pk

BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), backends_here(), ids=lambda value: str(value)
)
PLAIN = Case(
    dtypes=(torch.float32, "float32"), heads=(9, 3), head_dim=64, block_size=16, lengths="mixed",
    window=None, soft_cap=None, layout="kvcache", poison="nan",
)  # fmt: skip


def is_exact(backend: str, shape: pk.AttentionShape, device: str) -> bool:
    return pk.select_backend(backend, shape, device).is_exact


def unit(dtype: torch.dtype, like: torch.Tensor) -> float:
    """One unit in the last place of ``dtype`` at the largest magnitude of ``like``."""
    return torch.finfo(dtype).eps * max(1e-6, like.abs().max().item())
