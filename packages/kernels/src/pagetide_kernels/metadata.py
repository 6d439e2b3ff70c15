"""What one step of attention works on: the model's shape, the step's bounds, the step itself.

Notation used by every docstring of this package: ``S`` sequences, ``T`` tokens of this step, ``R``
rows of the block table, ``W`` blocks in a row, ``N`` blocks in the pool.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from pagetide_kernels.errors import UnsupportedError
from pagetide_kernels.validation import require_int, require_tensor

if TYPE_CHECKING:
    from pagetide_kvcache import KVCacheSpec, KVDType

__all__ = ["SUPPORTED_PAIRS", "AttentionBounds", "AttentionMetadata", "AttentionShape"]

SUPPORTED_PAIRS: dict[torch.dtype, tuple[KVDType, ...]] = {
    torch.float32: ("float32", "float16", "bfloat16", "int8", "int8-block"),
    torch.float16: ("float16", "int8", "int8-block"),
    torch.bfloat16: ("bfloat16", "int8", "int8-block"),
}


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The part of a model that decides which kernel serves it; the same for every step and layer.

    Raises:
        ValueError: a size below 1, or ``num_heads`` not a multiple of ``num_kv_heads``.
        UnsupportedError: a pair of query dtype and KV dtype that no back end computes.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    query_dtype: torch.dtype
    kv_dtype: KVDType

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_kv_heads", "head_dim", "block_size"):
            require_int(name, getattr(self, name), at_least=1)
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} is no multiple of num_kv_heads={self.num_kv_heads}; "
                "each KV head must serve equally many query heads"
            )
        kv_dtypes = SUPPORTED_PAIRS.get(self.query_dtype)
        if kv_dtypes is None:
            raise UnsupportedError(
                f"queries of {self.query_dtype} are not supported: "
                f"use one of {', '.join(map(str, SUPPORTED_PAIRS))}"
            )
        if self.kv_dtype not in kv_dtypes:
            raise UnsupportedError(
                f"kv_dtype={self.kv_dtype!r} does not go with queries of {self.query_dtype}: "
                f"use one of {', '.join(kv_dtypes)}"
            )

    @classmethod
    def of_cache(
        cls, spec: KVCacheSpec, *, num_heads: int, query_dtype: torch.dtype
    ) -> AttentionShape:
        """The shape of a model with ``num_heads`` query heads that reads a cache of ``spec``."""
        return cls(
            num_heads=num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            block_size=spec.block_size,
            query_dtype=query_dtype,
            kv_dtype=spec.kv_dtype,
        )

    @property
    def group_size(self) -> int:
        """Query heads that share a KV head: query head ``h`` reads KV head ``h // group_size``."""
        return self.num_heads // self.num_kv_heads

    @property
    def is_quantized(self) -> bool:
        """Whether the cache holds INT8 values with float32 scales."""
        return self.kv_dtype in ("int8", "int8-block")


