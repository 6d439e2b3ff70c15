"""The entries: attention over a paged KV cache, writing to it, copying its blocks.

Everything that can be known to be wrong without reading a device tensor is refused here, before
anything runs. Values inside device tensors (lengths, tables, slots) are validated where they are
made: ``AttentionMetadata.from_host``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagetide_kernels.backends import AttentionBackend, require_supported, select_backend
from pagetide_kernels.errors import UnsupportedError
from pagetide_kernels.metadata import AttentionMetadata, AttentionShape
from pagetide_kernels.validation import (
    require_int,
    require_no_overlap,
    require_own_memory,
    require_tensor,
    require_unit_stride,
)

if TYPE_CHECKING:
    from pagetide_kvcache import BlockCopy, KVCache, KVDType

__all__ = ["copy_blocks", "paged_attention", "store_kv"]

_KV_DTYPES: dict[torch.dtype, KVDType] = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
}
# The kernels compute in float32, whatever a Python number can be.
_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


@torch.no_grad()
def paged_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    window: int | None = None,
    soft_cap: float | None = None,
    backend: str | AttentionBackend = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """Causal attention of this step's tokens to their sequences' keys, read from the cache alone.

    Prefill, decode and mixed batches are the same call. Query ``j`` of a sequence stands at
    position ``p = seq_len - query_len + j`` and sees the keys up to ``p``.

    Args:
        q: [T, num_heads, head_dim], float32, float16 or bfloat16; any strides but 1 along head_dim.
        k_cache: [N, num_kv_heads, block_size, head_dim]; any strides but 1 along head_dim.
        v_cache: like ``k_cache``.
        metadata: the step; prepared, if several layers share it (``AttentionBackend.prepare``).
        scale: factor of the dot products, usually ``head_dim ** -0.5``.
        k_scales: float32 [N, num_kv_heads, block_size], exactly when the cache is INT8; stride 0
            along the slots for one scale a block.
        v_scales: like ``k_scales``.
        window: a query at ``p`` sees the keys ``p - window < key <= p``; None: all up to ``p``.
        soft_cap: bounds the scaled scores by ``soft_cap * tanh(score / soft_cap)``; None: does not.
        backend: a name, ``"auto"``, or what ``select_backend`` returned.
        out: like the result, to write into; None: a new tensor.

    Returns:
        [T, num_heads, head_dim] in ``q``'s dtype; zeros for tokens of no sequence.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape, dtype, stride or device that does not fit; the message names it.
        UnsupportedError: the back end does not serve this shape; names one that does.
    """
    shape = _shape_of(q, "q", k_cache, v_cache, k_scales, v_scales, metadata)
    if not abs(scale) <= _LARGEST:
        raise ValueError(f"scale={scale} must be a finite number in float32")
    if window is not None:
        require_int("window", window, at_least=1)
    if soft_cap is not None and not _SMALLEST <= soft_cap <= _LARGEST:
        raise ValueError(
            f"soft_cap={soft_cap} must be a positive number in float32, or None for no cap"
        )
    if out is None:
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    else:
        require_tensor("out", out, q.shape, q.dtype, q.device)
        require_unit_stride("out", out)
        require_no_overlap("out", out)
        require_own_memory("out", out, q=q, k_cache=k_cache, v_cache=v_cache)
    _resolve(backend, shape, q.device).paged_attention(
        q,
        k_cache,
        v_cache,
        metadata,
        shape,
        scale=scale,
        k_scales=k_scales,
        v_scales=v_scales,
        window=window,
        soft_cap=soft_cap,
        out=out,
    )
    return out


@torch.no_grad()
def store_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    metadata: AttentionMetadata,
    *,
    k_scales: Tensor | None = None,
    v_scales: Tensor | None = None,
    backend: str | AttentionBackend = "auto",
) -> None:
    """Write this step's keys and values to the slots ``metadata.slot_mapping`` names.

    Tokens at and beyond ``query_start_loc[S]`` are ignored, whatever their slots say. An ``int8``
    cache gets a scale a token and head, ``amax / 127`` (0 for an all-zero token). An ``int8-block``
    cache has a scale a block and head: a token that exceeds it widens it and rounds the block's
    earlier tokens again, and a token at offset 0 begins the block afresh.

    Args:
        k: [T, num_kv_heads, head_dim], float32, float16 or bfloat16; any strides but 1 along
            head_dim.
        v: like ``k``.
        k_cache: [N, num_kv_heads, block_size, head_dim], changed.
        v_cache: like ``k_cache``.
        metadata: the step.
        k_scales: float32 [N, num_kv_heads, block_size], changed, exactly when the cache is INT8.
        v_scales: like ``k_scales``.
        backend: a name, ``"auto"``, or what ``select_backend`` returned.

    Raises:
        TypeError: an argument is no tensor.
        ValueError: a shape, dtype, stride or device that does not fit; the message names it.
        UnsupportedError: the back end does not serve this shape; names one that does.
    """
    shape = _shape_of(k, "k", k_cache, v_cache, k_scales, v_scales, metadata)
    if shape.num_heads != shape.num_kv_heads:
        raise ValueError(
            f"k has {shape.num_heads} heads but k_cache has {shape.num_kv_heads}: "
            "store the model's KV heads, not its query heads"
        )
    require_tensor("v", v, k.shape, k.dtype, k.device)
    require_unit_stride("v", v)
    require_no_overlap("k_cache", k_cache)
    require_no_overlap("v_cache", v_cache)
    _resolve(backend, shape, k.device).store_kv(
        k, v, k_cache, v_cache, metadata, shape, k_scales=k_scales, v_scales=v_scales
    )


@torch.no_grad()
def copy_blocks(
    kv_cache: KVCache,
    copies: Sequence[BlockCopy],
    *,
    host_cache: KVCache | None = None,
    backend: str | AttentionBackend = "auto",
) -> None:
    """Perform a plan's block copies, every layer, data and scales: out to host, in from it, within.

    Args:
        kv_cache: the pool on the device.
        copies: what to copy; their order does not matter.
        host_cache: the pool that OUT and IN copies go to and come from.
        backend: a name, ``"auto"``, or what ``select_backend`` returned.

    Raises:
        ValueError: a block outside its pool, two copies to one block, a block that is copied from
            and
            to, a missing host pool, or pools of different specs. Nothing is copied then.
    """
    from pagetide_kvcache import CopyDirection

    pairs: dict[CopyDirection, list[tuple[int, int]]] = {
        CopyDirection.OUT: [],
        CopyDirection.IN: [],
        CopyDirection.WITHIN: [],
    }
    for copy in copies:
        pairs[copy.direction].append((copy.source, copy.destination))
    out, into, within = pairs.values()
    _require_disjoint(
        "kv_cache",
        kv_cache.num_blocks,
        [source for source, _ in (*out, *within)],
        [destination for _, destination in (*into, *within)],
    )
    if out or into:
        if host_cache is None:
            raise ValueError("copies go out to or come in from a host pool: pass host_cache")
        if host_cache.spec != kv_cache.spec:
            raise ValueError(f"host_cache holds {host_cache.spec}, kv_cache {kv_cache.spec}")
        _require_disjoint(
            "host_cache",
            host_cache.num_blocks,
            [source for source, _ in into],
            [destination for _, destination in out],
        )
    if isinstance(backend, str):
        spec = kv_cache.spec
        query_dtype = torch.float32 if spec.is_quantized else kv_cache.data.dtype
        shape = AttentionShape.of_cache(spec, num_heads=spec.num_kv_heads, query_dtype=query_dtype)
        backend = select_backend(backend, shape, kv_cache.data.device)
    if host_cache is not None and out:
        backend.copy_blocks(kv_cache, host_cache, out)
    if host_cache is not None and into:
        backend.copy_blocks(host_cache, kv_cache, into)
    if within:
        backend.copy_blocks(kv_cache, kv_cache, within)


def _shape_of(
    x: Tensor,
    name: str,
    k_cache: Tensor,
    v_cache: Tensor,
    k_scales: Tensor | None,
    v_scales: Tensor | None,
    metadata: AttentionMetadata,
) -> AttentionShape:
    """The shape that queries (or keys) ``x`` and a layer's cache have together, if they agree."""
    device = metadata.device
    require_tensor("k_cache", k_cache, (None, None, metadata.block_size, None), None, device)
    require_tensor("v_cache", v_cache, k_cache.shape, k_cache.dtype, device)
    num_blocks, num_kv_heads, block_size, head_dim = k_cache.shape
    require_tensor(name, x, (metadata.num_tokens, None, head_dim), None, device)
    for each, tensor in ((name, x), ("k_cache", k_cache), ("v_cache", v_cache)):
        require_unit_stride(each, tensor)
    kv_dtype = _KV_DTYPES.get(k_cache.dtype)
    if kv_dtype is None:
        raise UnsupportedError(
            f"k_cache has dtype {k_cache.dtype}: use one of {', '.join(map(str, _KV_DTYPES))}"
        )
    scale_tensors = (("k_scales", k_scales), ("v_scales", v_scales))
    if kv_dtype != "int8":
        for each, scales in scale_tensors:
            if scales is not None:
                raise ValueError(f"{each} is given, but the cache is {kv_dtype}: leave it out")
    elif k_scales is None or v_scales is None:
        missing = "k_scales" if k_scales is None else "v_scales"
        raise ValueError(f"{missing} is None, but the cache is int8: pass the layer's scales")
    else:
        scale_shape = (num_blocks, num_kv_heads, block_size)
        require_tensor("k_scales", k_scales, scale_shape, torch.float32, device)
        require_tensor("v_scales", v_scales, scale_shape, torch.float32, device)
        if (k_scales.stride(-1) == 0) != (v_scales.stride(-1) == 0):
            raise ValueError("k_scales and v_scales differ in kind: a scale a token, or a block")
        if k_scales.stride(-1) == 0:
            kv_dtype = "int8-block"
        for each, scales in (("k_scales", k_scales), ("v_scales", v_scales)):
            require_no_overlap(each, scales[..., 0] if kv_dtype == "int8-block" else scales)
    return AttentionShape(
        num_heads=x.shape[1],
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        query_dtype=x.dtype,
        kv_dtype=kv_dtype,
    )


def _resolve(
    backend: str | AttentionBackend, shape: AttentionShape, device: torch.device
) -> AttentionBackend:
    if isinstance(backend, str):
        return select_backend(backend, shape, device)
    return require_supported(backend, shape, device)


def _require_disjoint(
    name: str, num_blocks: int, sources: Iterable[int], destinations: Sequence[int]
) -> None:
    """Raise ValueError unless the copies of one pool may run in any order."""
    unique = set(destinations)
    if len(unique) != len(destinations):
        raise ValueError(f"two copies write the same block of {name}: a plan writes a block once")
    if both := unique.intersection(sources):
        raise ValueError(f"blocks {sorted(both)} of {name} are copied from and to in one plan")
    for block_id in (*sources, *destinations):
        if not 0 <= block_id < num_blocks:
            raise ValueError(f"block {block_id} lies outside {name}, which has {num_blocks} blocks")
