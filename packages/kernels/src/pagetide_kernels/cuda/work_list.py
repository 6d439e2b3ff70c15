"""One step's work, cut on the device; the host sizes the buffers by the step's bounds."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pagetide_kernels.cuda.library import load
from pagetide_kernels.cuda.tuning import Tuning
from pagetide_kernels.metadata import AttentionMetadata, AttentionShape

__all__ = ["WorkList", "make_work_list"]

_DECODE_ITEM_WORDS, _ITEM_WORDS = 32, 16  # of DecodeItem and WorkItem in params.h
_CLUSTER_SIZES = (8, 4, 2)
# Longer sequences want more thread blocks than a cluster has, or an evener share for each.
_CLUSTER_KEYS = {8: 8192, 4: 8192, 2: 1024}


@dataclass(frozen=True, slots=True)
class WorkList:
    """One step's items, and the memory through which the thread blocks of one sequence meet.

    Attributes:
        tuning: which kernels serve the step.
        decode_items: int32 [capacity, 32], see ``DecodeItem`` in ``params.h``.
        prefill_items: int32 [capacity, 16].
        states: float32 [states, kv heads x row tiles, rows, head_dim], sums of values of a leaf.
        sums: float32 [states, kv heads x row tiles, 2, rows], their maxima and sums.
        arrivals: int32 [S, kv heads x row tiles], blocks of a sequence that have finished; zeros
            between launches.
        num_runs: decode thread blocks of a KV head's row tile.
        cluster_size: thread blocks of a sequence that meet in shared memory; 1: in ``states``.
        cluster_leaves: most leaves of a sequence, for which these need memory.
    """

    tuning: Tuning
    decode_items: Tensor
    prefill_items: Tensor
    states: Tensor
    sums: Tensor
    arrivals: Tensor
    num_runs: int
    cluster_size: int
    cluster_leaves: int


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _cluster_size(num_blocks: int, leaves: int, max_seq_len: int, most_blocks: int) -> int:
    """How many thread blocks each of ``num_blocks`` may become, all running at once; 1: no more."""
    for size in _CLUSTER_SIZES:
        has_work = max_seq_len <= _CLUSTER_KEYS[size] and size < 2 * leaves
        if has_work and num_blocks * size <= most_blocks:
            return size
    return 1


def _num_runs(
    num_seqs: int, leaves: int, heads: int, num_rows: int, multiprocessors: int, tuning: Tuning
) -> int:
    """Thread blocks of a KV head's row tile: what gives a multiprocessor the least to do."""
    total = num_seqs * leaves

    def runs_of(blocks: int) -> int:
        return max(1, multiprocessors * blocks // heads)

    def cost(blocks: int) -> tuple[int, bool, int]:
        share = _ceil_div(total, runs_of(blocks))
        return blocks * share, share < leaves, -blocks  # in leaves; is a sequence split?

    # A whole sequence each, and hardly a multiprocessor without: no two blocks need to meet. The
    # device keeps to one sequence a block where that is an even share and a sixteenth at most.
    alone = runs_of(1)
    if num_rows <= tuning.most_rows_alone and num_seqs <= alone <= num_seqs * 17 // 16:
        return min(total, alone)
    blocks = min(range(tuning.least_blocks_an_sm, tuning.blocks_an_sm + 1), key=cost)
    return min(total, runs_of(blocks))


def make_work_list(
    metadata: AttentionMetadata,
    shape: AttentionShape,
    tuning: Tuning,
    multiprocessors: int,
    *,
    has_clusters: bool,
) -> WorkList:
    """Launches the kernel that cuts the step into items.

    Args:
        metadata: the step.
        shape: the model's shape.
        tuning: the shape's.
        multiprocessors: of the card.
        has_clusters: whether thread blocks can meet in shared memory.
    """
    bounds, device = metadata.bounds, metadata.device
    num_seqs = metadata.num_seqs
    leaves = tuning.most_leaves(bounds.max_seq_len)
    heads = shape.num_kv_heads * tuning.row_tiles
    row_tiles = 0
    if bounds.max_query_len * shape.group_size > tuning.decode_rows:
        row_tiles = bounds.num_tokens * shape.group_size // tuning.prefill_rows + num_seqs
    has_prefill = tuning.prefill_head_dim > 0
    cluster_size = 1
    if has_clusters and leaves <= tuning.cluster_leaves and (has_prefill or not row_tiles):
        blocks_an_sm = tuning.pair_blocks_an_sm if leaves == 2 else tuning.cluster_blocks_an_sm
        most_blocks = multiprocessors * blocks_an_sm
        cluster_size = _cluster_size(num_seqs * heads, leaves, bounds.max_seq_len, most_blocks)
    # Every thread block has an even share of the keys. Only sequences on two shares leave states,
    # so no more than there are shares; in clusters none do.
    state_rows = min(tuning.tile_rows, max(1, bounds.max_query_len) * shape.group_size)
    num_runs = _num_runs(num_seqs, leaves, heads, state_rows, multiprocessors, tuning)
    num_states = min(num_seqs, num_runs) * leaves
    if cluster_size > 1:
        num_runs, num_states = num_seqs * cluster_size, 0
    decode_capacity = num_runs + num_seqs + 1 + (0 if has_prefill else row_tiles)
    prefill_capacity = row_tiles if has_prefill else 0
    work = WorkList(
        tuning=tuning,
        decode_items=torch.empty(
            decode_capacity, _DECODE_ITEM_WORDS, dtype=torch.int32, device=device
        ),
        prefill_items=torch.empty(prefill_capacity, _ITEM_WORDS, dtype=torch.int32, device=device),
        states=torch.empty(num_states, heads, state_rows, tuning.decode_head_dim, device=device),
        sums=torch.empty(num_states, heads, 2, state_rows, device=device),
        arrivals=torch.empty(num_seqs, heads, dtype=torch.int32, device=device),
        num_runs=num_runs,
        cluster_size=cluster_size,
        cluster_leaves=leaves,
    )
    load().work_list(
        work.decode_items, work.prefill_items, work.arrivals, metadata.query_start_loc,
        metadata.seq_lens, metadata.rows, metadata.block_tables, shape.block_size,
        shape.group_size, num_runs, cluster_size, tuning.decode_rows, tuning.prefill_rows,
        has_prefill, tuning.min_leaf_keys, tuning.long_leaf_keys, tuning.few_leaves,
        tuning.max_leaves,
    )  # fmt: skip
    return work
