"""One step's work, cut on the device; the host sizes the buffers by the step's bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagetide_kernels.cuda.library import load
from pagetide_kernels.cuda.tuning import Tuning
from pagetide_kernels.metadata import AttentionMetadata, AttentionShape

__all__ = ["WorkList", "make_work_list"]

_ITEM_WORDS = 12  # of WorkItem in params.h


@dataclass(frozen=True, slots=True)
class WorkList:
    """One step's items, and the memory through which the thread blocks of one sequence meet.

    Attributes:
        decode_items: int32 [capacity, 12], see ``WorkItem`` in ``params.h``.
        prefill_items: int32 [capacity, 12].
        states: float32 [states, num_kv_heads, rows, head_dim], sums of values left by a leaf.
        sums: float32 [states, num_kv_heads, 2, rows], their maxima and sums.
        arrivals: int32 [S, num_kv_heads], blocks of a sequence that have finished; zeros between
            launches.
    """

    decode_items: Tensor
    prefill_items: Tensor
    states: Tensor
    sums: Tensor
    arrivals: Tensor


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def make_work_list(
    metadata: AttentionMetadata, shape: AttentionShape, tuning: Tuning, target_blocks: int
) -> WorkList:
    """Launches the kernel that cuts the step into items.

    Args:
        metadata: the step.
        shape: the model's shape.
        tuning: the shape's.
        target_blocks: thread blocks that fill the card.
    """
    bounds, device, kv_heads = metadata.bounds, metadata.device, shape.num_kv_heads
    num_seqs = metadata.num_seqs
    leaves = tuning.most_leaves(bounds.max_seq_len)
    shares = target_blocks // kv_heads
    # A thread block takes its even share of keys, rounded up to whole leaves: no more items than
    # shares, and one more a sequence for what is left over. Only sequences longer than a share are
    # split, so no more of them than shares leave states.
    decode_capacity = min(num_seqs * leaves, shares + num_seqs)
    num_states = min(num_seqs, shares) * leaves
    prefills = bounds.max_query_len * shape.group_size > tuning.decode_rows
    row_tiles = 0
    if prefills:
        row_tile = tuning.prefill_rows or tuning.decode_rows
        row_tiles = bounds.num_tokens * shape.group_size // row_tile + num_seqs
    if not tuning.prefill_rows:
        decode_capacity, row_tiles = decode_capacity + row_tiles, 0
    state_rows = min(tuning.decode_rows, max(1, bounds.max_query_len) * shape.group_size)
    work = WorkList(
        decode_items=torch.empty(decode_capacity, _ITEM_WORDS, dtype=torch.int32, device=device),
        prefill_items=torch.empty(row_tiles, _ITEM_WORDS, dtype=torch.int32, device=device),
        states=torch.empty(num_states, kv_heads, state_rows, tuning.decode_head_dim, device=device),
        sums=torch.empty(num_states, kv_heads, 2, state_rows, device=device),
        arrivals=torch.empty(num_seqs, kv_heads, dtype=torch.int32, device=device),
    )
    load().work_list(
        work.decode_items, work.prefill_items, work.arrivals, metadata.query_start_loc,
        metadata.seq_lens, metadata.rows, shape.group_size, kv_heads, tuning.decode_rows,
        tuning.prefill_rows, tuning.min_leaf_keys, tuning.long_leaf_keys, tuning.few_leaves,
        tuning.max_leaves, target_blocks,
    )  # fmt: skip
    return work