@dataclass(frozen=True, slots=True)
class AttentionBounds:
    """Upper bounds of a step, known on the host: what a launch is sized by and a graph is keyed by.

    Raises:
        ValueError: a negative bound, or a ``max_query_len`` above ``num_tokens``.
    """

    num_seqs: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int

    def __post_init__(self) -> None:
        for name in ("num_seqs", "num_tokens", "max_query_len", "max_seq_len"):
            require_int(name, getattr(self, name), at_least=0)
        if self.max_query_len > self.num_tokens:
            raise ValueError(
                f"max_query_len={self.max_query_len} exceeds num_tokens={self.num_tokens}: "
                "no sequence can have more tokens in a step than the step has"
            )


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """One step's sequences, as device tensors whose addresses may stay fixed from step to step.

    Sequence ``i`` computes the tokens ``query_start_loc[i]`` to ``query_start_loc[i + 1]``; they
    are the last ones of its ``seq_lens[i]`` keys, which lie in the blocks
    ``block_tables[rows[i]]``. Its query ``j`` stands at position ``seq_len - query_len + j``.
    Padding is a sequence of no tokens and no keys; tokens at and beyond ``query_start_loc[S]``
    belong to nobody.

    Attributes:
        query_start_loc: int32 [S + 1], from 0, never decreasing.
        seq_lens: int32 [S], keys visible to each sequence, this step's tokens included.
        rows: int32 [S], the row of ``block_tables`` that each sequence owns.
        block_tables: int32 [R, W].
        slot_mapping: int64 [T], ``block_id * block_size + offset`` of each token.
        block_size: tokens in a block.
        bounds: host upper bounds of the lengths above.
        work_list: what a back end's ``prepare`` derived from the tensors for this step. It goes
            stale
            when they change: prepare again.

    Raises:
        ValueError: a wrong shape, dtype or device, or bounds that the tensors cannot hold.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    rows: Tensor
    block_tables: Tensor
    slot_mapping: Tensor
    block_size: int
    bounds: AttentionBounds
    work_list: object | None = None

    def __post_init__(self) -> None:
        require_int("block_size", self.block_size, at_least=1)
        device = self.query_start_loc.device
        require_tensor("seq_lens", self.seq_lens, (None,), torch.int32, device)
        num_seqs = self.seq_lens.shape[0]
        require_tensor(
            "query_start_loc", self.query_start_loc, (num_seqs + 1,), torch.int32, device
        )
        require_tensor("rows", self.rows, (num_seqs,), torch.int32, device)
        require_tensor("block_tables", self.block_tables, (None, None), torch.int32, device)
        require_tensor("slot_mapping", self.slot_mapping, (None,), torch.int64, device)
        for name in ("query_start_loc", "seq_lens", "rows", "slot_mapping"):
            if not getattr(self, name).is_contiguous():
                raise ValueError(f"{name} is not contiguous: slice whole buffers, without a step")
        if self.block_tables.stride(-1) != 1:
            raise ValueError(
                f"block_tables has stride {self.block_tables.stride(-1)} along its last dimension; "
                "it must be 1: call .contiguous()"
            )
        if self.bounds.num_seqs > num_seqs or self.bounds.num_tokens > self.num_tokens:
            raise ValueError(
                f"{self.bounds} exceed the {num_seqs} sequences or {self.num_tokens} tokens "
                "that the tensors hold"
            )
        capacity = self.block_tables.shape[1] * self.block_size
        if self.bounds.max_seq_len > capacity:
            raise ValueError(
                f"bounds.max_seq_len={self.bounds.max_seq_len} exceeds the {capacity} keys that "
                f"block_tables of width {self.block_tables.shape[1]} can name: widen the tables"
            )

    @property
    def num_seqs(self) -> int:
        """Sequences the tensors hold, padding included."""
        return self.seq_lens.shape[0]

    @property
    def num_tokens(self) -> int:
        """Tokens the tensors hold, padding included."""
        return self.slot_mapping.shape[0]

    @property
    def device(self) -> torch.device:
        """Where the tensors live."""
        return self.query_start_loc.device

    def with_bounds(self, bounds: AttentionBounds) -> AttentionMetadata:
        """The same tensors under other bounds; a work list sized by the old ones is dropped."""
        return dataclasses.replace(self, bounds=bounds, work_list=None)

    def with_work_list(self, work_list: object) -> AttentionMetadata:
        """The same step with what a back end derived for it."""
        return dataclasses.replace(self, work_list=work_list)

    @classmethod
    def from_host(
        cls,
        query_lens: Sequence[int],
        seq_lens: Sequence[int],
        block_tables: Sequence[Sequence[int]],
        *,
        block_size: int,
        num_blocks: int,
        device: torch.device | str = "cpu",
    ) -> AttentionMetadata:
        """Validate a step given as host values and put it on ``device``.

        Args:
            query_lens: tokens each sequence computes in this step.
            seq_lens: keys each sequence sees, its tokens of this step included.
            block_tables: the blocks of each sequence in order; more than needed is allowed.
            block_size: tokens in a block.
            num_blocks: blocks in the pool; every block id must lie below it.
            device: where the tensors go.

        Raises:
            ValueError: lists of different lengths, ``query_len > seq_len``, a table too short for
                its
                sequence, a block id outside the pool, or one slot written by two tokens.
        """
        require_int("block_size", block_size, at_least=1)
        require_int("num_blocks", num_blocks, at_least=1)
        num_seqs = len(query_lens)
        if len(seq_lens) != num_seqs or len(block_tables) != num_seqs:
            raise ValueError(
                f"query_lens, seq_lens and block_tables describe {num_seqs}, {len(seq_lens)} and "
                f"{len(block_tables)} sequences: give one entry of each a sequence"
            )
        slots: list[int] = []
        for i, (query_len, seq_len, table) in enumerate(
            zip(query_lens, seq_lens, block_tables, strict=True)
        ):
            require_int(f"query_lens[{i}]", query_len, at_least=0)
            require_int(f"seq_lens[{i}]", seq_len, at_least=query_len)
            if seq_len > len(table) * block_size:
                raise ValueError(
                    f"seq_lens[{i}]={seq_len} needs {-(-seq_len // block_size)} blocks, but "
                    f"block_tables[{i}] has {len(table)}: allocate blocks before the step"
                )
            if table and (min(table) < 0 or max(table) >= num_blocks):
                raise ValueError(
                    f"block_tables[{i}] names blocks from {min(table)} to {max(table)}; "
                    f"the pool has blocks 0 to {num_blocks - 1}"
                )
            slots.extend(
                table[position // block_size] * block_size + position % block_size
                for position in range(seq_len - query_len, seq_len)
            )
        if len(set(slots)) != len(slots):
            raise ValueError(
                "two tokens of one step would be written to the same slot: a block that is written "
                "must belong to one sequence alone (copy it first)"
            )
        width = max(map(len, block_tables), default=0)
        padded = [[*table, *[0] * (width - len(table))] for table in block_tables]
        return cls(
            query_start_loc=torch.tensor(
                [0, *accumulate(query_lens)], dtype=torch.int32, device=device
            ),
            seq_lens=torch.tensor(list(seq_lens), dtype=torch.int32, device=device),
            rows=torch.arange(num_seqs, dtype=torch.int32, device=device),
            block_tables=torch.tensor(padded, dtype=torch.int32, device=device).view(
                num_seqs, width
            ),
            slot_mapping=torch.tensor(slots, dtype=torch.int64, device=device),
            block_size=block_size,
            bounds=AttentionBounds(
                num_seqs=num_seqs,
                num_tokens=len(slots),
                max_query_len=max(query_lens, default=0),
                max_seq_len=max(seq_lens, default=0),
            ),
        )
