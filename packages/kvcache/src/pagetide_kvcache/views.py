"""What a caller may look at: live to read, with nothing in it to change."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping, Set

from pagetide_kvcache.block_pool import BlockPool
from pagetide_kvcache.errors import UnknownSequenceError
from pagetide_kvcache.sequence import SequenceState

__all__ = ["FreeBlocks", "RefCounts", "SequenceBlocks"]


class FreeBlocks(Set[int]):
    """The free blocks. Iterates in the order in which they will be given away; `len` is O(1)."""

    __slots__ = ("_kept", "_pool")

    def __init__(self, pool: BlockPool, kept: tuple[Collection[int], ...]) -> None:
        self._pool = pool
        self._kept = kept

    def __len__(self) -> int:
        return self._pool.num_free

    def __iter__(self) -> Iterator[int]:
        return self._pool.free_block_ids()

    def __contains__(self, block_id: object) -> bool:
        return (
            isinstance(block_id, int)
            and 0 <= block_id < self._pool.total_blocks
            and not self._pool.ref_counts[block_id]
            and not any(block_id in kept for kept in self._kept)
        )

    @classmethod
    def _from_iterable(cls, block_ids: Iterable[int]) -> frozenset[int]:  # type: ignore[override]
        return frozenset(block_ids)

    def __repr__(self) -> str:
        return f"<{len(self)} free of {self._pool.total_blocks} blocks>"


class RefCounts(Mapping[int, int]):
    """Block id to the number of sequences that hold it, 0 for those nobody holds."""

    __slots__ = ("_pool",)

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    def __getitem__(self, block_id: int) -> int:
        if not 0 <= block_id < self._pool.total_blocks:
            raise KeyError(block_id)
        return self._pool.ref_counts[block_id]

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._pool.total_blocks))

    def __len__(self) -> int:
        return self._pool.total_blocks

    def __repr__(self) -> str:
        held = sum(1 for count in self._pool.ref_counts if count)
        return f"<reference counts of {len(self)} blocks, {held} held>"


class SequenceBlocks(Mapping[Hashable, tuple[int, ...]]):
    """Sequence id to its block table, as a tuple made when asked for."""

    __slots__ = ("_sequences",)

    def __init__(self, sequences: Mapping[Hashable, SequenceState]) -> None:
        self._sequences = sequences

    def __getitem__(self, seq_id: Hashable) -> tuple[int, ...]:
        try:
            return tuple(self._sequences[seq_id].block_ids)
        except KeyError:
            raise UnknownSequenceError(seq_id) from None

    def __iter__(self) -> Iterator[Hashable]:
        return iter(self._sequences)

    def __len__(self) -> int:
        return len(self._sequences)

    def __contains__(self, seq_id: object) -> bool:
        return seq_id in self._sequences

    def __repr__(self) -> str:
        return f"<block tables of {len(self)} sequences>"
