"""Writing a step's tokens to the cache."""

from __future__ import annotations

import torch
from torch import Tensor

from pagetide_kernels.cpu.work_list import WorkList
from pagetide_kernels.reference import INT8_MAX, quantize

__all__ = ["store_in_blocks", "store_rows"]


def store_rows(x: Tensor, cache: Tensor, work: WorkList) -> None:
    """Write each token's heads to their slots as they are.

    Args:
        x: [tokens, num_kv_heads, head_dim], any floating point dtype.
        cache: [N, num_kv_heads, block_size, head_dim], any floating point dtype, changed.
        work: where to.
    """
    x = x.to(cache.dtype)
    _, num_kv_heads, block_size, head_dim = cache.shape
    block_stride, head_stride, slot_stride, _ = cache.stride()
    if (block_stride, head_stride) == (num_kv_heads * head_stride, block_size * slot_stride):
        # As rows of one table: cheaper than indexing by block and offset.
        cache.flatten(0, 2).index_copy_(0, work.slot_rows, x.reshape(-1, head_dim))
    else:
        cache[work.slot_block_ids, :, work.slot_offsets] = x


def store_in_blocks(
    x: Tensor, cache: Tensor, scales: Tensor, block_ids: Tensor, offsets: Tensor
) -> None:
    """The reference's rule for a scale a block and head, for all blocks of a step at once.

    Args:
        x: float32 [tokens, num_kv_heads, head_dim].
        cache: int8 [N, num_kv_heads, block_size, head_dim], changed.
        scales: float32 [N, num_kv_heads], changed.
        block_ids: int64 [tokens].
        offsets: int64 [tokens].
    """
    block_size = cache.shape[2]
    touched, where = torch.unique(block_ids, return_inverse=True)
    num_held = torch.full_like(touched, block_size).scatter_reduce_(0, where, offsets, "amin")
    token_amax = x.abs().amax(dim=-1)
    amax = torch.zeros(len(touched), x.shape[1]).scatter_reduce_(
        0, where.unsqueeze(1).expand_as(token_amax), token_amax, "amax"
    )
    old_scales = scales[touched].masked_fill((num_held == 0).unsqueeze(1), 0.0)
    new_scales = torch.maximum(amax / INT8_MAX, old_scales)

    blocks = cache[touched]
    held = blocks.float() * old_scales[:, :, None, None]
    requantized = quantize(held, new_scales.unsqueeze(-1).expand(-1, -1, block_size))
    is_held = torch.arange(block_size) < num_held.unsqueeze(1)
    cache[touched] = torch.where(is_held[:, None, :, None], requantized, blocks)
    cache[block_ids, :, offsets] = quantize(x, new_scales[where])
    scales[touched] = new_scales
