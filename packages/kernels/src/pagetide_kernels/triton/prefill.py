"""Many query tokens: FlashAttention-2's loop over a paged cache.

An item is a run of one sequence's query tokens for one KV head; the rows of its tile are those
tokens times the query heads of the group, so each key is read once for all of them (Dao 2023;
grouped as in Ainslie et al. 2023). Tiles of which every row sees all keys skip the mask. A row's
bits do not depend on the rows beside it: a tile of which it sees no key leaves its state untouched.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagetide_kernels.triton.softmax_state import accumulate, new_state
from pagetide_kernels.triton.tiles import narrow, query_parts, tile_blocks, whole

__all__ = ["ITEM_FIELDS", "prefill_kernel"]

# An item: sequence (-1: none), its first query token within the sequence's; of the sequence: keys,
# first query token in the step, query tokens, row of the block table.
ITEM_FIELDS = tl.constexpr(6)


@triton.jit(do_not_specialize=["window", "table_stride"])
def prefill_kernel(
    out, q, k_cache, v_cache, k_scales, v_scales,
    items, block_tables,
    scale, soft_cap, window,
    out_token_stride, out_head_stride, q_token_stride, q_head_stride,
    k_block_stride, k_head_stride, k_slot_stride,
    v_block_stride, v_head_stride, v_slot_stride,
    scale_block_stride, scale_head_stride, scale_slot_stride,
    table_stride,
    GROUP_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr,
    DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    ROWS: tl.constexpr, STAGES: tl.constexpr, DTYPE: tl.constexpr, IS_QUANTIZED: tl.constexpr,
    IS_PAIRED: tl.constexpr, SAME_STRIDES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """One item of the work list for one KV head; grid (num_kv_heads, items)."""
    kv_head = tl.program_id(0)
    # The last tokens of a sequence see the most keys: start them first, so that no long item is
    # left running alone at the end.
    item = items + (tl.num_programs(1) - 1 - tl.program_id(1)) * ITEM_FIELDS
    sequence = tl.load(item)
    first_query = tl.load(item + 1)
    seq_len = tl.load(item + 2)
    first_token = tl.load(item + 3)
    query_len = tl.load(item + 4)
    table_row = tl.load(item + 5)
    if sequence < 0:
        return

    TOKENS: tl.constexpr = ROWS // GROUP_SIZE
    first_position = seq_len - query_len + first_query
    end_key = tl.minimum(first_position + TOKENS, seq_len)
    end_tile = tl.cdiv(end_key, TILE)
    # Of the tiles between these two every row sees all keys.
    first_tile, seen_from = 0, 0
    seen_until = (first_position + 1) // TILE
    if HAS_WINDOW:
        first_tile = tl.maximum(first_position - window + 1, 0) // TILE
        seen_from = tl.cdiv(tl.maximum(first_position + TOKENS - window, 0), TILE)
    # The first blocks are asked for before the queries: both trips to memory in the time of one.
    table = block_tables + table_row.to(tl.int64) * table_stride
    blocks = tile_blocks(table, first_tile, seq_len, TILE, BLOCK_SIZE)

    row = tl.arange(0, ROWS)
    dims = tl.arange(0, DIM)
    query = first_query + row // GROUP_SIZE
    is_row = (row < TOKENS * GROUP_SIZE) & (query < query_len)
    token = (first_token + query).to(tl.int64)
    head = kv_head * GROUP_SIZE + row % GROUP_SIZE
    positions = seq_len - query_len + query
    is_element = is_row[:, None] & (dims[None, :] < HEAD_DIM)
    q_tile = tl.load(
        q + (token * q_token_stride + head * q_head_stride)[:, None] + dims[None, :],
        mask=is_element,
        other=0.0,
    )
    q_parts = query_parts(q_tile, DTYPE, IS_PAIRED)
    k_head = k_cache + kv_head.to(tl.int64) * k_head_stride
    v_head = v_cache + kv_head.to(tl.int64) * v_head_stride
    k_scale_head = k_scales + kv_head.to(tl.int64) * scale_head_stride
    v_scale_head = v_scales + kv_head.to(tl.int64) * scale_head_stride

    m, l, acc = new_state(ROWS, DIM, IS_PAIRED)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        m, l, acc = accumulate(
            m, l, acc, q_parts, k_head, v_head, k_scale_head, v_scale_head, blocks, tile,
            (tile < seen_from) | (tile >= seen_until), positions, seq_len, scale, soft_cap, window,
            k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
            scale_block_stride, scale_slot_stride,
            HEAD_DIM, DIM, BLOCK_SIZE, TILE, DTYPE, IS_QUANTIZED, IS_PAIRED, SAME_STRIDES,
            HAS_WINDOW, HAS_SOFT_CAP,
        )  # fmt: skip
        blocks = tile_blocks(table, tile + 1, seq_len, TILE, BLOCK_SIZE)
    result = whole(acc, IS_PAIRED) / tl.where(l == 0.0, 1.0, l)[:, None]
    tl.store(
        out + (token * out_token_stride + head * out_head_stride)[:, None] + dims[None, :],
        narrow(result, out.dtype.element_ty),
        mask=is_element,
    )
