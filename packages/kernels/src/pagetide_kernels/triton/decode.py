"""Few query tokens, many keys: a sequence's keys are a fixed row of leaves, whoever walks them.

The leaves. A sequence's keys are cut into leaves of equal length, at most `LEAVES` of them and each
at least `MIN_LEAF_TILES` tiles long; each is an online softmax of its own, and the leaves merge in
order. The cut depends on the sequence's length and the model's shape alone: that is exactness
level 1.

The walk. An item is a run of one sequence's leaves for one KV head. How long the runs are is
decided once a step by the work list, from what the whole batch has to do: a small batch is cut fine
to fill the card, a large one coarse to save memory traffic. A program whose item is the whole
sequence merges its leaves in registers and writes the output. Otherwise each leaf's state is left
in memory, and the last program to arrive merges them in the same order: no second launch, the same
bits.

The rows of a tile are the query heads that share the KV head, times the sequence's query tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagetide_kernels.triton.softmax_state import accumulate, merge, new_state
from pagetide_kernels.triton.tiles import narrow

__all__ = ["ITEM_FIELDS", "decode_kernel"]

# An item: sequence (-1: none), first leaf, leaves a run, items of its sequence, first state of its
# sequence, keys, first query token, query tokens.
ITEM_FIELDS = tl.constexpr(8)
# States that the merge loads at once: enough to hide most of a trip to L2.
_MERGED_AT_ONCE = tl.constexpr(4)


@triton.jit
def tiles_a_leaf(num_tiles, LEAVES: tl.constexpr, MIN_LEAF_TILES: tl.constexpr):
    """Tiles in each leaf of a sequence of `num_tiles`: a power of two times `MIN_LEAF_TILES`."""
    length = tl.full(num_tiles.shape, MIN_LEAF_TILES, tl.int32)
    for _ in tl.static_range(24):  # up to 2^24 tiles a leaf
        length = tl.where(length * LEAVES < num_tiles, length * 2, length)
    return length


@triton.jit
def _store_state(
    states, sums, index, m, l, acc, is_row, DIM: tl.constexpr, STATE_ROWS: tl.constexpr
):
    """Leaves a state for the merge, past L1 so that another program reads it.

    `states` is float32 [states, STATE_ROWS, DIM], `sums` float32 [states, 2, STATE_ROWS].
    """
    row = tl.arange(0, acc.shape[0])
    sum_at = sums + index.to(tl.int64) * (2 * STATE_ROWS) + row
    tl.store(sum_at, m, mask=is_row, cache_modifier=".cg")
    tl.store(sum_at + STATE_ROWS, l, mask=is_row, cache_modifier=".cg")
    at = states + index.to(tl.int64) * (STATE_ROWS * DIM) + row * DIM
    tl.store(
        at[:, None] + tl.arange(0, DIM)[None, :], acc, mask=is_row[:, None], cache_modifier=".cg"
    )


@triton.jit
def _load_state(
    states, sums, index, is_there, num_rows,
    ROWS: tl.constexpr, DIM: tl.constexpr, STATE_ROWS: tl.constexpr,
):  # fmt: skip
    """A state left by a program of this launch; the state over no keys where there is none."""
    row = tl.arange(0, ROWS)
    here = (row < num_rows) & is_there
    sum_at = sums + index.to(tl.int64) * (2 * STATE_ROWS) + row
    m = tl.load(sum_at, mask=here, other=float("-inf"), cache_modifier=".cg")
    l = tl.load(sum_at + STATE_ROWS, mask=here, other=0.0, cache_modifier=".cg")
    at = states + index.to(tl.int64) * (STATE_ROWS * DIM) + row * DIM
    acc = tl.load(
        at[:, None] + tl.arange(0, DIM)[None, :],
        mask=here[:, None],
        other=0.0,
        cache_modifier=".cg",
    )
    return m, l, acc


@triton.jit
def _zero_padding(
    out, first, num_tokens, kv_head, token_stride, head_stride,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, ROWS: tl.constexpr, DIM: tl.constexpr,
):  # fmt: skip
    """Zeros for the tokens that belong to no sequence, shared out among the items' programs."""
    head = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    for token in range(first + tl.program_id(1), num_tokens, tl.num_programs(1)):
        token_at = out + tl.cast(token, tl.int64) * token_stride
        at = token_at + (kv_head * GROUP_SIZE + head) * head_stride
        tl.store(
            at[:, None] + dims[None, :],
            tl.zeros([ROWS, DIM], tl.float32).to(out.dtype.element_ty),
            mask=(head < GROUP_SIZE)[:, None] & (dims[None, :] < HEAD_DIM),
        )


