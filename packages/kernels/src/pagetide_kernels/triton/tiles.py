"""A tile of keys or values through the block table, and scores made of it.

Everything a kernel knows about layout and KV dtype is in this file. Offsets of blocks are 64-bit: a
pool may have more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INTERPRETING",
    "load_tile",
    "masked_scores",
    "narrow",
    "operand",
    "tile_places",
    "weighted_values",
]

# The interpreter runs on numpy, which has no bf16: it computes bf16 arithmetic wrongly and cuts
# float32 off instead of rounding it. So there, and only there, bf16 operands are widened first and
# results are rounded by hand.
INTERPRETING = tl.constexpr(triton.knobs.runtime.interpret)
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def operand(x, dtype: tl.constexpr):
    """`x` as an operand of a dot product with `dtype` queries."""
    if INTERPRETING and dtype == tl.bfloat16:
        return x.to(tl.float32)
    return x.to(dtype)


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """`x` rounded to the nearest `dtype`, ties to even."""
    if INTERPRETING and dtype == tl.bfloat16:
        x = x.to(tl.float32)
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, (bits >> 16) | 1)  # a NaN stays one
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def tile_places(
    table, tile, seq_len, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr, IS_MASKED: tl.constexpr
):
    """Where a tile's keys lie: block int64 [TILE], slot int32 [TILE], whether owned bool [TILE].

    A key that the sequence does not own (only a masked tile has such) is given block 0.
    """
    lane = tl.arange(0, TILE)
    keys = tile * TILE + lane
    is_owned = keys < seq_len
    if TILE % BLOCK_SIZE == 0:  # the tile begins a block: slots stay the same from tile to tile
        slots = lane % BLOCK_SIZE
        entry = table + tile * (TILE // BLOCK_SIZE) + lane // BLOCK_SIZE
    else:
        slots = keys % BLOCK_SIZE
        entry = table + keys // BLOCK_SIZE
    if IS_MASKED:
        blocks = tl.load(entry, mask=is_owned, other=0)
    else:
        blocks = tl.load(entry)
    return blocks.to(tl.int64), slots, is_owned


@triton.jit
def load_tile(at, is_owned, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, MASK_KEYS: tl.constexpr):
    """[KEYS, DIM] values; zeros beyond `HEAD_DIM` and, asked so, at keys that are not owned.

    Args:
        at: int64 pointers [KEYS, DIM].
    """
    dims = tl.arange(0, DIM)
    if MASK_KEYS:
        return tl.load(at, mask=is_owned[:, None] & (dims[None, :] < HEAD_DIM), other=0.0)
    if HEAD_DIM < DIM:
        return tl.load(at, mask=dims[None, :] < HEAD_DIM, other=0.0)
    return tl.load(at)


@triton.jit
def _tanh(x, dtype: tl.constexpr):
    """tanh of float32 `x`, as exactly as scores of `dtype` queries need it.

    `1 - 2 / (1 + e^2x)` is exact at both ends, but its error near 0 is absolute, and the soft cap
    multiplies it: too much for float32, which takes an odd polynomial there (Moshier's Cephes,
    tanhf: |x| < 0.625, relative error 1.3e-7).
    """
    result = 1.0 - 2.0 / (1.0 + tl.exp2(x * (2.0 * LOG2_E)))
    if dtype == tl.float32:
        z = x * x
        series = 2.06390887954e-2 - 5.70498872745e-3 * z
        series = series * z - 5.37397155531e-2
        series = series * z + 1.33314422036e-1
        series = series * z - 3.33332819422e-1
        result = tl.where(tl.abs(x) < 0.625, x + x * z * series, result)
    return result


@triton.jit
def masked_scores(
    q, k, k_scale, is_visible, scale, soft_cap,
    DTYPE: tl.constexpr, IS_QUANTIZED: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
    IS_MASKED: tl.constexpr,
):  # fmt: skip
    """float32 [ROWS, KEYS] scores in log2 units, -inf where a row does not see a key."""
    scores = tl.dot(operand(q, DTYPE), tl.trans(operand(k, DTYPE)), input_precision="ieee")
    if IS_QUANTIZED:
        scores = scores * k_scale[None, :]
    if HAS_SOFT_CAP:
        scores = (soft_cap * LOG2_E) * _tanh(scores * (scale / soft_cap), DTYPE)
    else:
        scores = scores * (scale * LOG2_E)
    if IS_MASKED:
        scores = tl.where(is_visible, scores, float("-inf"))
    return scores


@triton.jit
def weighted_values(acc, weights, v, v_scale, DTYPE: tl.constexpr, IS_QUANTIZED: tl.constexpr):
    """float32 [ROWS, DIM]: `acc + weights @ v`.

    INT8 scales go into the weights, divided by the tile's largest: a half-precision weight times a
    small scale would otherwise lose its last bits to underflow.
    """
    if IS_QUANTIZED:
        largest = tl.max(v_scale, axis=0)
        largest = tl.where(largest == 0.0, 1.0, largest)
        weights = weights * (v_scale / largest)[None, :]
        values = tl.dot(operand(weights, DTYPE), operand(v, DTYPE), input_precision="ieee")
        return tl.fma(values, tl.zeros_like(values) + largest, acc)
    return tl.dot(operand(weights, DTYPE), operand(v, DTYPE), acc, input_precision="ieee")
