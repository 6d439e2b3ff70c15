"""What can go wrong in the block manager. Every error leaves the state as it was."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = [
    "BlockRangeError",
    "InvariantError",
    "KVCacheError",
    "OutOfBlocksError",
    "SequenceExistsError",
    "UnknownSequenceError",
]


class KVCacheError(Exception):
    """Base of every error of this package, plain bad arguments (`ValueError`) aside."""


class OutOfBlocksError(KVCacheError):
    """More blocks are needed than are free or can be evicted.

    Attributes:
        needed: blocks that the call needs beyond those it can share.
        available: blocks that it could have been given.
    """

    def __init__(self, needed: int, available: int) -> None:
        super().__init__(
            f"needs {needed} more block(s), {available} available: "
            "free or truncate a sequence, or make the pool larger"
        )
        self.needed = needed
        self.available = available

    def __reduce__(self) -> tuple[type[OutOfBlocksError], tuple[int, int]]:
        return type(self), (self.needed, self.available)


class UnknownSequenceError(KVCacheError, KeyError):
    """No sequence has this id: it was never given blocks, or it was freed already."""

    def __init__(self, seq_id: Hashable) -> None:
        super().__init__(seq_id)
        self.seq_id = seq_id

    def __str__(self) -> str:
        return f"no sequence {self.seq_id!r}: it was never allocated, or was freed already"


class SequenceExistsError(KVCacheError, ValueError):
    """The sequence that was to receive blocks holds some already."""

    def __init__(self, seq_id: Hashable) -> None:
        super().__init__(seq_id)
        self.seq_id = seq_id

    def __str__(self) -> str:
        return f"sequence {self.seq_id!r} holds blocks already: free it first, or use another id"


class BlockRangeError(KVCacheError, ValueError):
    """A position, block index or number of blocks lies outside what the sequence holds."""


class InvariantError(KVCacheError):
    """`BlockManager.verify` found a contradiction in the books: a defect of this package."""
