"""Writing to the cache and copying its blocks."""

from __future__ import annotations

import triton
import triton.language as tl

from pagetide_kernels.triton.tiles import narrow

__all__ = ["copy_blocks_kernel", "store_block_scaled_kernel", "store_kernel"]

INT8_MAX = tl.constexpr(127.0)


@triton.jit
def _round(x):
    """Nearest integer, ties to even, for |x| < 2^22: the sum leaves no room for a fraction."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _quantize(x, scale):
    """int8 [TOKENS, DIM] of float32 `x`, with a float32 scale a token; zeros where that is 0."""
    divisor = tl.where(scale == 0.0, 1.0, scale)
    divisor = tl.broadcast_to(divisor[:, None], x.shape)
    rounded = _round(tl.div_rn(x, divisor))
    return tl.minimum(tl.maximum(rounded, -INT8_MAX), INT8_MAX).to(tl.int8)


@triton.jit
def _amax(x):
    """float32 [TOKENS]: each token's largest magnitude; NaN where there is one, to stay visible."""
    largest = tl.max(tl.abs(x), axis=1)
    is_nan = tl.max((x != x).to(tl.int32), axis=1) > 0
    return tl.where(is_nan, float("nan"), largest)


@triton.jit
def _amax_scale(x):
    """float32 [TOKENS]: the scale that makes each token's largest magnitude 127."""
    largest = _amax(x)
    return tl.div_rn(largest, tl.full(largest.shape, INT8_MAX, tl.float32))


@triton.jit
def _store_heads(
    x, cache, scales, block, slot,
    x_head_stride, block_stride, head_stride, slot_stride,
    scale_block_stride, scale_head_stride, scale_slot_stride,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    IS_QUANTIZED: tl.constexpr,
):  # fmt: skip
    """Writes all heads of one token."""
    head = tl.arange(0, HEADS)
    dims = tl.arange(0, DIM)
    is_head = head < NUM_HEADS
    is_element = is_head[:, None] & (dims[None, :] < HEAD_DIM)
    values = tl.load(x + head[:, None] * x_head_stride + dims[None, :], mask=is_element, other=0.0)
    at = (cache + block * block_stride + slot * slot_stride
          + head.to(tl.int64)[:, None] * head_stride + dims[None, :])  # fmt: skip
    if IS_QUANTIZED:
        values = values.to(tl.float32)
        scale = _amax_scale(values)
        scale_at = (scales + block * scale_block_stride + slot * scale_slot_stride
                    + head.to(tl.int64) * scale_head_stride)  # fmt: skip
        tl.store(scale_at, scale, mask=is_head)
        tl.store(at, _quantize(values, scale), mask=is_element)
    else:
        tl.store(at, narrow(values, cache.dtype.element_ty), mask=is_element)


@triton.jit(do_not_specialize=["num_seqs"])
def store_kernel(
    k, v, k_cache, v_cache, k_scales, v_scales, slot_mapping, query_start_loc, num_seqs,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    kc_block_stride, kc_head_stride, kc_slot_stride,
    vc_block_stride, vc_head_stride, vc_slot_stride,
    scale_block_stride, scale_head_stride, scale_slot_stride,
    NUM_HEADS: tl.constexpr, HEADS: tl.constexpr, HEAD_DIM: tl.constexpr, DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, IS_QUANTIZED: tl.constexpr,
):  # fmt: skip
    """One token, every head, K and V; grid (tokens)."""
    token = tl.program_id(0)
    if token >= tl.load(query_start_loc + num_seqs):
        return
    where = tl.load(slot_mapping + token)
    block = where // BLOCK_SIZE
    slot = where % BLOCK_SIZE
    _store_heads(
        k + token.to(tl.int64) * k_token_stride, k_cache, k_scales, block, slot,
        k_head_stride, kc_block_stride, kc_head_stride, kc_slot_stride,
        scale_block_stride, scale_head_stride, scale_slot_stride,
        NUM_HEADS, HEADS, HEAD_DIM, DIM, IS_QUANTIZED,
    )  # fmt: skip
    _store_heads(
        v + token.to(tl.int64) * v_token_stride, v_cache, v_scales, block, slot,
        v_head_stride, vc_block_stride, vc_head_stride, vc_slot_stride,
        scale_block_stride, scale_head_stride, scale_slot_stride,
        NUM_HEADS, HEADS, HEAD_DIM, DIM, IS_QUANTIZED,
    )  # fmt: skip


