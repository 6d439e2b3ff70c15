"""The state of an online softmax, and the one way states become one.

A state over a set of keys is `(m, l, acc)`: the largest score in the units of `power` (with INT8
values another reference, see `reference_for`), the sum of `e^(s - m)`, and the sum of
`e^(s - m) * v`. Attention is `acc / l`. States over disjoint keys merge
by bringing all to the largest maximum (Milakov and Gimelshein 2018; Dao 2023): a maximum is exact
in any order, and the sums are taken in the order of the keys. The fused multiply-add is written
out, because a compiler may fuse or not, and chooses by context.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagetide_kernels.triton.tiles import (
    key_parts,
    key_pointers,
    load_tile,
    power,
    raw_scores,
    reference_for,
    value_parts,
    weighted_values,
)

__all__ = ["accumulate", "add_state", "merge", "new_state"]


@triton.jit
def new_state(ROWS: tl.constexpr, DIM: tl.constexpr, IS_PAIRED: tl.constexpr):
    """The state over no keys, `acc` in parts: it merges without changing a bit of the other."""
    m = tl.full([ROWS], float("-inf"), tl.float32)
    l = tl.zeros([ROWS], tl.float32)
    if IS_PAIRED:
        acc = (tl.zeros([ROWS, DIM // 2], tl.float32), tl.zeros([ROWS, DIM // 2], tl.float32))
    else:
        acc = (tl.zeros([ROWS, DIM], tl.float32),)  # type: ignore[assignment]
    return m, l, acc


@triton.jit
def _finite(m):
    # A row that has seen no key has m = -inf, and -inf - (-inf) is NaN.
    return tl.where(m == float("-inf"), 0.0, m)


@triton.jit
def merge(m_a, l_a, acc_a, m_b, l_b, acc_b, DTYPE: tl.constexpr):
    """The state over the keys of both, `a` before `b`; `acc` whole."""
    m = tl.maximum(m_a, m_b)
    scale_a = power(m_a - _finite(m), DTYPE)
    scale_b = power(m_b - _finite(m), DTYPE)
    l = tl.fma(l_a, scale_a, l_b * scale_b)
    acc = tl.fma(acc_a, tl.broadcast_to(scale_a[:, None], acc_a.shape), acc_b * scale_b[:, None])
    return m, l, acc


@triton.jit
def add_state(l, acc, largest, m_b, l_b, acc_b, DTYPE: tl.constexpr):
    """Sums taken at `largest`, which no state's maximum exceeds, and the state `b`'s besides."""
    scale = power(m_b - _finite(largest), DTYPE)
    l = tl.fma(l_b, scale, l)
    acc = tl.fma(acc_b, tl.broadcast_to(scale[:, None], acc_b.shape), acc)
    return l, acc


@triton.jit
def accumulate(
    m, l, acc, q, k_cache, v_cache, k_scales, v_scales, blocks, tile, is_masked, positions, seq_len,
    scale, soft_cap, window,
    k_block_stride, k_slot_stride, v_block_stride, v_slot_stride,
    scale_block_stride, scale_slot_stride,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, TILE: tl.constexpr,
    DTYPE: tl.constexpr, IS_QUANTIZED: tl.constexpr, IS_PAIRED: tl.constexpr,
    SAME_STRIDES: tl.constexpr, HAS_WINDOW: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """The state after one more tile of keys.

    Args:
        m, l, acc: the state, float32 [ROWS], [ROWS], and [ROWS, DIM] in parts.
        q: the queries, in the same parts.
        k_cache, v_cache, k_scales, v_scales: the KV head's share of the cache.
        blocks: the tile's blocks.
        tile: which tile of the sequence's keys.
        is_masked: whether some row may not see some key of the tile.
        positions: int32 [ROWS], each row's own position.
        IS_PAIRED: whether the cache is given as int16 pairs of INT8 values, which halve what it
            takes to widen them; each pair's first value belongs to one part, its second to the
            other.
        SAME_STRIDES: whether keys and values are strided alike, so that one offset serves both.
    """
    keys = tile * TILE + tl.arange(0, TILE)
    is_owned = keys < seq_len
    k_scale = 0.0
    v_scale = 0.0
    if IS_QUANTIZED:
        scale_at = key_pointers(
            0, blocks, tile, scale_block_stride, scale_slot_stride, TILE, BLOCK_SIZE
        )
        # Both in one load: it is long enough for every thread to take part, and so goes through
        # shared memory; of a shorter one each thread would fetch all that it needs by itself.
        is_value = tl.arange(0, 2) == 1
        both_at = tl.where(is_value[None, :], v_scales, k_scales) + scale_at[:, None]
        scales = tl.load(both_at, mask=is_owned[:, None], other=0.0)
        k_scale, v_scale = tl.split(scales)
    if SAME_STRIDES:
        v_block_stride, v_slot_stride = k_block_stride, k_slot_stride
    # A key that is not owned may be NaN: its score is replaced below. Its value must be loaded as
    # zero, because its weight of 0 times NaN would be NaN; an INT8 value is finite, but its scale
    # need not be.
    k_at = key_pointers(k_cache, blocks, tile, k_block_stride, k_slot_stride, TILE, BLOCK_SIZE)
    v_at = key_pointers(v_cache, blocks, tile, v_block_stride, v_slot_stride, TILE, BLOCK_SIZE)
    k = load_tile(k_at, is_owned, HEAD_DIM, DIM, IS_PAIRED, False)
    v = load_tile(v_at, is_owned, HEAD_DIM, DIM, IS_PAIRED, not IS_QUANTIZED)
    k, v = key_parts(k, DTYPE, IS_PAIRED), value_parts(v, DTYPE, IS_PAIRED)
    scores, unit = raw_scores(q, k, k_scale, scale, soft_cap, DTYPE, IS_QUANTIZED, HAS_SOFT_CAP)
    if is_masked:
        is_visible = keys[None, :] <= positions[:, None]
        if HAS_WINDOW:
            is_visible &= keys[None, :] > positions[:, None] - window
        scores = tl.where(is_visible, scores, float("-inf"))
    largest = tl.max(scores, axis=1) * unit
    if IS_QUANTIZED:
        largest = reference_for(largest, v_scale, scores.shape, DTYPE)
    new_m = tl.maximum(m, largest)
    base = _finite(new_m)
    shrink = power(m - base, DTYPE)
    weights = power(tl.fma(scores, unit, -base[:, None]), DTYPE)
    l = tl.fma(l, shrink, tl.sum(weights, axis=1))
    acc = weighted_values(acc, shrink, weights, v, v_scale, DTYPE, IS_QUANTIZED)
    return new_m, l, acc
