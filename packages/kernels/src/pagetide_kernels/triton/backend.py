"""The back end: what it supports, and the launches."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagetide_kernels.backends import AttentionBackend
from pagetide_kernels.metadata import AttentionMetadata, AttentionShape
from pagetide_kernels.triton.cache_ops import (
    copy_blocks_kernel,
    store_block_scaled_kernel,
    store_kernel,
)
from pagetide_kernels.triton.decode import decode_kernel
from pagetide_kernels.triton.prefill import prefill_kernel
from pagetide_kernels.triton.tiles import INTERPRETING
from pagetide_kernels.triton.tuning import tuning_for
from pagetide_kernels.triton.work_list import WorkList, make_work_list

if TYPE_CHECKING:
    from pagetide_kvcache import KVCache

__all__ = ["TritonBackend"]

_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
_BLOCK_SIZES = (8, 16, 32, 64)
_COPY_WORDS = 1024  # int32 words that one program copies
_LEAST_SCALE = 1e-30  # of scores: so near 0 that all keys weigh the same, and -inf stays itself
_INTERPRETED_PROGRAMS = 12  # few, so that small cases in the interpreter are cut every way


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _capability(device: torch.device) -> tuple[int, int]:
    """The card's compute capability; the interpreter computes what an H200 would."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)


def _has_pairs(cache: Tensor) -> bool:
    """Whether an INT8 cache can be read two values at a time."""
    return not any(n % 2 for n in (cache.storage_offset(), *cache.stride()[:3]))


