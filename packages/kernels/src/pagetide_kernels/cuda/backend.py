"""The back end: what it supports, and the calls into the library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagetide_kernels.backends import AttentionBackend
from pagetide_kernels.cuda import library
from pagetide_kernels.cuda.tuning import tuning_for
from pagetide_kernels.cuda.work_list import WorkList, make_work_list
from pagetide_kernels.metadata import AttentionMetadata, AttentionShape

if TYPE_CHECKING:
    from pagetide_kvcache import KVCache

__all__ = ["CudaBackend"]

_BLOCK_SIZES = (8, 16, 32, 64)


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def _architecture(device: torch.device) -> int | str:
    index = torch.cuda.current_device() if device.index is None else device.index
    return library.compiled_architecture(index)


class CudaBackend(AttentionBackend):
    """Compiled kernels for NVIDIA GPUs from compute capability 7.5."""

    name = "cuda"

    def unsupported_reason(self, shape: AttentionShape | None, device: torch.device) -> str | None:
        """Why it cannot serve the shape on the device, with what to use instead."""
        if device.type != "cuda":
            return f"its kernels run on NVIDIA GPUs, not on {device.type}; use 'cpu' there"
        if not torch.cuda.is_available():
            return "torch sees no usable NVIDIA GPU; use the 'cpu' back end"
        if reason := library.missing_reason():
            return reason
        architecture = _architecture(device)
        if isinstance(architecture, str):
            return f"{architecture}; use the 'triton' back end"
        return None if shape is None else self._shape_reason(shape, architecture)

    @staticmethod
    def _shape_reason(shape: AttentionShape, architecture: int) -> str | None:
        if architecture < 80 and shape.query_dtype == torch.bfloat16:
            return (
                "GPUs of compute capability 7.5 have no bfloat16 arithmetic; use float16 or "
                "float32 queries"
            )
        if not 32 <= shape.head_dim <= 256 or shape.head_dim % 8:
            return (
                f"head_dim={shape.head_dim} is not a multiple of 8 between 32 and 256; "
                "use the 'reference' back end"
            )
        if shape.block_size not in _BLOCK_SIZES:
            return (
                f"block_size={shape.block_size} is not one of {_BLOCK_SIZES}; "
                "use one of those, or the 'reference' back end"
            )
        return None

    def is_fastest(self, shape: AttentionShape, device: torch.device) -> bool:
        """On Hopper, where it was measured, with half-precision queries and head_dim up to 128.

        Wider heads prefill without warpgroup products there, and Triton is ahead of that.
        """
        is_half = shape.query_dtype != torch.float32
        return is_half and shape.head_dim <= 128 and _architecture(device) == 90

    def prepare(self, metadata: AttentionMetadata, shape: AttentionShape) -> AttentionMetadata:
        """Cuts the step into items, on the device; all layers share them."""
        if not metadata.num_seqs:
            return metadata
        return metadata.with_work_list(self._make_work_list(metadata, shape))

    @staticmethod
    def _make_work_list(metadata: AttentionMetadata, shape: AttentionShape) -> WorkList:
        architecture = _architecture(metadata.device)
        tuning = tuning_for(shape, is_hopper=architecture == 90)
        multiprocessors = _multiprocessors(metadata.device)
        has_clusters = isinstance(architecture, int) and 90 <= architecture < 120
        return make_work_list(metadata, shape, tuning, multiprocessors, has_clusters=has_clusters)

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
        """One launch for decoding sequences, one more where the bounds allow prefilling ones."""
        if not metadata.num_seqs or not q.shape[0]:
            out.zero_()
            return
        work = metadata.work_list
        if not isinstance(work, WorkList):
            work = self._make_work_list(metadata, shape)
        tuning = work.tuning
        library.load().paged_attention(
            out, q, k_cache, v_cache, k_scales, v_scales, work.decode_items, work.prefill_items,
            metadata.query_start_loc, metadata.block_tables, work.states, work.sums, work.arrivals,
            scale, soft_cap or 0.0, window or 0, int(tuning.path), tuning.decode_head_dim,
            tuning.prefill_head_dim, tuning.prefill_rows, work.num_runs, tuning.row_tiles,
            work.cluster_size, work.cluster_leaves,
        )  # fmt: skip

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
        """A warp a token and head."""
        if k.shape[0] and metadata.num_seqs:
            library.load().store_kv(
                k, v, k_cache, v_cache, k_scales, v_scales, metadata.slot_mapping,
                metadata.query_start_loc, shape.kv_dtype == "int8-block",
            )  # fmt: skip

    def copy_blocks(
        self, source: KVCache, destination: KVCache, block_pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Within the device one launch; to and from the host the copy engine, in stream order.

        To and from pinned memory it returns at once; the host may read what went out when the
        stream has come so far.
        """
        pairs = torch.tensor(block_pairs, dtype=torch.int32)
        tensors = [(source.data, destination.data)]
        if source.scales is not None and destination.scales is not None:
            tensors.append((source.scales, destination.scales))
        for from_tensor, to_tensor in tensors:
            # [layers x 2, blocks, bytes of a block]: a block is contiguous in a layer's K or V.
            from_bytes, to_bytes = (
                each.flatten(0, 1).flatten(2).view(torch.uint8) for each in (from_tensor, to_tensor)
            )
            library.load().copy_blocks(from_bytes, to_bytes, pairs)
