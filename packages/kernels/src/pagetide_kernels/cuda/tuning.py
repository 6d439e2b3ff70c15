"""Which kernels serve a shape, and how its steps are cut.

Paths, rows and leaves are part of the arithmetic (exactness level 1), so nothing here depends on a
batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import cache

import torch

from pagetide_kernels.metadata import AttentionShape

__all__ = ["Path", "Tuning", "tuning_for"]

_MMA_HEAD_DIMS = (64, 80, 96, 128, 256)
_COARSE_HEAD_DIMS = (64, 128, 256)  # of INT8 caches, and of CUDA cores


class Path(IntEnum):
    """What multiplies in the decode kernel; the numbers are the library's."""

    MMA = 0
    SIMT = 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """Attributes:
    path: tensor cores or CUDA cores, for decoding.
    decode_head_dim: head_dim of the decode instance, at least the shape's.
    tile_rows: rows of a decode tile: query heads of the group times query tokens.
    row_tiles: decode tiles of a group; a sequence whose rows they hold decodes.
    prefill_head_dim: head_dim of the prefill instance; 0: the decode kernel takes prefills too.
    prefill_rows: rows of a prefill tile; decides only who computes what.
    few_leaves: a sequence has as few, until a leaf has ``long_leaf_keys``: a leaf ends with a
        merge, which short ones pay for dearly, and each may be another thread block's.
    min_leaf_keys: keys of the shortest leaf, a power of two.
    long_leaf_keys: of which longer sequences have more, up to ``max_leaves``; a power of two.
    max_leaves: most leaves of a sequence.
    blocks_an_sm: decode thread blocks that a multiprocessor is given when there is enough to do;
        decides only who computes what, as do the next four.
    least_blocks_an_sm: as few, if that gives every block whole sequences or an evener share.
    most_rows_alone: query rows up to which one block takes all of a multiprocessor's bandwidth, so
        that it gets no other where each can have a whole sequence; 0: not known of any.
    cluster_blocks_an_sm: as many where blocks meet in shared memory, of which they need more.
    pair_blocks_an_sm: as many where two do that have a leaf each, and need little more.
    cluster_leaves: most leaves of a sequence that is worked on so.
    """

    path: Path
    decode_head_dim: int
    tile_rows: int
    row_tiles: int
    prefill_head_dim: int
    prefill_rows: int
    few_leaves: int = 4
    min_leaf_keys: int = 64
    long_leaf_keys: int = 512
    max_leaves: int = 32
    blocks_an_sm: int = 2
    least_blocks_an_sm: int = 2
    most_rows_alone: int = 0
    cluster_blocks_an_sm: int = 1
    pair_blocks_an_sm: int = 2
    cluster_leaves: int = 8

    @property
    def decode_rows(self) -> int:
        """Rows of the longest query that decodes."""
        return self.tile_rows * self.row_tiles

    def most_leaves(self, max_seq_len: int) -> int:
        """An upper bound of the leaves of any sequence of at most that length, at least 1."""
        few = min(self.few_leaves, -(-max_seq_len // self.min_leaf_keys))
        many = min(self.max_leaves, -(-max_seq_len // self.long_leaf_keys))
        return max(1, few, many)


def _compiled(head_dims: tuple[int, ...], head_dim: int) -> int:
    return next(each for each in head_dims if each >= head_dim)


def _prefill_rows(head_dim: int, *, is_hopper: bool) -> int:
    if head_dim <= 64 and is_hopper:
        return 192  # of three consumers
    return 128 if head_dim <= 128 else 64


@cache
def tuning_for(shape: AttentionShape, *, is_hopper: bool = False) -> Tuning:
    """The choice for a model's shape, and a card that has Hopper's kernels or not."""
    is_mma = shape.query_dtype != torch.float32
    coarse = _compiled(_COARSE_HEAD_DIMS, shape.head_dim)
    is_fine = is_mma and not shape.is_quantized
    dim = _compiled(_MMA_HEAD_DIMS, shape.head_dim) if is_fine else coarse
    tile_rows = 16 if is_mma and dim <= 128 else 8
    has_long_steps = is_mma and (dim <= 64 or (shape.is_quantized and dim <= 128))
    # Every leaf ends with a merge. Long rows make that cheap beside its keys, and fill fewer
    # thread blocks; so do few KV heads, where INT8 takes more instructions a key.
    few_leaves = 8 if dim > 64 else 2
    if dim <= 64 and (not is_mma or (shape.is_quantized and shape.group_size >= 4)):
        few_leaves = 4
    # INT8 keys are fewer bytes for as many instructions: more warps share them.
    blocks_an_sm = 2 if dim > 64 or not is_mma else 4 if shape.is_quantized else 3
    return Tuning(
        path=Path.MMA if is_mma else Path.SIMT,
        decode_head_dim=dim,
        tile_rows=tile_rows,
        row_tiles=-(-shape.group_size // tile_rows),
        prefill_head_dim=dim if is_mma else 0,
        prefill_rows=_prefill_rows(dim, is_hopper=is_hopper) if is_mma else tile_rows,
        few_leaves=few_leaves,
        min_leaf_keys=128 if has_long_steps else 64,
        long_leaf_keys=1024 if dim > 64 else 512,
        blocks_an_sm=blocks_an_sm,
        least_blocks_an_sm=3 if dim <= 64 and is_mma else 2,
        most_rows_alone=8 if is_hopper and is_fine and dim == 128 else 0,
        cluster_blocks_an_sm=1 if dim > 64 else 2,
        pair_blocks_an_sm=blocks_an_sm if dim <= 64 else 1,
        cluster_leaves=8 if dim > 64 else 16,
    )
