"""The blocks of the pool: which are free, and how many holders each of the others has."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from itertools import chain

from pagetide_kvcache.errors import InvariantError

__all__ = ["BlockPool"]


class BlockPool:
    """Free blocks and reference counts; knows nothing of sequences or of content.

    A block is free when nobody holds it *and* nothing in it is worth finding again. Freed blocks
    wait on a stack, so the one whose memory was touched last is used next. Blocks never used yet
    are a counter, so a pool of ten million blocks costs four bytes a block and no Python integers.

    Attributes:
        total_blocks: number of blocks; their ids are `0 .. total_blocks - 1`.
        ref_counts: int32, one a block: how many sequences hold it.
    """

    __slots__ = ("_freed", "_num_ever_used", "ref_counts", "total_blocks")

    def __init__(self, total_blocks: int) -> None:
        self.total_blocks = total_blocks
        self.ref_counts = array("i", [0]) * total_blocks
        self._freed: list[int] = []
        self._num_ever_used = 0

    @property
    def num_free(self) -> int:
        return len(self._freed) + self.total_blocks - self._num_ever_used

    def free_block_ids(self) -> Iterator[int]:
        """The free blocks, in the order in which `take` hands them out."""
        return chain(reversed(self._freed), range(self._num_ever_used, self.total_blocks))

    def take(self, num_blocks: int) -> list[int]:
        """Hands out free blocks with one reference each; the caller has checked `num_free`."""
        freed = self._freed
        split = max(len(freed) - num_blocks, 0)
        block_ids = freed[split:]
        block_ids.reverse()
        del freed[split:]
        if len(block_ids) < num_blocks:
            first = self._num_ever_used
            self._num_ever_used = first + num_blocks - len(block_ids)
            block_ids.extend(range(first, self._num_ever_used))
        ref_counts = self.ref_counts
        for block_id in block_ids:
            ref_counts[block_id] = 1
        return block_ids

    def share(self, block_ids: Iterable[int]) -> None:
        """Adds a reference to each block."""
        ref_counts = self.ref_counts
        for block_id in block_ids:
            ref_counts[block_id] += 1

    def release(self, block_ids: Iterable[int]) -> list[int]:
        """Drops a reference of each block; returns those nobody holds now, in the order given.

        They are not free yet: the manager decides whether their content is worth keeping.

        Raises:
            InvariantError: a block has fewer references than were to be dropped; nothing changed.
        """
        ref_counts = self.ref_counts
        unreferenced = []
        released = list(block_ids)
        for position, block_id in enumerate(released):
            count = ref_counts[block_id] - 1
            if count <= 0:
                if count:
                    self.share(released[:position])
                    raise InvariantError(f"block {block_id} is released more often than it is held")
                unreferenced.append(block_id)
            ref_counts[block_id] = count
        return unreferenced

    def put(self, block_ids: Iterable[int]) -> None:
        """Makes blocks free that nobody holds; the last one given is the next one taken."""
        self._freed.extend(block_ids)
