"""The recount behind `BlockManager.verify`: every fact that is stored twice must agree."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping

from pagetide_kvcache.block_pool import BlockPool
from pagetide_kvcache.copies import PlanCopies
from pagetide_kvcache.errors import InvariantError
from pagetide_kvcache.prefix_index import PrefixIndex
from pagetide_kvcache.sequence import SequenceState

__all__ = ["verify_books"]


def verify_books(
    pool: BlockPool,
    index: PrefixIndex,
    copies: PlanCopies,
    sequences: Mapping[Hashable, SequenceState],
) -> None:
    """Raises InvariantError at the first contradiction."""
    _verify_reference_counts(pool, sequences)
    _verify_each_block_is_in_one_place(pool, index, copies)
    index.verify()
    for seq_id, sequence in sequences.items():
        _check(
            sequence.path.num_blocks <= len(sequence.block_ids),
            f"sequence {seq_id!r}: its path is longer than its block table",
        )


def _verify_reference_counts(pool: BlockPool, sequences: Mapping[Hashable, SequenceState]) -> None:
    held: Counter[int] = Counter()
    for seq_id, sequence in sequences.items():
        _check(
            len(set(sequence.block_ids)) == len(sequence.block_ids),
            f"sequence {seq_id!r} holds a block twice",
        )
        held.update(sequence.block_ids)
    for block_id, count in enumerate(pool.ref_counts):
        _check(
            count == held[block_id],
            f"block {block_id}: {count} references counted, {held[block_id]} held",
        )


def _verify_each_block_is_in_one_place(
    pool: BlockPool, index: PrefixIndex, copies: PlanCopies
) -> None:
    """A block is held by sequences, or free, or findable and unreferenced, or held for a copy."""
    places: Counter[int] = Counter(pool.free_block_ids())
    _check(places.total() == pool.num_free, "the number of free blocks is wrong")
    places.update(iter(index.unreferenced))
    for block_id, count in enumerate(pool.ref_counts):
        is_waiting = not count and block_id in copies.held
        places[block_id] += bool(count) + is_waiting
        _check(places[block_id] == 1, f"block {block_id} is in {places[block_id]} places, not 1")
        is_kept = block_id in index.unreferenced or bool(count) or is_waiting
        _check(is_kept or block_id not in index, f"block {block_id} is free and findable")
    _check(len(places) == pool.total_blocks, "a block that the pool does not have is free")
    _check(all(b in index for b in index.unreferenced), "a block to be evicted is not findable")


def _check(is_true: bool, what: str) -> None:
    if not is_true:
        raise InvariantError(what)
