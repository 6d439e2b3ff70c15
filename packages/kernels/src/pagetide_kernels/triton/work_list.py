"""What the step's programs do, made on the device from its lengths alone.

The host knows bounds; only the device knows the lengths, when a captured graph is replayed. So a
small kernel, inside the graph, cuts the step into items, and the attention kernels run a fixed grid
over them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagetide_kernels.metadata import AttentionMetadata, AttentionShape
from pagetide_kernels.triton import decode, prefill
from pagetide_kernels.triton.tuning import Tuning

__all__ = ["WorkList", "make_work_list"]

_CHUNK = 64  # items that one program writes

_DECODE_FIELDS = decode.ITEM_FIELDS
_PREFILL_FIELDS = prefill.ITEM_FIELDS


@dataclass(frozen=True, slots=True)
class WorkList:
    """One step's items, and the memory through which the programs of one sequence meet.

    Attributes:
        decode_items: int32 [capacity, 12], see `decode.py`.
        prefill_items: int32 [capacity, 6], see `prefill.py`.
        states: float32 [states, num_kv_heads, rows, dim], partial sums of values.
        sums: float32 [states, num_kv_heads, 2, rows], their maxima and sums.
        arrivals: int32 [S, num_kv_heads], programs of a sequence that have finished; zeros between
            launches.
        state_rows: rows of a state.
    """

    decode_items: Tensor
    prefill_items: Tensor
    states: Tensor
    sums: Tensor
    arrivals: Tensor
    state_rows: int


@triton.jit
def _item_sequence(ends, item):
    """The place in order of each item's sequence: so many end at or before it. int32 [CHUNK]."""
    return tl.sum((ends[None, :] <= item[:, None]).to(tl.int32), axis=1)


@triton.jit
def _at(values, index):
    """`values[index]` for values held across the program's threads. int32 [CHUNK]."""
    numbers = tl.arange(0, values.shape[0])
    return tl.sum(tl.where(numbers[None, :] == index[:, None], values[None, :], 0), axis=1)


