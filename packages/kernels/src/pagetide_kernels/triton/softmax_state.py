"""The state of an online softmax, and the one way two states become one.

A state over a set of keys is `(m, l, acc)`: the largest score in log2 units, the sum of
`2^(s - m)`, and the sum of `2^(s - m) * v`. Attention is `acc / l`. Two states over disjoint keys
merge by bringing both to the larger maximum (Milakov and Gimelshein 2018; Dao 2023). The program
that walks a whole sequence and the one that arrives last both call `merge`, leaf by leaf, so the
same row of leaves gives the same bits whoever walks which part of it: the fused multiply-add is
written out because a compiler may fuse either product of `a * x + b * y`, and chooses by context.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagetide_kernels.triton.tiles import (
    load_tile,
    masked_scores,
    tile_places,
    weighted_values,
)

__all__ = ["accumulate", "merge", "new_state"]


@triton.jit
def new_state(ROWS: tl.constexpr, DIM: tl.constexpr):
    """The state over no keys: it merges with any other without changing a bit of it."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DIM], tl.float32)
    return m, l, acc


@triton.jit
def _finite(m):
    # A row that has seen no key has m = -inf, and -inf - (-inf) is NaN.
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def merge(m_a, l_a, acc_a, m_b, l_b, acc_b):
    """The state over the keys of both, `a` before `b`."""
    m = tl.maximum(m_a, m_b)
    scale_a = tl.exp2(m_a - _finite(m))
    scale_b = tl.exp2(m_b - _finite(m))
    l = tl.fma(l_a, scale_a, l_b * scale_b)
    acc = tl.fma(acc_a, tl.broadcast_to(scale_a[:, None], acc_a.shape), acc_b * scale_b[:, None])
    return m, l, acc


@triton.jit
def accumulate(
    m, l, acc, q, k_cache, v_cache, k_scales, v_scales, table, tile, positions, seq_len,
    scale, soft_cap, window,
    k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
    scale_block_stride, scale_slot_stride,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr, IS_QUANTIZED: tl.constexpr, SAME_STRIDES: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr, IS_MASKED: tl.constexpr,
):  # fmt: skip
    """The state after one more tile of keys.

    Args:
        m, l, acc: the state, float32 [ROWS], [ROWS], [ROWS, DIM].
        q: [ROWS, DIM], the queries.
        k_cache, v_cache, k_scales, v_scales: the KV head's share of the cache.
        table: the sequence's block table.
        tile: which tile of its keys.
        positions: int32 [ROWS], each row's own position.
        SAME_STRIDES: whether keys and values are strided alike, so that one offset serves both.
        IS_MASKED: whether some row may not see some key of the tile.
    """
    blocks, slots, is_owned = tile_places(table, tile, seq_len, TILE, BLOCK_SIZE, IS_MASKED)
    dims = tl.arange(0, DIM)
    k_scale = 0.0
    v_scale = 0.0
    if IS_QUANTIZED:
        scale_at = blocks * scale_block_stride + slots * scale_slot_stride
        k_scale = tl.load(k_scales + scale_at, mask=is_owned, other=0.0)
        v_scale = tl.load(v_scales + scale_at, mask=is_owned, other=0.0)
    k_at = (blocks * k_block_stride + slots * k_slot_stride)[:, None] + dims[None, :]
    if SAME_STRIDES:
        v_at = k_at
    else:
        v_at = (blocks * v_block_stride + slots * v_slot_stride)[:, None] + dims[None, :]
    # A key not owned may be NaN: its score is replaced below. Its value must be loaded as zero,
    # because its weight of 0 times NaN would be NaN.
    k = load_tile(k_cache + k_at, is_owned, HEAD_DIM, DIM, False)
    v = load_tile(v_cache + v_at, is_owned, HEAD_DIM, DIM, IS_MASKED)
    is_visible = is_owned[None, :]
    if IS_MASKED:
        keys = tile * TILE + tl.arange(0, TILE)
        is_visible = (keys[None, :] <= positions[:, None]) & is_owned[None, :]
        if HAS_WINDOW:
            is_visible &= keys[None, :] > positions[:, None] - window
    scores = masked_scores(
        q, k, k_scale, is_visible, scale, soft_cap, DTYPE, IS_QUANTIZED, HAS_SOFT_CAP, IS_MASKED
    )
    new_m = tl.maximum(m, tl.max(scores, axis=1))
    base = _finite(new_m)
    shrink = tl.exp2(m - base)
    weights = tl.exp2(scores - base[:, None])
    l = tl.fma(l, shrink, tl.sum(weights, axis=1))
    acc = weighted_values(acc * shrink[:, None], weights, v, v_scale, DTYPE, IS_QUANTIZED)
    return new_m, l, acc