class TritonBackend(AttentionBackend):
    """Triton kernels for NVIDIA GPUs from compute capability 8.0."""

    name = "triton"

    def unsupported_reason(self, shape: AttentionShape | None, device: torch.device) -> str | None:
        """Why it cannot serve the shape on the device, with what to use instead."""
        if not INTERPRETING.value:
            if device.type != "cuda":
                return f"Triton kernels run on NVIDIA GPUs, not on {device.type}; use 'cpu' there"
            if not torch.cuda.is_available():
                return "torch sees no usable NVIDIA GPU; use the 'cpu' back end"
            major, minor = torch.cuda.get_device_capability(device)
            if major < 8:
                return (
                    f"Triton does not support compute capability {major}.{minor} (8.0 is the "
                    "least, bfloat16 included); use the 'cuda' back end, with float16"
                )
        if shape is None:
            return None
        if not 32 <= shape.head_dim <= 256 or shape.head_dim % 8:
            return (
                f"head_dim={shape.head_dim} is not a multiple of 8 between 32 and 256; "
                "use the 'reference' back end"
            )
        if shape.block_size not in _BLOCK_SIZES:
            return (
                f"block_size={shape.block_size} is not one of {_BLOCK_SIZES}; "
                "use the 'reference' back end"
            )
        if shape.group_size > 64:
            return (
                f"{shape.group_size} query heads share a KV head, and at most 64 may; "
                "use the 'reference' back end"
            )
        return None

    def prepare(self, metadata: AttentionMetadata, shape: AttentionShape) -> AttentionMetadata:
        """Cuts the step into items, on the device; all layers share them."""
        return metadata.with_work_list(self._work_list(metadata, shape))

    def _work_list(self, metadata: AttentionMetadata, shape: AttentionShape) -> WorkList:
        tuning = tuning_for(shape, _capability(metadata.device))
        programs = _INTERPRETED_PROGRAMS
        if metadata.device.type == "cuda":
            programs = _multiprocessors(metadata.device) * tuning.programs_an_sm
        return make_work_list(metadata, shape, tuning, programs)

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
        if not metadata.num_seqs:
            out.zero_()
            return
        work = metadata.work_list
        if not isinstance(work, WorkList):
            work = self._work_list(metadata, shape)
        tuning = tuning_for(shape, _capability(q.device))
        k_scales_, v_scales_ = (k_cache if s is None else s for s in (k_scales, v_scales))
        scale_strides = (0, 0, 0) if k_scales is None else k_scales.stride()
        is_paired = shape.is_quantized and all(map(_has_pairs, (k_cache, v_cache)))
        if is_paired:
            k_cache, v_cache = k_cache.view(torch.int16), v_cache.view(torch.int16)
        # The kernels compare scores before they scale them, and scale what is masked, too.
        if scale < 0.0:
            q, scale = -q, -scale
        scale = max(scale, _LEAST_SCALE)
        common = (
            scale, 1.0 if soft_cap is None else soft_cap, 0 if window is None else window,
            out.stride(0), out.stride(1), q.stride(0), q.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3], *scale_strides,
            metadata.block_tables.stride(0),
        )  # fmt: skip
        constants = {
            "GROUP_SIZE": shape.group_size,
            "HEAD_DIM": shape.head_dim,
            "DIM": tuning.dim,
            "BLOCK_SIZE": shape.block_size,
            "DTYPE": _DTYPES[shape.query_dtype],
            "IS_QUANTIZED": shape.is_quantized,
            "IS_PAIRED": is_paired,
            "SAME_STRIDES": k_cache.stride() == v_cache.stride(),
            "HAS_WINDOW": window is not None,
            "HAS_SOFT_CAP": soft_cap is not None,
        }
        overlaps = tuning.overlaps and q.is_cuda
        merge_rows = triton.next_power_of_2(work.state_rows)
        decode_kernel[(shape.num_kv_heads, work.decode_items.shape[0])](
            out, q, k_cache, v_cache, k_scales_, v_scales_,
            work.decode_items, metadata.block_tables, work.states, work.sums, work.arrivals,
            metadata.num_tokens,
            *common,
            NUM_KV_HEADS=shape.num_kv_heads, TILE=tuning.tile, ROWS=tuning.decode_rows,
            STATE_ROWS=work.state_rows, MERGE_ROWS=merge_rows,
            MERGED_AT_ONCE=tuning.merged_at_once(merge_rows), GROUP=tuning.group,
            STAGES=tuning.decode_stages, num_warps=tuning.decode_warps,
            maxnreg=tuning.decode_registers, OVERLAPS=overlaps,
            launch_pdl=overlaps, **constants,
        )  # fmt: skip
        if work.prefill_items.shape[0]:
            prefill_kernel[(shape.num_kv_heads, work.prefill_items.shape[0])](
                out, q, k_cache, v_cache, k_scales_, v_scales_,
                work.prefill_items, metadata.block_tables,
                *common,
                TILE=tuning.prefill_tile, ROWS=tuning.prefill_rows, STAGES=tuning.prefill_stages,
                num_warps=tuning.prefill_warps, **constants,
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
        """One program a token; for `int8-block` one a token and head."""
        if not k.shape[0] or not metadata.num_seqs:
            return
        k_scales_, v_scales_ = (k_cache if s is None else s for s in (k_scales, v_scales))
        scale_strides = (0, 0, 0) if k_scales is None else k_scales.stride()
        arguments = (
            k, v, k_cache, v_cache, k_scales_, v_scales_,
            metadata.slot_mapping, metadata.query_start_loc, metadata.num_seqs,
            k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            *k_cache.stride()[:3], *v_cache.stride()[:3],
        )  # fmt: skip
        dim = triton.next_power_of_2(shape.head_dim)
        if shape.kv_dtype == "int8-block":
            store_block_scaled_kernel[(k.shape[0], shape.num_kv_heads)](
                *arguments, *scale_strides[:2],
                HEAD_DIM=shape.head_dim, DIM=dim, BLOCK_SIZE=shape.block_size, num_warps=1,
            )  # fmt: skip
            return
        store_kernel[(k.shape[0],)](
            *arguments, *scale_strides,
            NUM_HEADS=shape.num_kv_heads, HEADS=triton.next_power_of_2(shape.num_kv_heads),
            HEAD_DIM=shape.head_dim, DIM=dim, BLOCK_SIZE=shape.block_size,
            IS_QUANTIZED=shape.is_quantized, num_warps=4,
        )  # fmt: skip

    def copy_blocks(
        self, source: KVCache, destination: KVCache, block_pairs: Sequence[tuple[int, int]]
    ) -> None:
        """Every copy and layer in one launch for the data and one for the scales."""
        if source.data.device != destination.data.device:
            super().copy_blocks(source, destination, block_pairs)
            return
        pairs = torch.tensor(block_pairs, dtype=torch.int64).to(source.data.device)
        tensors = [(source.data, destination.data)]
        if source.scales is not None and destination.scales is not None:
            tensors.append((source.scales, destination.scales))
        for from_tensor, to_tensor in tensors:
            from_words, to_words = (
                tensor.flatten(0, 1).flatten(2).view(torch.int32)
                for tensor in (from_tensor, to_tensor)
            )
            layers, _, block_words = from_words.shape
            grid = (len(block_pairs), layers, triton.cdiv(block_words, _COPY_WORDS))
            copy_blocks_kernel[grid](
                from_words, to_words, pairs, from_words.stride(0), to_words.stride(0),
                block_words, CHUNK=_COPY_WORDS,
            )  # fmt: skip
