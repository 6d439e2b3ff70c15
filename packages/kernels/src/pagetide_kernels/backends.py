"""The back ends: what each must offer, the table that names them, and the choice of one.

Adding a back end is one entry in ``_TABLE``; its module is imported when it is first asked for, so
a missing optional dependency makes it unavailable, with the reason, and harms nothing else.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from pagetide_kernels.errors import UnsupportedError
from pagetide_kernels.metadata import AttentionMetadata, AttentionShape

if TYPE_CHECKING:
    from pagetide_kvcache import KVCache

__all__ = ["AttentionBackend", "BackendStatus", "available_backends", "select_backend"]


class AttentionBackend(ABC):
    """The kernels of one technology. Instances hold no state; every argument arrives validated.

    Call the functions of ``pagetide_kernels.ops``, which validate, rather than these methods.
    """

    name: ClassVar[str]
    is_exact: ClassVar[bool] = True
    """Whether a token's bits depend on its own ``query_len`` and ``seq_len`` alone."""

    @abstractmethod
    def unsupported_reason(self, shape: AttentionShape | None, device: torch.device) -> str | None:
        """Why it cannot serve ``shape`` (None: any shape at all) on ``device``; None if it can."""

    def is_fastest(self, shape: AttentionShape, device: torch.device) -> bool:
        """Whether measurements put it first for a shape it supports: ``auto`` then takes it."""
        del shape, device
        return False

    def prepare(self, metadata: AttentionMetadata, shape: AttentionShape) -> AttentionMetadata:
        """Derive, once a step, what all layers share; returns the metadata with its work list."""
        del shape
        return metadata

    @abstractmethod
    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        *,
        scale: float,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
        window: int | None,
        soft_cap: float | None,
        out: Tensor,
    ) -> None:
        """Fill all of ``out``; see ``pagetide_kernels.paged_attention``."""

    @abstractmethod
    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        *,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
    ) -> None:
        """Write the step's keys and values; see ``pagetide_kernels.store_kv``."""

    def copy_blocks(
        self, source: KVCache, destination: KVCache, block_pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Copy whole blocks, every layer, data and scales, between pools or within one.

        Args:
            source: the pool that is read.
            destination: the pool that is written.
            block_pairs: (block of ``source``, block of ``destination``) of each copy.
        """
        tensors = [(source.data, destination.data)]
        if source.scales is not None and destination.scales is not None:
            tensors.append((source.scales, destination.scales))
        from_ids, to_ids = zip(*block_pairs, strict=True)
        for from_tensor, to_tensor in tensors:
            from_index = torch.tensor(from_ids, device=from_tensor.device)
            to_index = torch.tensor(to_ids, device=to_tensor.device)
            blocks = from_tensor.index_select(2, from_index).to(to_tensor.device)
            to_tensor.index_copy_(2, to_index, blocks)


@dataclass(frozen=True, slots=True)
class BackendStatus:
    """Whether a back end works here; if not, ``reason`` says why."""

    is_available: bool
    reason: str


@dataclass(frozen=True, slots=True)
class _Entry:
    """Where a back end lives, and the device types on which ``auto`` may choose it."""

    module: str
    class_name: str
    auto_device_types: frozenset[str]


# In order of preference: of those that may be chosen and support the shape, ``auto`` takes the one
# that claims to be fastest, else the first.
_TABLE: Mapping[str, _Entry] = MappingProxyType(
    {
        "triton": _Entry("pagetide_kernels.triton.backend", "TritonBackend", frozenset({"cuda"})),
        "cuda": _Entry("pagetide_kernels.cuda.backend", "CudaBackend", frozenset({"cuda"})),
        "cpu": _Entry("pagetide_kernels.cpu", "CpuBackend", frozenset({"cpu"})),
        "reference": _Entry(
            "pagetide_kernels.reference", "ReferenceBackend", frozenset({"cpu", "cuda"})
        ),
    }
)


@cache
def _load(name: str) -> AttentionBackend | str:
    """The back end of that name, or why it cannot be imported."""
    entry = _TABLE[name]
    try:
        backend_class = getattr(importlib.import_module(entry.module), entry.class_name)
    except ImportError as error:
        return f"it cannot be imported: {error}"
    backend: AttentionBackend = backend_class()
    return backend


def _unsupported_reason(
    name: str, shape: AttentionShape | None, device: torch.device
) -> str | None:
    backend = _load(name)
    return backend if isinstance(backend, str) else backend.unsupported_reason(shape, device)


def available_backends(device: torch.device | str | None = None) -> Mapping[str, BackendStatus]:
    """Every back end by name, in order of preference, and whether it works on ``device``.

    Args:
        device: where the tensors would live; by default the GPU where there is one, else the CPU.
    """
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    statuses = {}
    for name in _TABLE:
        reason = _unsupported_reason(name, None, torch.device(device))
        statuses[name] = BackendStatus(is_available=reason is None, reason=reason or "")
    return MappingProxyType(statuses)


@lru_cache(maxsize=1024)
def select_backend(
    name: str, shape: AttentionShape, device: torch.device | str
) -> AttentionBackend:
    """The back end of that name, or for ``"auto"`` the preferred one for this shape and device.

    The choice is made once for a model; hand the result to every call. Asking again is cheap.

    Raises:
        ValueError: no back end has that name.
        UnsupportedError: it cannot serve this shape on this device; names those that can.
    """
    device = torch.device(device)
    if name == "auto":
        candidates = [other for other in _TABLE if device.type in _TABLE[other].auto_device_types]
    elif name in _TABLE:
        candidates = [name]
    else:
        raise ValueError(f"no back end is called {name!r}: use one of auto, {', '.join(_TABLE)}")
    reasons, usable = [], []
    for candidate in candidates:
        backend = _load(candidate)
        if isinstance(backend, str):
            reasons.append(f"{candidate}: {backend}")
        elif reason := backend.unsupported_reason(shape, device):
            reasons.append(f"{candidate}: {reason}")
        else:
            usable.append(backend)
    if usable:
        return next((each for each in usable if each.is_fastest(shape, device)), usable[0])
    able = [other for other in _TABLE if _unsupported_reason(other, shape, device) is None]
    raise UnsupportedError(
        f"back end {name!r} cannot serve {shape} on {device} ({'; '.join(reasons)}); "
        f"use {' or '.join(able) if able else 'another device'}"
    )


@lru_cache(maxsize=1024)
def require_supported(
    backend: AttentionBackend, shape: AttentionShape, device: torch.device
) -> AttentionBackend:
    """``backend``, if it can serve this shape on this device.

    Raises:
        UnsupportedError: it cannot.
    """
    if reason := backend.unsupported_reason(shape, device):
        raise UnsupportedError(
            f"back end {backend.name!r} cannot serve {shape} on {device}: {reason}; "
            "use another one, or auto"
        )
    return backend