# Of the model's shape nothing is compiled in: one kernel serves all of them.
@triton.jit(
    do_not_specialize=[
        "num_seqs", "decode_capacity", "prefill_capacity", "target_programs", "num_kv_heads",
        "group_size", "decode_rows", "tile", "leaf_growth", "min_leaf_tiles", "prefill_tokens",
        "group",
    ]
)  # fmt: skip
def _work_list_kernel(
    decode_items, prefill_items, query_start_loc, seq_lens, rows,
    num_seqs, decode_capacity, prefill_capacity, target_programs,
    num_kv_heads, group_size, decode_rows, tile, leaf_growth, min_leaf_tiles, prefill_tokens,
    group,
    SEQS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    # Longest sequences first: what runs last should be short, so that no program is left alone.
    place = tl.arange(0, SEQS)
    seq_len = tl.load(seq_lens + place, mask=place < num_seqs, other=0)
    order = tl.sort(seq_len.to(tl.int64) * SEQS + place, descending=True)
    sequence = (order % SEQS).to(tl.int32)
    is_there = sequence < num_seqs
    start = tl.load(query_start_loc + sequence, mask=is_there, other=0)
    query_len = tl.load(query_start_loc + sequence + 1, mask=is_there, other=0) - start
    seq_len = tl.load(seq_lens + sequence, mask=is_there, other=0)
    # A sequence's path is its own: its query tokens fit the rows of one decode tile, or not.
    decodes = (query_len > 0) & (query_len * group_size <= decode_rows)

    # A run is as many leaves as it takes to give every program about the same number of tiles.
    num_tiles = tl.where(decodes, tl.cdiv(seq_len, tile), 0)
    leaf_tiles = decode.tiles_a_leaf(num_tiles, tile, leaf_growth, min_leaf_tiles)
    num_leaves = tl.cdiv(num_tiles, leaf_tiles)
    tiles_a_program = tl.cdiv(tl.sum(num_tiles, axis=0) * num_kv_heads, target_programs)
    run = tl.maximum(tl.cdiv(tiles_a_program, leaf_tiles), 1)
    is_grouped = run >= group
    run = tl.where(is_grouped, tl.cdiv(run, group) * group, run)
    # A token that sees no key has nothing to walk, but its zeros must be written.
    num_items = tl.where(decodes, tl.maximum(tl.cdiv(num_leaves, run), 1), 0)
    num_states = tl.where(num_leaves > 1, num_leaves, 0)
    item_ends = tl.cumsum(num_items, axis=0)
    state_ends = tl.cumsum(num_states, axis=0)

    item = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    owner = _item_sequence(item_ends, item)
    is_item = owner < SEQS
    owner_items = _at(num_items, owner)
    index = item - (_at(item_ends, owner) - owner_items)
    at = decode_items + item * _DECODE_FIELDS
    fits = item < decode_capacity
    tl.store(at, tl.where(is_item, _at(sequence, owner), -1), mask=fits)
    owner_run = _at(run, owner)
    owner_leaf_tiles = _at(leaf_tiles, owner)
    end_tile = tl.minimum((index + 1) * owner_run * owner_leaf_tiles, _at(num_tiles, owner))
    tl.store(at + 1, index * owner_run, mask=fits)
    tl.store(at + 2, end_tile, mask=fits)
    tl.store(at + 3, owner_leaf_tiles, mask=fits)
    tl.store(at + 4, owner_items, mask=fits)
    tl.store(at + 5, _at(state_ends - num_states, owner), mask=fits)
    tl.store(at + 6, _at(seq_len, owner), mask=fits)
    tl.store(at + 7, _at(start, owner), mask=fits)
    tl.store(at + 8, _at(query_len, owner), mask=fits)
    row = tl.load(rows + sequence, mask=is_there, other=0)
    tl.store(at + 9, _at(row, owner), mask=fits)
    end_token = tl.load(query_start_loc + num_seqs)
    tl.store(at + 10, tl.zeros_like(item) + end_token, mask=fits)
    tl.store(at + 11, _at(is_grouped.to(tl.int32), owner), mask=fits)

    if prefill_capacity > 0:
        num_items = tl.where(decodes, 0, tl.cdiv(query_len, prefill_tokens))
        item_ends = tl.cumsum(num_items, axis=0)
        owner = _item_sequence(item_ends, item)
        index = item - _at(item_ends - num_items, owner)
        at = prefill_items + item * _PREFILL_FIELDS
        fits = item < prefill_capacity
        tl.store(at, tl.where(owner < SEQS, _at(sequence, owner), -1), mask=fits)
        tl.store(at + 1, index * prefill_tokens, mask=fits)
        tl.store(at + 2, _at(seq_len, owner), mask=fits)
        tl.store(at + 3, _at(start, owner), mask=fits)
        tl.store(at + 4, _at(query_len, owner), mask=fits)
        tl.store(at + 5, _at(row, owner), mask=fits)


def make_work_list(
    metadata: AttentionMetadata, shape: AttentionShape, tuning: Tuning, target_programs: int
) -> WorkList:
    """Launches the kernel that cuts the step into items; sizes everything by the step's bounds.

    Args:
        metadata: the step.
        shape: the model's shape.
        tuning: tile sizes; part of the arithmetic, so a function of the shape alone.
        target_programs: programs that fill the card; decides only who computes what.
    """
    bounds, device = metadata.bounds, metadata.device
    num_seqs, kv_heads = metadata.num_seqs, shape.num_kv_heads
    leaves_a_seq = tuning.most_leaves(bounds.max_seq_len)
    # A program takes its even share of tiles, rounded up to whole leaves: no more items than
    # shares, and one more a sequence for what is left over.
    decode_capacity = min(num_seqs * leaves_a_seq, target_programs // kv_heads + num_seqs + 1)
    prefills = bounds.max_query_len * shape.group_size > tuning.decode_rows
    prefill_tokens = tuning.prefill_rows // shape.group_size
    prefill_capacity = bounds.num_tokens // prefill_tokens + num_seqs if prefills else 0
    num_states = num_seqs * leaves_a_seq
    state_rows = min(tuning.decode_rows, max(1, bounds.max_query_len) * shape.group_size)
    dim = tuning.dim
    work_list = WorkList(
        decode_items=torch.empty(decode_capacity, 12, dtype=torch.int32, device=device),
        prefill_items=torch.empty(prefill_capacity, 6, dtype=torch.int32, device=device),
        states=torch.empty(num_states, kv_heads, state_rows, dim, device=device),
        sums=torch.empty(num_states, kv_heads, 2, state_rows, device=device),
        arrivals=torch.zeros(num_seqs, kv_heads, dtype=torch.int32, device=device),
        state_rows=state_rows,
    )
    if num_seqs:
        _work_list_kernel[(triton.cdiv(max(decode_capacity, prefill_capacity), _CHUNK),)](
            work_list.decode_items,
            work_list.prefill_items,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.rows,
            num_seqs,
            decode_capacity,
            prefill_capacity,
            target_programs,
            kv_heads,
            shape.group_size,
            tuning.decode_rows,
            tuning.tile,
            tuning.leaf_growth,
            tuning.min_leaf_tiles,
            prefill_tokens,
            tuning.group,
            SEQS=triton.next_power_of_2(num_seqs),
            CHUNK=_CHUNK,
            num_warps=8,
        )
    return work_list