@triton.jit
def _store_in_block(
    x, cache, scales, num_held, num_new, x_token_stride, slot_stride,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Writes one step's tokens of one block and head that has a single scale.

    `num_held` earlier tokens are rounded again when the new ones widen the range; a block begun at
    its first slot holds none, so the scale of its earlier life counts for nothing.
    """
    slot = tl.arange(0, BLOCK_SIZE)
    dims = tl.arange(0, DIM)
    is_dim = dims[None, :] < HEAD_DIM
    is_new = (slot >= num_held) & (slot < num_held + num_new)
    new = tl.load(
        x + (slot - num_held).to(tl.int64)[:, None] * x_token_stride + dims[None, :],
        mask=is_new[:, None] & is_dim,
        other=0.0,
    ).to(tl.float32)
    largest = tl.max(_amax(tl.reshape(new, [1, BLOCK_SIZE * DIM])), axis=0)
    scale = tl.div_rn(largest, INT8_MAX + 0.0 * largest)
    at = cache + slot[:, None] * slot_stride + dims[None, :]
    is_held = slot < num_held
    if num_held > 0:
        old_scale = tl.load(scales)
        held = tl.load(at, mask=is_held[:, None] & is_dim, other=0).to(tl.float32) * old_scale
        scale = tl.maximum(scale, old_scale, propagate_nan=tl.PropagateNan.ALL)
        new = tl.where(is_held[:, None], held, new)
    tl.store(scales, scale)
    tl.store(
        at,
        _quantize(new, tl.zeros([BLOCK_SIZE], tl.float32) + scale),
        mask=(is_held | is_new)[:, None] & is_dim,
    )


@triton.jit(do_not_specialize=["num_seqs"])
def store_block_scaled_kernel(
    k, v, k_cache, v_cache, k_scales, v_scales, slot_mapping, query_start_loc, num_seqs,
    k_token_stride, k_head_stride, v_token_stride, v_head_stride,
    kc_block_stride, kc_head_stride, kc_slot_stride,
    vc_block_stride, vc_head_stride, vc_slot_stride,
    scale_block_stride, scale_head_stride,
    HEAD_DIM: tl.constexpr, DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """One token and head; grid (tokens, heads).

    The first token of a block in this step writes all of them. A written block belongs to one
    sequence, so its tokens stand side by side in the step.
    """
    token = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    num_tokens = tl.load(query_start_loc + num_seqs)
    if token >= num_tokens:
        return
    where = tl.load(slot_mapping + token)
    block = where // BLOCK_SIZE
    before = tl.load(slot_mapping + token - 1, mask=token > 0, other=-BLOCK_SIZE)
    if before // BLOCK_SIZE == block:
        return
    num_held = (where % BLOCK_SIZE).to(tl.int32)
    ahead = token + tl.arange(0, BLOCK_SIZE)
    beside = tl.load(slot_mapping + ahead, mask=ahead < num_tokens, other=-BLOCK_SIZE)
    num_new = tl.sum((beside // BLOCK_SIZE == block).to(tl.int32), axis=0)
    scale_at = block * scale_block_stride + head * scale_head_stride
    _store_in_block(
        k + token.to(tl.int64) * k_token_stride + head * k_head_stride,
        k_cache + block * kc_block_stride + head * kc_head_stride,
        k_scales + scale_at, num_held, num_new, k_token_stride, kc_slot_stride,
        HEAD_DIM, DIM, BLOCK_SIZE,
    )  # fmt: skip
    _store_in_block(
        v + token.to(tl.int64) * v_token_stride + head * v_head_stride,
        v_cache + block * vc_block_stride + head * vc_head_stride,
        v_scales + scale_at, num_held, num_new, v_token_stride, vc_slot_stride,
        HEAD_DIM, DIM, BLOCK_SIZE,
    )  # fmt: skip


@triton.jit
def copy_blocks_kernel(
    source, destination, pairs, source_layer_stride, destination_layer_stride, block_words,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One chunk of one block of one layer's K or V; grid (copies, layers x 2, chunks).

    `source` and `destination` are int32 words, `pairs` int64 [copies, 2]; a block is contiguous
    within a layer's K or V.
    """
    pair = pairs + tl.program_id(0) * 2
    layer = tl.program_id(1).to(tl.int64)
    word = tl.program_id(2) * CHUNK + tl.arange(0, CHUNK)
    is_word = word < block_words
    from_block = source + layer * source_layer_stride + tl.load(pair) * block_words
    to_block = destination + layer * destination_layer_stride + tl.load(pair + 1) * block_words
    tl.store(to_block + word, tl.load(from_block + word, mask=is_word), mask=is_word)
