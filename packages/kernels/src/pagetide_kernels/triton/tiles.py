"""A tile of keys or values through the block table, and scores made of it.

Everything a kernel knows about layout and KV dtype is in this file. Offsets of blocks are 64-bit: a
pool may have more than 2^31 elements.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = [
    "INTERPRETING",
    "key_parts",
    "key_pointers",
    "load_tile",
    "narrow",
    "power",
    "query_parts",
    "raw_scores",
    "reference_for",
    "tile_blocks",
    "value_parts",
    "weighted_values",
    "whole",
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
def tile_blocks(table, tile, seq_len, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """The blocks in which a tile's keys lie, a tuple of int32.

    Where the sequence has no more, its last block stands again, so that a tile may be asked for
    before anybody knows whether it exists.
    """
    first = tile * TILE // BLOCK_SIZE
    last = (seq_len - 1) // BLOCK_SIZE
    blocks = ()
    for i in tl.static_range((TILE + BLOCK_SIZE - 1) // BLOCK_SIZE):
        entry = table + tl.minimum(first + i, last)
        blocks = blocks + (tl.load(entry, mask=seq_len > 0, other=0),)  # type: ignore[assignment]  # noqa: RUF005 (no unpacking in Triton)
    return blocks


@triton.jit
def key_pointers(
    cache, blocks, tile, block_stride, slot_stride, TILE: tl.constexpr, BLOCK_SIZE: tl.constexpr
):
    """Where each key of a tile begins in a head's share of a tensor, pointers [TILE]."""
    lane = tl.arange(0, TILE)
    of_block = tl.full([TILE], 0, tl.int64) + blocks[0].to(tl.int64) * block_stride
    for i in tl.static_range(1, (TILE + BLOCK_SIZE - 1) // BLOCK_SIZE):
        is_here = lane // BLOCK_SIZE == i
        of_block = tl.where(is_here, blocks[i].to(tl.int64) * block_stride, of_block)
    if TILE % BLOCK_SIZE == 0:  # the tile begins a block: the same slots in every tile
        slots = lane % BLOCK_SIZE
    else:
        slots = (tile * TILE + lane) & (BLOCK_SIZE - 1)  # a power of two
    return cache + of_block + slots * slot_stride


@triton.jit
def load_tile(
    at, is_owned, HEAD_DIM: tl.constexpr, DIM: tl.constexpr, IS_PAIRED: tl.constexpr,
    MASK_KEYS: tl.constexpr,
):  # fmt: skip
    """[KEYS, DIM] values, or int16 [KEYS, DIM / 2] pairs of them.

    Zeros beyond `HEAD_DIM` and, asked so, at keys that are not owned.

    Args:
        at: pointers [KEYS], to each key's first element or pair.
        is_owned: bool [KEYS].
    """
    WIDTH: tl.constexpr = DIM // 2 if IS_PAIRED else DIM
    HEAD_WIDTH: tl.constexpr = HEAD_DIM // 2 if IS_PAIRED else HEAD_DIM
    dims = tl.arange(0, WIDTH)
    if MASK_KEYS:
        mask = is_owned[:, None] & (dims[None, :] < HEAD_WIDTH)
        return tl.load(at[:, None] + dims[None, :], mask=mask, other=0)
    if HEAD_WIDTH < WIDTH:
        return tl.load(at[:, None] + dims[None, :], mask=dims[None, :] < HEAD_WIDTH, other=0)
    return tl.load(at[:, None] + dims[None, :])


@triton.jit
def _widen_pairs(pairs, dtype: tl.constexpr):
    """int16 pairs of int8 values to the even ones and the odd ones, as operands.

    Bytes are put into the low bits of a number whose last bit counts 1, and that number's own
    value is subtracted: exact, and for two values at a time. 1024 serves for float16. In bfloat16,
    which has 7 bits behind the first, the sign bit of the byte turns 128 into 256.
    """
    if INTERPRETING or dtype == tl.float32:
        return operand((pairs << 8) >> 8, dtype), operand(pairs >> 8, dtype)
    elif dtype == tl.float16:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 biased, base;
            mov.b32 base, 0x64806480;
            xor.b32 biased, $2, 0x80808080;
            prmt.b32 $0, biased, 0x64646464, 0x4240;
            prmt.b32 $1, biased, 0x64646464, 0x4341;
            sub.f16x2 $0, $0, base;
            sub.f16x2 $1, $1, base;
            }""",
            "=&r,=&r,r", [pairs], dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    else:
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 low, base, minus;
            mov.b32 minus, 0xBF80BF80;
            prmt.b32 $0, $2, 0x43434343, 0x4240;
            prmt.b32 $1, $2, 0x43434343, 0x4341;
            and.b32 low, $0, 0xFF7FFF7F;
            and.b32 base, $0, 0xFF80FF80;
            fma.rn.bf16x2 $0, base, minus, low;
            and.b32 low, $1, 0xFF7FFF7F;
            and.b32 base, $1, 0xFF80FF80;
            fma.rn.bf16x2 $1, base, minus, low;
            }""",
            "=&r,=&r,r", [pairs], dtype=(tl.bfloat16, tl.bfloat16), is_pure=True, pack=2,
        )  # fmt: skip


@triton.jit
def _halves(x):
    """The even and the odd columns."""
    return tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))


