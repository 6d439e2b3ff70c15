"""Which kernels serve a shape, and how its steps are cut.

Paths, rows and leaves are part of the arithmetic (exactness level 1), so nothing here depends on a
batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

import torch

from pagetide_kernels.metadata import AttentionShape

__all__ = ["Path", "Tuning", "tuning_for"]

_MMA_HEAD_DIMS = (64, 80, 96, 128, 256)
_SIMT_HEAD_DIMS = (64, 128, 256)


class Path(IntEnum):
    """What multiplies in the decode kernel; the numbers are the library's."""

    MMA = 0
    SIMT = 1


@dataclass(frozen=True, slots=True)
class Tuning:
    """Attributes:
    path: tensor cores or CUDA cores, for decoding.
    decode_head_dim: head_dim of the decode instance, at least the shape's.
    decode_rows: rows of a decode tile: query heads of the group times query tokens.
    prefill_head_dim: head_dim of the prefill instance; 0: the decode kernel takes prefills too.
    prefill_rows: rows of a prefill tile; 0 like above.
    few_leaves: a sequence has as few, until a leaf has ``long_leaf_keys``: a leaf ends with a
        merge, which short ones pay for dearly, and each may be another thread block's.
    min_leaf_keys: keys of the shortest leaf, a power of two.
    long_leaf_keys: of which longer sequences have more, up to ``max_leaves``; a power of two.
    max_leaves: most leaves of a sequence.
    blocks_an_sm: decode thread blocks that a multiprocessor is given when there is enough to do;
        decides only who computes what.
    """

    path: Path
    decode_head_dim: int
    decode_rows: int
    prefill_head_dim: int
    prefill_rows: int
    few_leaves: int
    min_leaf_keys: int = 64
    long_leaf_keys: int = 512
    max_leaves: int = 64
    blocks_an_sm: int = 2

    def most_leaves(self, max_seq_len: int) -> int:
        """An upper bound of the leaves of any sequence of at most that length, at least 1."""
        few = min(self.few_leaves, -(-max_seq_len // self.min_leaf_keys))
        many = min(self.max_leaves, -(-max_seq_len // self.long_leaf_keys))
        return max(1, few, many)


def _compiled(head_dims: tuple[int, ...], head_dim: int) -> int:
    return next(each for each in head_dims if each >= head_dim)


def tuning_for(shape: AttentionShape) -> Tuning:
    """The choice for a model's shape."""
    few_leaves = 8 if shape.num_kv_heads < 4 else 4  # KV heads are thread blocks too
    if shape.query_dtype == torch.float32 or shape.is_quantized:
        return Tuning(Path.SIMT, _compiled(_SIMT_HEAD_DIMS, shape.head_dim), 8, 0, 0, few_leaves)
    dim = _compiled(_MMA_HEAD_DIMS, shape.head_dim)
    return Tuning(
        path=Path.MMA,
        decode_head_dim=dim,
        decode_rows=16,
        prefill_head_dim=dim,
        prefill_rows=128 if dim <= 128 else 64,
        few_leaves=few_leaves,
        blocks_an_sm=3 if dim <= 64 else 2,
    )