@triton.jit
def _write_output(
    out, m, l, acc, first_token, query_len, kv_head, token_stride, head_stride,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Rows to tokens and heads; a row that saw no key gives zeros."""
    row = tl.arange(0, acc.shape[0])
    dims = tl.arange(0, acc.shape[1])
    token = (first_token + row // GROUP_SIZE).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    result = acc / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(
        out + (token * token_stride + head * head_stride)[:, None] + dims[None, :],
        narrow(result, out.dtype.element_ty),
        mask=(row < query_len * GROUP_SIZE)[:, None] & (dims[None, :] < HEAD_DIM),
    )


@triton.jit(do_not_specialize=["num_seqs", "num_tokens", "window", "table_stride"])
def decode_kernel(
    out, q, k_cache, v_cache, k_scales, v_scales,
    items, query_start_loc, block_tables, rows, states, sums, arrivals,
    num_seqs, num_tokens, scale, soft_cap, window,
    out_token_stride, out_head_stride, q_token_stride, q_head_stride,
    k_block_stride, k_head_stride, k_slot_stride,
    v_block_stride, v_head_stride, v_slot_stride,
    scale_block_stride, scale_head_stride, scale_slot_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr, LEAVES: tl.constexpr,
    MIN_LEAF_TILES: tl.constexpr, ROWS: tl.constexpr, STATE_ROWS: tl.constexpr,
    MERGE_ROWS: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
    IS_QUANTIZED: tl.constexpr, SAME_STRIDES: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """One item of the work list for one KV head; grid (num_kv_heads, items)."""
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * ITEM_FIELDS
    sequence = tl.load(item)
    first_leaf = tl.load(item + 1)
    leaves_a_run = tl.load(item + 2)
    num_items = tl.load(item + 3)
    first_state = tl.load(item + 4)
    seq_len = tl.load(item + 5)
    first_token = tl.load(item + 6)
    query_len = tl.load(item + 7)
    _zero_padding(
        out, tl.load(query_start_loc + num_seqs), num_tokens, kv_head,
        out_token_stride, out_head_stride, GROUP_SIZE, HEAD_DIM, ROWS, DIM,
    )  # fmt: skip
    if sequence < 0:
        return

    # Rows: query token j, head h of the group, at row j * GROUP_SIZE + h.
    row = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    is_row = row < query_len * GROUP_SIZE
    token = (first_token + row // GROUP_SIZE).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    positions = seq_len - query_len + row // GROUP_SIZE
    q_tile = tl.load(
        q + (token * q_token_stride + head * q_head_stride)[:, None] + dims[None, :],
        mask=is_row[:, None] & (dims[None, :] < HEAD_DIM),
        other=0.0,
    )
    table = block_tables + tl.load(rows + sequence).to(tl.int64) * table_stride
    k_head = k_cache + kv_head.to(tl.int64) * k_head_stride
    v_head = v_cache + kv_head.to(tl.int64) * v_head_stride
    k_scale_head = k_scales + kv_head.to(tl.int64) * scale_head_stride
    v_scale_head = v_scales + kv_head.to(tl.int64) * scale_head_stride
    num_tiles = tl.cdiv(seq_len, TILE)
    leaf_tiles = tiles_a_leaf(num_tiles, LEAVES, MIN_LEAF_TILES)
    num_leaves = tl.cdiv(num_tiles, leaf_tiles)
    is_whole = num_items == 1
    state = first_state * NUM_KV_HEADS + kv_head  # of the sequence's first leaf

    total_m, total_l, total_acc = new_state(ROWS, DIM)
    for leaf in range(first_leaf, tl.minimum(first_leaf + leaves_a_run, num_leaves)):
        m, l, acc = new_state(ROWS, DIM)
        first_tile = leaf * leaf_tiles
        end_tile = tl.minimum(first_tile + leaf_tiles, num_tiles)
        masked_from = tl.maximum(
            tl.minimum(end_tile, (seq_len - query_len + 1) // TILE), first_tile
        )
        if HAS_WINDOW:
            masked_from = first_tile
        for tile in tl.range(first_tile, masked_from, num_stages=STAGES):
            m, l, acc = accumulate(
                m, l, acc, q_tile, k_head, v_head, k_scale_head, v_scale_head, table, tile,
                positions, seq_len, scale, soft_cap, window, k_block_stride, k_slot_stride,
                v_block_stride, v_slot_stride, scale_block_stride, scale_slot_stride,
                HEAD_DIM, DIM, BLOCK_SIZE, TILE, DTYPE, IS_QUANTIZED, SAME_STRIDES, HAS_WINDOW,
                HAS_SOFT_CAP, False,
            )  # fmt: skip
        for tile in tl.range(masked_from, end_tile):
            m, l, acc = accumulate(
                m, l, acc, q_tile, k_head, v_head, k_scale_head, v_scale_head, table, tile,
                positions, seq_len, scale, soft_cap, window, k_block_stride, k_slot_stride,
                v_block_stride, v_slot_stride, scale_block_stride, scale_slot_stride,
                HEAD_DIM, DIM, BLOCK_SIZE, TILE, DTYPE, IS_QUANTIZED, SAME_STRIDES, HAS_WINDOW,
                HAS_SOFT_CAP, True,
            )  # fmt: skip
        if is_whole:
            total_m, total_l, total_acc = merge(total_m, total_l, total_acc, m, l, acc)
        else:
            _store_state(
                states, sums, state + leaf * NUM_KV_HEADS, m, l, acc, is_row, DIM, STATE_ROWS
            )
    if is_whole:
        _write_output(
            out, total_m, total_l, total_acc, first_token, query_len, kv_head,
            out_token_stride, out_head_stride, GROUP_SIZE, HEAD_DIM,
        )  # fmt: skip
        return

    # Every warp's states must be written before one thread announces them.
    tl.debug_barrier()
    arrival = arrivals + sequence * NUM_KV_HEADS + kv_head
    if tl.atomic_add(arrival, 1, sem="acq_rel") < num_items - 1:
        return
    tl.store(arrival, 0)  # the next layer counts from zero
    all_m, all_l, all_acc = new_state(MERGE_ROWS, DIM)
    for base in tl.range(0, num_leaves, _MERGED_AT_ONCE):
        loaded = ()
        for i in tl.static_range(_MERGED_AT_ONCE):
            loaded = loaded + (  # type: ignore[assignment]  # noqa: RUF005 (no unpacking in Triton)
                _load_state(
                    states, sums, state + (base + i) * NUM_KV_HEADS, base + i < num_leaves,
                    query_len * GROUP_SIZE, MERGE_ROWS, DIM, STATE_ROWS,
                ),
            )  # fmt: skip
        for i in tl.static_range(_MERGED_AT_ONCE):
            all_m, all_l, all_acc = merge(
                all_m, all_l, all_acc, loaded[i][0], loaded[i][1], loaded[i][2]
            )
    _write_output(
        out, all_m, all_l, all_acc, first_token, query_len, kv_head,
        out_token_stride, out_head_stride, GROUP_SIZE, HEAD_DIM,
    )  # fmt: skip
