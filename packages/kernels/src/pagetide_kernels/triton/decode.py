"""Few query tokens, many keys: a sequence's keys are a fixed row of leaves, whoever walks them.

The leaves. A sequence's keys are cut into leaves of equal length, each an online softmax of its
own; they merge in order. The cut depends on the sequence's length and the model's shape alone: that
is exactness level 1.

The walk. An item is a run of one sequence's leaves for one KV head. How long the runs are is
decided once a step by the work list, from what the whole batch has to do: a small batch is cut fine
to fill the card, a large one coarse. One loop walks all tiles of a run; where a leaf ends, its
state is left in memory and the next begins afresh. The last program of a sequence to arrive merges
the states: no second launch, the same bits whoever left them.

The rows of a tile are the query heads that share the KV head, times the sequence's query tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from pagetide_kernels.triton.softmax_state import accumulate, add_state, merge, new_state
from pagetide_kernels.triton.tiles import narrow, query_parts, tile_blocks, whole

__all__ = ["ITEM_FIELDS", "decode_kernel"]

# An item: sequence (-1: none), first leaf, end of its tiles, tiles a leaf; of the sequence: items,
# first state, keys, first query token, query tokens, row of the block table; the step's tokens; and
# whether runs are whole groups of leaves.
ITEM_FIELDS = tl.constexpr(12)
# Leaves whose maxima are loaded at once.
_MAXIMA_AT_ONCE = tl.constexpr(32)


@triton.jit
def tiles_a_leaf(num_tiles, tile, leaf_growth, min_leaf_tiles):
    """Tiles in each leaf of a sequence of `num_tiles`: a power of two times `min_leaf_tiles`.

    The least whose square is `leaf_growth` times the sequence, both in keys.
    """
    length = tl.zeros_like(num_tiles) + min_leaf_tiles
    for _ in tl.static_range(12):  # up to 2^12 times the least
        length = tl.where(length * length * tile < leaf_growth * num_tiles, length * 2, length)
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
def _largest_maximum(
    sums, state, stride, count, num_rows, ROWS: tl.constexpr, STATE_ROWS: tl.constexpr
):
    """Each row's largest maximum in any of a sequence's states, float32 [ROWS]."""
    row = tl.arange(0, ROWS)
    number = tl.arange(0, _MAXIMA_AT_ONCE)
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for base in tl.range(0, count, _MAXIMA_AT_ONCE):
        index = (state + (base + number) * stride).to(tl.int64)
        m = tl.load(
            sums + (index * (2 * STATE_ROWS))[:, None] + row[None, :],
            mask=(base + number < count)[:, None] & (row < num_rows)[None, :],
            other=float("-inf"),
            cache_modifier=".cg",
        )
        largest = tl.maximum(largest, tl.max(m, axis=0))
    return largest


@triton.jit
def _load_states(
    states, sums, state, stride, base, count, num_rows, AT_ONCE: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, STATE_ROWS: tl.constexpr,
):  # fmt: skip
    """`AT_ONCE` states from number `base` on, all asked for before the first is waited for."""
    loaded = ()
    for i in tl.static_range(AT_ONCE):
        loaded = loaded + (  # type: ignore[assignment]  # noqa: RUF005 (no unpacking in Triton)
            _load_state(
                states, sums, state + (base + i) * stride, base + i < count, num_rows,
                ROWS, DIM, STATE_ROWS,
            ),
        )  # fmt: skip
    return loaded


@triton.jit
def _add_states(l, acc, largest, loaded, GROUP: tl.constexpr, DTYPE: tl.constexpr):
    """Adds loaded states in their order, group by group."""
    for first in tl.static_range(0, len(loaded), GROUP):
        group_m, group_l, group_acc = loaded[first]
        for i in tl.static_range(first + 1, first + GROUP):
            group_m, group_l, group_acc = merge(
                group_m, group_l, group_acc, loaded[i][0], loaded[i][1], loaded[i][2], DTYPE
            )
        l, acc = add_state(l, acc, largest, group_m, group_l, group_acc, DTYPE)
    return l, acc


@triton.jit
def _merged(
    states, sums, state, stride, count, num_rows, AT_ONCE: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, DIM: tl.constexpr, STATE_ROWS: tl.constexpr, DTYPE: tl.constexpr,
):  # fmt: skip
    """`l` and `acc` of all of a sequence's keys: `count` states, `stride` apart, by groups."""
    # The first states and all maxima are asked for together.
    loaded = _load_states(
        states, sums, state, stride, 0, count, num_rows, AT_ONCE, ROWS, DIM, STATE_ROWS
    )
    largest = _largest_maximum(sums, state, stride, count, num_rows, ROWS, STATE_ROWS)
    l, acc = _add_states(
        tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, DIM], tl.float32), largest, loaded,
        GROUP, DTYPE,
    )  # fmt: skip
    for base in tl.range(AT_ONCE, count, AT_ONCE):
        loaded = _load_states(
            states, sums, state, stride, base, count, num_rows, AT_ONCE, ROWS, DIM, STATE_ROWS
        )
        l, acc = _add_states(l, acc, largest, loaded, GROUP, DTYPE)
    return l, acc


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
    out, l, acc, first_token, query_len, kv_head, token_stride, head_stride,
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