@triton.jit
def _quarters(x, dtype: tl.constexpr):
    """Columns in four parts, of at least 16: two where there are but 32."""
    even, odd = _halves(operand(x, dtype))
    if x.shape[1] == 32:
        return even, odd
    else:
        return _halves(even) + _halves(odd)


@triton.jit
def query_parts(q, dtype: tl.constexpr, IS_PAIRED: tl.constexpr):
    """Queries [ROWS, DIM] in the parts of the keys, as operands."""
    if dtype == tl.float32:
        return _quarters(q, dtype)
    elif IS_PAIRED:
        even, odd = _halves(q)
        return operand(even, dtype), operand(odd, dtype)
    else:
        return (operand(q, dtype),)


@triton.jit
def key_parts(k, dtype: tl.constexpr, IS_PAIRED: tl.constexpr):
    """Loaded keys as the operands of dot products whose sum is the scores.

    Pairs come apart as even and odd dims. A float32 product is a chain of multiply-adds: four short
    chains round half as much as one long.
    """
    if dtype == tl.float32:
        if IS_PAIRED:
            even, odd = _widen_pairs(k, dtype)
            if even.shape[1] == 16:
                return even, odd
            else:
                return _halves(even) + _halves(odd)
        else:
            return _quarters(k, dtype)
    elif IS_PAIRED:
        even, odd = _widen_pairs(k, dtype)
        return even, odd
    else:
        return (operand(k, dtype),)


@triton.jit
def value_parts(v, dtype: tl.constexpr, IS_PAIRED: tl.constexpr):
    """Loaded values as operands: all dims, or of pairs the even and the odd."""
    if IS_PAIRED:
        even, odd = _widen_pairs(v, dtype)
        return even, odd
    else:
        return (operand(v, dtype),)


@triton.jit
def whole(acc, IS_PAIRED: tl.constexpr):
    """Parts of the values [ROWS, DIM / 2] as one tensor [ROWS, DIM]."""
    if IS_PAIRED:
        return tl.reshape(tl.join(acc[0], acc[1]), (acc[0].shape[0], acc[0].shape[1] * 2))
    else:
        return acc[0]


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
def _apart(a, b):
    """`a + b`, where the compiler must not make one long chain of multiply-adds of two short."""
    return tl.fma(a, tl.full(a.shape, 1.0, tl.float32), b)


@triton.jit
def raw_scores(
    q, k, k_scale, scale, soft_cap,
    dtype: tl.constexpr, IS_QUANTIZED: tl.constexpr, HAS_SOFT_CAP: tl.constexpr,
):  # fmt: skip
    """Scores not yet scaled, and the positive factor that brings them to the units of `power`.

    Scaling waits for the maximum to be subtracted, because both are then one multiply-add. The
    scores are float32 [ROWS, KEYS].

    Args:
        q, k: queries and keys in the same parts.
        scale: positive.
    """
    scores = tl.dot(q[0], tl.trans(k[0]), input_precision="ieee")
    for i in tl.static_range(1, len(q)):
        if dtype == tl.float32:
            scores = _apart(tl.dot(q[i], tl.trans(k[i]), input_precision="ieee"), scores)
        else:
            scores = tl.dot(q[i], tl.trans(k[i]), scores, input_precision="ieee")
    if IS_QUANTIZED:
        scores = scores * k_scale[None, :]
    if HAS_SOFT_CAP:
        scores = soft_cap * _tanh(scores * (scale / soft_cap), dtype)
        scale = 1.0
    UNIT: tl.constexpr = 1.0 if dtype == tl.float32 else LOG2_E
    return scores, scale * UNIT


@triton.jit
def power(difference, dtype: tl.constexpr):
    """e to a difference of scores.

    Scores of half-precision queries are in units of log 2. The factor log2 e would round a large
    score once more than float32 can bear, so there it waits for the small difference.
    """
    if dtype == tl.float32:
        difference = difference * LOG2_E
    return tl.exp2(difference)


@triton.jit
def reference_for(largest, v_scale, shape: tl.constexpr, dtype: tl.constexpr):
    """What a tile's scores are compared with, from each row's largest: float32 [ROWS].

    Any number serves, for it cancels in `acc / l`. With INT8 values, `e^(s - m)` times a value's
    scale must be a float16, which has range for little more: so the largest may be 2^14. The tile's
    largest scale is found row by row, because then no warp waits for another.
    """
    if dtype == tl.float16:
        largest_scale = tl.max(tl.broadcast_to(v_scale[None, :], shape), axis=1)
        return largest + tl.log2(tl.maximum(largest_scale, 2.0**-60)) - 14.0
    else:
        return largest


@triton.jit
def weighted_values(
    acc, shrink, weights, v, v_scale, dtype: tl.constexpr, IS_QUANTIZED: tl.constexpr
):
    """`acc * shrink + weights @ v`, part by part: float32 [ROWS, DIM], or two of half the width.

    INT8 scales go into the weights: a scale belongs to a key.
    """
    if IS_QUANTIZED:
        weights = weights * v_scale[None, :]
    weights = operand(weights, dtype)
    new_acc = ()
    for i in tl.static_range(len(v)):
        shrunk = acc[i] * shrink[:, None]
        if dtype == tl.float32:
            new = _apart(tl.dot(weights, v[i], input_precision="ieee"), shrunk)
        else:
            new = tl.dot(weights, v[i], shrunk, input_precision="ieee")
        new_acc = new_acc + (new,)  # type: ignore[assignment]  # noqa: RUF005 (no unpacking in Triton)
    return new_acc
