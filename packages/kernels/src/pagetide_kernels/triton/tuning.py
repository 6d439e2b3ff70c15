"""Tile sizes, warps and stages: one static choice a shape and kind of card.

The tile along the keys and the cut into leaves are part of the arithmetic (exactness level 1), so
nothing here may depend on a batch. They do not depend on the card either; what a card's shared
memory decides is how many rows a prefill tile has. The choices were measured on an H200.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton

from pagetide_kernels.metadata import AttentionShape

__all__ = ["Tuning", "shared_memory_limit", "tuning_for"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """Attributes:
    dim: `head_dim` rounded up to a power of two, the width of a tile.
    tile: keys of a decode tile.
    leaf_growth: a leaf's length squared, in keys, over the least sequence that has longer ones.
    min_leaf_tiles: fewest tiles of a leaf.
    group: leaves that merge among themselves first, so that a long run leaves fewer states.
    decode_rows: rows of a decode tile: query heads of the group times query tokens.
    decode_warps: warps of a decode program.
    decode_stages: tiles in flight in its loop.
    decode_registers: cap on a thread's registers, so that more programs fit; None: no cap.
    overlaps: whether a decode launch may begin while the launch before it ends (programmatic
        dependent launch, from compute capability 9.0).
    programs_an_sm: decode programs that a multiprocessor is given when there is enough to do.
    prefill_rows: rows of a prefill tile.
    prefill_tile: keys of a prefill tile.
    prefill_warps: warps of a prefill program.
    prefill_stages: tiles in flight in its loop.
    """

    dim: int
    tile: int = 128
    leaf_growth: int = 16
    min_leaf_tiles: int = 1
    group: int = 1
    decode_rows: int = 16
    decode_warps: int = 4
    decode_stages: int = 3
    programs_an_sm: int = 4
    decode_registers: int | None = None
    overlaps: bool = False
    prefill_rows: int = 128
    prefill_tile: int = 64
    prefill_warps: int = 4
    prefill_stages: int = 3

    def most_leaves(self, max_seq_len: int) -> int:
        """Most leaves of any sequence up to that length; a longer one may have fewer."""
        length, most = self.min_leaf_tiles * self.tile, 1
        while True:
            longest = min(max_seq_len, length * length // self.leaf_growth + self.tile)
            most = max(most, -(-longest // length))
            if length * length >= self.leaf_growth * (max_seq_len + self.tile):
                return most
            length *= 2

    def merged_at_once(self, rows: int) -> int:
        """Leaves' states of so many rows that the merge loads at once: 64 registers a thread."""
        return max(self.group, min(8, 64 * 32 * self.decode_warps // (rows * self.dim)))


def shared_memory_limit(capability: tuple[int, int]) -> int:
    """Bytes of shared memory that one thread block may have (CUDA programming guide, table 30).

    Args:
        capability: the card's compute capability, for example (8, 9).
    """
    major, minor = capability
    if major in (9, 10, 11):
        return 227 * 1024
    return (163 if (major, minor) in ((8, 0), (8, 7)) else 99) * 1024


def tuning_for(shape: AttentionShape, capability: tuple[int, int]) -> Tuning:
    """The choice for a model's shape on a card of that compute capability."""
    memory = shared_memory_limit(capability)
    is_small = memory < 160 * 1024
    dim = max(32, triton.next_power_of_2(shape.head_dim))
    rows = max(16, triton.next_power_of_2(shape.group_size))
    overlaps = capability >= (9, 0)
    if shape.query_dtype == torch.float32:
        # No tensor cores: the products are unrolled into registers, so tiles stay small.
        return Tuning(
            dim, tile=32, min_leaf_tiles=4, group=4, decode_rows=rows, decode_stages=1,
            programs_an_sm=2, overlaps=overlaps, prefill_rows=max(32, rows), prefill_tile=32,
            prefill_stages=1,
        )  # fmt: skip
    if dim >= 256:
        return Tuning(
            dim, tile=64, min_leaf_tiles=2, decode_rows=rows, decode_stages=2, programs_an_sm=2,
            overlaps=overlaps, prefill_rows=max(64, rows), prefill_tile=32, prefill_stages=2,
        )  # fmt: skip
    if dim == 128:
        # As many keys as dims: scores and sums then have one layout.
        prefill = Tuning(
            dim, decode_rows=rows, overlaps=overlaps, prefill_tile=128,
            prefill_rows=max(64 if is_small else 128, rows), prefill_warps=4 if is_small else 8,
            prefill_stages=1 if is_small else 2 if memory < 200 * 1024 or shape.is_quantized else 3,
        )  # fmt: skip
        if rows > 16:
            return replace(prefill, tile=64, min_leaf_tiles=2, decode_stages=2, programs_an_sm=2)
        # A program that merges few query heads has registers for more warps.
        has_few_heads = shape.group_size <= 4
        if shape.is_quantized and has_few_heads:
            return replace(
                prefill, tile=64, min_leaf_tiles=2, decode_warps=2, decode_stages=2,
                decode_registers=168, programs_an_sm=6,
            )  # fmt: skip
        if shape.is_quantized:
            return replace(
                prefill, tile=32, min_leaf_tiles=4, decode_warps=1, decode_stages=2,
                programs_an_sm=9,
            )  # fmt: skip
        if has_few_heads:
            return replace(
                prefill, group=4, decode_warps=8, decode_stages=2, decode_registers=128,
                programs_an_sm=2,
            )  # fmt: skip
        return replace(prefill, tile=64, min_leaf_tiles=2, group=4, decode_warps=2, decode_stages=2)
    prefill = Tuning(dim, decode_rows=rows, overlaps=overlaps, prefill_rows=max(128, rows))
    if shape.group_size < 4:
        # Many KV heads, so many programs: a warp each, which has nobody to wait for.
        return replace(
            prefill, tile=32, leaf_growth=64, min_leaf_tiles=4, decode_warps=1,
            decode_stages=2 if shape.is_quantized else 3,
            programs_an_sm=12 if shape.is_quantized else 8, overlaps=False,
        )  # fmt: skip
    return replace(prefill, decode_stages=2, programs_an_sm=3 if shape.is_quantized else 4)