@triton.jit(do_not_specialize=["num_tokens", "window", "table_stride"])
def decode_kernel(
    out, q, k_cache, v_cache, k_scales, v_scales,
    items, block_tables, states, sums, arrivals,
    num_tokens, scale, soft_cap, window,
    out_token_stride, out_head_stride, q_token_stride, q_head_stride,
    k_block_stride, k_head_stride, k_slot_stride,
    v_block_stride, v_head_stride, v_slot_stride,
    scale_block_stride, scale_head_stride, scale_slot_stride,
    table_stride,
    NUM_KV_HEADS: tl.constexpr, GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, STATE_ROWS: tl.constexpr, MERGE_ROWS: tl.constexpr,
    MERGED_AT_ONCE: tl.constexpr, GROUP: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr,
    IS_QUANTIZED: tl.constexpr, IS_PAIRED: tl.constexpr, SAME_STRIDES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, OVERLAPS: tl.constexpr,
):  # fmt: skip
    """One item of the work list for one KV head; grid (num_kv_heads, items)."""
    if OVERLAPS:
        # The launch before this one may still run, and the next may begin: nothing may be read or
        # written ahead of the wait.
        gdc_wait()
        gdc_launch_dependents()
    kv_head = tl.program_id(0)
    item = items + tl.program_id(1) * ITEM_FIELDS
    sequence = tl.load(item)
    first_leaf = tl.load(item + 1)
    end_tile = tl.load(item + 2)
    leaf_tiles = tl.load(item + 3)
    num_items = tl.load(item + 4)
    first_state = tl.load(item + 5)
    seq_len = tl.load(item + 6)
    first_token = tl.load(item + 7)
    query_len = tl.load(item + 8)
    table_row = tl.load(item + 9)
    end_token = tl.load(item + 10)
    is_grouped = tl.load(item + 11) > 0
    _zero_padding(
        out, end_token, num_tokens, kv_head, out_token_stride, out_head_stride,
        GROUP_SIZE, HEAD_DIM, ROWS, DIM,
    )  # fmt: skip
    if sequence < 0:
        return

    # The first blocks are asked for before the queries: both trips to memory in the time of one.
    table = block_tables + table_row.to(tl.int64) * table_stride
    blocks = tile_blocks(table, first_leaf * leaf_tiles, seq_len, TILE, BLOCK_SIZE)

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
    q_parts = query_parts(q_tile, DTYPE, IS_PAIRED)
    k_head = k_cache + kv_head.to(tl.int64) * k_head_stride
    v_head = v_cache + kv_head.to(tl.int64) * v_head_stride
    k_scale_head = k_scales + kv_head.to(tl.int64) * scale_head_stride
    v_scale_head = v_scales + kv_head.to(tl.int64) * scale_head_stride
    num_tiles = tl.cdiv(seq_len, TILE)
    is_one_leaf = num_tiles <= leaf_tiles
    state = first_state * NUM_KV_HEADS + kv_head  # of the sequence's first leaf

    # One loop over all tiles of the run, so that loads stay in flight from leaf to leaf.
    leaf_state = state + first_leaf * NUM_KV_HEADS
    leaves = first_leaf
    m, l, acc = new_state(ROWS, DIM, IS_PAIRED)
    if GROUP > 1:
        group_m, group_l, parts = new_state(ROWS, DIM, False)
        group_acc = parts[0]
    for tile in tl.range(first_leaf * leaf_tiles, end_tile, num_stages=STAGES):
        m, l, acc = accumulate(
            m, l, acc, q_parts, k_head, v_head, k_scale_head, v_scale_head, blocks, tile, True,
            positions, seq_len, scale, soft_cap, window, k_block_stride, k_slot_stride,
            v_block_stride, v_slot_stride, scale_block_stride, scale_slot_stride,
            HEAD_DIM, DIM, BLOCK_SIZE, TILE, DTYPE, IS_QUANTIZED, IS_PAIRED, SAME_STRIDES,
            HAS_WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip
        blocks = tile_blocks(table, tile + 1, seq_len, TILE, BLOCK_SIZE)
        ends_leaf = ((tile + 1) & (leaf_tiles - 1) == 0) | (tile + 1 == num_tiles)
        if ends_leaf & (not is_one_leaf):
            if GROUP > 1:
                # A run of whole groups leaves the states of groups, any other those of leaves: the
                # merge makes groups of them in the same way.
                group_m, group_l, group_acc = merge(
                    group_m, group_l, group_acc, m, l, whole(acc, IS_PAIRED), DTYPE
                )
                leaves += 1
                is_last = (leaves % GROUP == 0) | (tile + 1 == num_tiles)
                if is_last | (not is_grouped):
                    _store_state(
                        states, sums, leaf_state, group_m, group_l, group_acc, is_row, DIM,
                        STATE_ROWS,
                    )  # fmt: skip
                    leaf_state = state + leaves * NUM_KV_HEADS
                    group_m, group_l, group_parts = new_state(ROWS, DIM, False)
                    group_acc = group_parts[0]
            else:
                _store_state(
                    states, sums, leaf_state, m, l, whole(acc, IS_PAIRED), is_row, DIM, STATE_ROWS
                )
                leaf_state += NUM_KV_HEADS
            m, l, acc = new_state(ROWS, DIM, IS_PAIRED)
    if is_one_leaf:
        _write_output(
            out, l, whole(acc, IS_PAIRED), first_token, query_len, kv_head,
            out_token_stride, out_head_stride, GROUP_SIZE, HEAD_DIM,
        )  # fmt: skip
        return

    # Every warp's states must be written before one thread announces them.
    tl.debug_barrier()
    arrived = num_items - 1
    if num_items > 1:
        arrival = arrivals + sequence * NUM_KV_HEADS + kv_head
        arrived = tl.atomic_add(arrival, 1, sem="acq_rel")
        if arrived == num_items - 1:
            tl.store(arrival, 0)  # the next layer counts from zero
    if arrived < num_items - 1:
        return
    num_leaves = tl.cdiv(num_tiles, leaf_tiles)
    num_rows = query_len * GROUP_SIZE
    if GROUP == 1:
        all_l, all_acc = _merged(
            states, sums, state, NUM_KV_HEADS, num_leaves, num_rows,
            MERGED_AT_ONCE, 1, MERGE_ROWS, DIM, STATE_ROWS, DTYPE,
        )  # fmt: skip
    elif is_grouped:
        all_l, all_acc = _merged(
            states, sums, state, GROUP * NUM_KV_HEADS, tl.cdiv(num_leaves, GROUP), num_rows,
            MERGED_AT_ONCE, 1, MERGE_ROWS, DIM, STATE_ROWS, DTYPE,
        )  # fmt: skip
    else:
        all_l, all_acc = _merged(
            states, sums, state, NUM_KV_HEADS, num_leaves, num_rows,
            MERGED_AT_ONCE, GROUP, MERGE_ROWS, DIM, STATE_ROWS, DTYPE,
        )  # fmt: skip
    _write_output(
        out, all_l, all_acc, first_token, query_len, kv_head,
        out_token_stride, out_head_stride, GROUP_SIZE, HEAD_DIM,
    )  # fmt: skip
