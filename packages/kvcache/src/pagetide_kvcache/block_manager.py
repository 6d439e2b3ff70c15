"""The block manager: the only thing that changes block tables, reference counts and the index."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Mapping, Sequence, Set
from typing import SupportsIndex

from pagetide_kvcache.block_pool import BlockPool
from pagetide_kvcache.copies import BlockCopy, PlanCopies
from pagetide_kvcache.errors import (
    BlockRangeError,
    OutOfBlocksError,
    SequenceExistsError,
    UnknownSequenceError,
)
from pagetide_kvcache.prefix_index import PrefixIndex, PrefixPath
from pagetide_kvcache.sequence import Admission, SequenceState
from pagetide_kvcache.tokens import TOKEN_BYTES, token_bytes
from pagetide_kvcache.verification import verify_books
from pagetide_kvcache.views import FreeBlocks, RefCounts, SequenceBlocks

__all__ = ["BlockManager"]


class BlockManager:
    """Gives the blocks of a pool to sequences, shares them, and finds cached prefixes again.

    A sequence is an id (any hashable) with a *block table*, the ids of its blocks in order: token
    `p` lives in slot `p % block_size` of block `table[p // block_size]`. A block in several tables
    is *shared*; it is never written, but copied by whoever wants to write first, and the last
    holder writes in place. A full block whose tokens were committed is *findable*: later prompts
    with the same beginning get it by reference. Nobody writes a findable block either. When its
    last holder leaves it stays findable, *unreferenced*, until its memory is needed; the least
    recently used goes first.

    Every call happens whole or, when it raises, not at all. The cost is O(blocks named in the
    call), whatever the size of the pool, amortised: the prefix index is a Python dict, which
    rebuilds itself now and then (some 0.1 s when a million blocks are cached). The manager moves
    no bytes: it returns the copies that the device must perform. It is not thread-safe.

    Args:
        total_blocks: blocks in the pool, at least 1; their ids are `0 .. total_blocks - 1`.
        block_size: tokens a block, at least 1.
        enable_prefix_cache: whether `commit` makes blocks findable.

    Raises:
        ValueError: a size is below 1.
    """

    def __init__(
        self, total_blocks: int, block_size: int = 16, *, enable_prefix_cache: bool = True
    ) -> None:
        self._total_blocks = _at_least("total_blocks", total_blocks, 1)
        self._block_size = _at_least("block_size", block_size, 1)
        self._enable_prefix_cache = enable_prefix_cache
        self._pool = BlockPool(self._total_blocks)
        self._index = PrefixIndex(self._total_blocks, self._block_size)
        self._copies = PlanCopies()
        self._sequences: dict[Hashable, SequenceState] = {}
        kept = (self._index.unreferenced, self._copies.held)
        self._free_blocks = FreeBlocks(self._pool, kept)
        self._ref_count = RefCounts(self._pool)
        self._sequence_blocks = SequenceBlocks(self._sequences)

    # ---- what there is to see -------------------------------------------------------------------

    @property
    def total_blocks(self) -> int:
        """Blocks in the pool."""
        return self._total_blocks

    @property
    def block_size(self) -> int:
        """Tokens a block."""
        return self._block_size

    @property
    def free_blocks(self) -> Set[int]:
        """The blocks nobody holds and nobody can find: a live, read-only set; `len` is O(1)."""
        return self._free_blocks

    @property
    def num_available_blocks(self) -> int:
        """Blocks that could be given away now: the free ones and the unreferenced findable ones."""
        return self._pool.num_free + len(self._index.unreferenced)

    @property
    def ref_count(self) -> Mapping[int, int]:
        """Block id to the number of sequences that hold it: a live, read-only mapping."""
        return self._ref_count

    @property
    def sequence_blocks(self) -> Mapping[Hashable, tuple[int, ...]]:
        """Sequence id to its block table: a live, read-only mapping.

        Looking up an unknown id raises `UnknownSequenceError`, which is a `KeyError`.
        """
        return self._sequence_blocks

    # ---- giving and taking back -----------------------------------------------------------------

    def allocate_blocks(self, seq_id: Hashable, n: int) -> tuple[int, ...]:
        """Appends `n` new blocks to a sequence, which begins to exist if it did not.

        Returns:
            The new block ids, in table order.

        Raises:
            OutOfBlocksError: fewer than `n` are available.
            ValueError: `n` is negative.
        """
        n = _at_least("n", n, 0)
        self._require(n)
        sequence = self._get_or_create(seq_id)
        block_ids = self._take(n)
        sequence.block_ids.extend(block_ids)
        return tuple(block_ids)

    def append_blocks(self, seq_ids: Sequence[Hashable]) -> tuple[int, ...]:
        """Appends one new block to each of these sequences: `grow` for many at a block boundary.

        Returns:
            The new block ids, one a sequence in the order given.

        Raises:
            OutOfBlocksError: there is not one for each; none was appended.
            UnknownSequenceError: one of them is unknown; none was appended.
        """
        try:
            sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise UnknownSequenceError(error.args[0]) from None
        self._require(len(sequences))
        block_ids = self._take(len(sequences))
        for sequence, block_id in zip(sequences, block_ids, strict=True):
            sequence.block_ids.append(block_id)
        return tuple(block_ids)

    def free_sequence(self, seq_id: Hashable) -> None:
        """Drops the sequence and its references, last block first.

        So a chain of cached blocks is evicted from its tail: its head is what others can share.

        Raises:
            UnknownSequenceError: there is no such sequence, for instance because it was freed.
        """
        self._release(reversed(self._get(seq_id).block_ids))
        del self._sequences[seq_id]

    def truncate(self, seq_id: Hashable, num_tokens: int) -> None:
        """Gives back the blocks behind the first `num_tokens` tokens, last block first.

        If the last block left is findable it stays so: the next `grow` over it copies it, or takes
        it out of the index when nobody else holds it.

        Raises:
            UnknownSequenceError: there is no such sequence.
            BlockRangeError: the sequence's blocks hold fewer than `num_tokens` tokens.
        """
        sequence = self._get(seq_id)
        num_kept = self._num_blocks_holding(sequence, num_tokens)
        dropped = sequence.block_ids[num_kept:]
        del sequence.block_ids[num_kept:]
        self._index.shorten(sequence.path, num_tokens // self._block_size, sequence.block_ids)
        self._release(reversed(dropped))

    # ---- sharing and copying --------------------------------------------------------------------

    def share_prefix(self, source: Hashable, target: Hashable, n_blocks: int) -> None:
        """Gives `target` the first `n_blocks` blocks of `source` by reference.

        Raises:
            UnknownSequenceError: there is no sequence `source`.
            SequenceExistsError: `target` holds blocks already.
            BlockRangeError: `source` holds fewer than `n_blocks`.
            ValueError: `n_blocks` is negative.
        """
        n_blocks = _at_least("n_blocks", n_blocks, 0)
        self._share(source, target, n_blocks, n_blocks * self._block_size)

    def fork(self, source: Hashable, target: Hashable, num_tokens: int) -> None:
        """Lets `target` begin with the first `num_tokens` tokens of `source`, without a copy.

        A partly filled last block is shared too: `grow` copies it for whoever writes first.

        Raises:
            UnknownSequenceError: there is no sequence `source`.
            SequenceExistsError: `target` holds blocks already.
            BlockRangeError: the blocks of `source` hold fewer than `num_tokens` tokens.
        """
        num_shared = self._num_blocks_holding(self._get(source), num_tokens)
        self._share(source, target, num_shared, num_tokens)

    def cow_block(self, seq_id: Hashable, block_index: int) -> BlockCopy | None:
        """Makes one block of a sequence its own, content kept.

        To change the content, `truncate` first and then `grow`: a block that is findable stays so
        here.

        Returns:
            The copy to perform, or `None` when the block was held once and nothing had to change.

        Raises:
            UnknownSequenceError: there is no such sequence.
            BlockRangeError: it has no block at `block_index`.
            OutOfBlocksError: the block is shared and no block is available for the copy.
        """
        sequence = self._get(seq_id)
        block_index = operator.index(block_index)
        if not 0 <= block_index < len(sequence.block_ids):
            raise BlockRangeError(
                f"block_index={block_index}: sequence {seq_id!r} holds "
                f"{len(sequence.block_ids)} block(s)"
            )
        if not self._is_shared(sequence.block_ids[block_index]):
            return None
        self._require(1)
        return self._copy_block(sequence, block_index)

    def grow(self, seq_id: Hashable, start: int, end: int) -> tuple[BlockCopy, ...]:
        """Makes the positions `start .. end - 1` writable by this sequence alone.

        Missing blocks are appended. A shared block among them is replaced by a copy; one that only
        this sequence holds but that is findable leaves the index. Positions from `start` on no
        longer count as committed.

        Returns:
            The copies to perform before anything is written.

        Raises:
            UnknownSequenceError: there is no such sequence.
            OutOfBlocksError: the new blocks and the copies together are more than are available.
            BlockRangeError: `start` lies beyond the position after the last block.
            ValueError: `start` is negative or greater than `end`.
        """
        sequence = self._get(seq_id)
        start = _at_least("start", start, 0)
        end = _at_least("end", end, start)
        block_ids = sequence.block_ids
        num_held = len(block_ids)
        if start > num_held * self._block_size:
            raise BlockRangeError(
                f"start={start} leaves a gap: sequence {seq_id!r} holds blocks for "
                f"{num_held * self._block_size} token(s)"
            )
        if start == end:
            return ()
        first = start // self._block_size
        num_needed = self._num_blocks(end)
        touched = range(first, min(num_held, num_needed))
        shared = [index for index in touched if self._is_shared(block_ids[index])]
        num_appended = max(num_needed - num_held, 0)
        self._require(len(shared) + num_appended)

        self._index.shorten(sequence.path, first, block_ids)
        copies = tuple(self._copy_block(sequence, index) for index in shared)
        for index in touched:
            if block_ids[index] in self._index:
                self._index.remove(block_ids[index])
        block_ids.extend(self._take(num_appended))
        return copies

    # ---- the prefix cache -----------------------------------------------------------------------

    def match_prefix(self, tokens: Sequence[int], *, salt: Hashable = None) -> int:
        """How many blocks of these tokens `admit` would find. Asking changes nothing.

        At most `(len(tokens) - 1) // block_size`: even of a prompt that is known whole, one token
        is left to compute, for its logits are needed.

        Raises:
            ValueError: a token id does not fit in int32.
        """
        return len(self._find(tokens, len(tokens), salt))

    def follow_prefix(
        self, tokens: Sequence[int], path: PrefixPath | None = None, *, salt: Hashable = None
    ) -> PrefixPath:
        """`match_prefix` for who asks again and again: its answer goes on from the last one.

        The path is a hint and holds nothing: the blocks it went through may be evicted, and `admit`
        decides on what it finds itself. Asking again for the same tokens costs one look-up, and one
        more for each block that became findable meanwhile.

        Args:
            tokens: the tokens known; those of an earlier call must be their beginning.
            path: what the last call returned, for the same salt; it is updated.
            salt: as for `admit`.

        Returns:
            The path; its `num_blocks` is the answer.

        Raises:
            ValueError: a token id does not fit in int32.
        """
        if path is None:
            path = PrefixPath((salt,))
        elif not self._index.is_intact(path):
            path.reset()
        size = self._block_size
        num_whole = max(len(tokens) - 1, 0) // size
        while path.num_blocks < num_whole:
            start = path.num_blocks * size
            if not self._index.step(path, token_bytes(tokens, start, start + size)):
                break
        return path

    def admit(
        self, seq_id: Hashable, tokens: Sequence[int], num_tokens: int, *, salt: Hashable = None
    ) -> Admission:
        """Starts a sequence: its cached prefix by reference, new blocks for up to `num_tokens`.

        Args:
            seq_id: the new sequence.
            tokens: the tokens known; those within `num_tokens` are looked up, and at least one
                of them is left to compute.
            num_tokens: tokens that the block table must have room for.
            salt: only blocks committed under an equal salt are found.

        Raises:
            SequenceExistsError: `seq_id` holds blocks already.
            OutOfBlocksError: not enough blocks are available beside the cached ones.
            TypeError: `seq_id` or `salt` cannot be hashed.
            ValueError: `num_tokens` is negative, or a token id does not fit in int32.
        """
        num_tokens = _at_least("num_tokens", num_tokens, 0)
        hash(salt)  # `commit` will need it, when refusing would be too late
        self._check_is_empty(seq_id)
        cached = self._find(tokens, min(len(tokens), num_tokens), salt)
        num_new = self._num_blocks(num_tokens) - len(cached)
        if cached:
            unreferenced = self._index.unreferenced
            num_revived = len([block_id for block_id in cached if block_id in unreferenced])
            self._require(num_new, num_reserved=num_revived)
            self._pool.share(cached)
            self._index.revive(cached)
            block_ids = cached + self._take(num_new)
        else:
            self._require(num_new)
            block_ids = self._take(num_new)
        path = self._index.path_through((salt,), cached)
        self._sequences[seq_id] = SequenceState(block_ids, path)
        return Admission(tuple(block_ids), len(cached) * self._block_size)

    def commit(self, seq_id: Hashable, tokens: Sequence[int], num_tokens: int) -> None:
        """Makes the full blocks within the first `num_tokens` tokens findable.

        Call it only for tokens whose step has succeeded: what is findable must be in the cache.
        A block equal to one that is findable already stays unfindable. What was committed before
        is not looked at again, so a call costs O(new full blocks).

        Args:
            seq_id: the sequence.
            tokens: its tokens from the first on, at least `num_tokens` of them.
            num_tokens: how many of them are computed and stored.

        Raises:
            UnknownSequenceError: there is no such sequence.
            BlockRangeError: the sequence's blocks hold fewer than `num_tokens` tokens.
            ValueError: `tokens` has fewer than `num_tokens`, or an id does not fit in int32.
        """
        sequence = self._get(seq_id)
        block_size, block_ids, path = self._block_size, sequence.block_ids, sequence.path
        if not 0 <= num_tokens <= len(tokens):
            raise ValueError(
                f"num_tokens={num_tokens} must be in 0..{len(tokens)}, the tokens given"
            )
        if num_tokens > len(block_ids) * block_size:
            raise self._too_many_tokens(sequence, num_tokens)
        num_full = num_tokens // block_size
        if num_full <= path.num_blocks or not self._enable_prefix_cache:
            return
        is_intact = self._index.is_intact(path)
        first = path.num_blocks if is_intact else 0
        data = token_bytes(tokens, first * block_size, num_full * block_size)
        if not is_intact:
            path.reset()
        self._index.extend(path, data, block_ids[first:num_full])

    def commit_next(
        self, seq_ids: Sequence[Hashable], block_indices: Sequence[int], contents: Sequence[bytes]
    ) -> list[int]:
        """Makes the next block of each sequence findable: `commit` for many at a block boundary.

        Args:
            seq_ids: the sequences, none of them twice.
            block_indices: the block of each that was filled, an index into its block table.
            contents: the tokens of each of these blocks, as the bytes of int32.

        Returns:
            Positions in `seq_ids` of the sequences for which more has to be looked at than their
            last block. Nothing was done for them: `commit` them.

        Raises:
            UnknownSequenceError: one of them is unknown; nothing was committed.
            BlockRangeError: one of them has no such block; nothing was committed.
            ValueError: `contents` are not one whole block a sequence; nothing was committed.
        """
        num_bytes = self._block_size * TOKEN_BYTES
        lengths = [len(content) for content in contents]
        if lengths != [num_bytes] * len(seq_ids):
            raise ValueError(
                f"contents must be {len(seq_ids)} times the {num_bytes} bytes of a block, got "
                f"lengths {lengths}"
            )
        if not self._enable_prefix_cache:
            return []
        try:
            sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise UnknownSequenceError(error.args[0]) from None
        try:
            ends = zip(sequences, block_indices, strict=True)
            own_ids = [sequence.block_ids[index] for sequence, index in ends]
        except IndexError:
            raise BlockRangeError(
                f"block_indices={list(block_indices)} go beyond a sequence's block table"
            ) from None
        paths = [sequence.path for sequence in sequences]
        return self._index.extend_each(paths, block_indices, own_ids, contents)

    def uncache(self, seq_id: Hashable) -> None:
        """Makes a sequence's blocks unfindable, whoever committed them: they proved to be wrong.

        Who holds them keeps them; nobody finds them again.

        Raises:
            UnknownSequenceError: there is no such sequence.
        """
        sequence = self._get(seq_id)
        for block_id in sequence.block_ids:
            if block_id in self._index:
                self._index.remove(block_id)
        sequence.path.reset()

    # ---- plans and proof ------------------------------------------------------------------------

    def start_plan(self) -> None:
        """Says that the copies returned until now belong to a plan that is complete.

        From the first call on, the blocks that a returned copy names are given to nobody new until
        the next call, so that within a plan no block is the destination of two copies, nor source
        of one and destination of another. A caller that performs each copy before its next call
        never needs this, and no block is ever held back from it.
        """
        held = self._copies.start()
        if held:
            self._recycle([b for b in held if not self._pool.ref_counts[b]])

    def verify(self) -> None:
        """Recounts everything, in O(pool).

        Raises:
            InvariantError: the books contradict each other.
        """
        verify_books(self._pool, self._index, self._copies, self._sequences)

    # ---- the parts of the above -----------------------------------------------------------------

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)

    def _is_shared(self, block_id: int) -> bool:
        return self._pool.ref_counts[block_id] > 1

    def _get(self, seq_id: Hashable) -> SequenceState:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise UnknownSequenceError(seq_id) from None

    def _get_or_create(self, seq_id: Hashable) -> SequenceState:
        sequence = self._sequences.get(seq_id)
        if sequence is None:
            sequence = self._sequences[seq_id] = SequenceState([], PrefixPath((None,)))
        return sequence

    def _check_is_empty(self, seq_id: Hashable) -> None:
        sequence = self._sequences.get(seq_id)
        if sequence is not None and sequence.block_ids:
            raise SequenceExistsError(seq_id)

    def _num_blocks_holding(self, sequence: SequenceState, num_tokens: int) -> int:
        """Blocks of the sequence that hold its first `num_tokens` tokens; it must have them."""
        num_blocks = self._num_blocks(_at_least("num_tokens", num_tokens, 0))
        if num_blocks > len(sequence.block_ids):
            raise self._too_many_tokens(sequence, num_tokens)
        return num_blocks

    def _too_many_tokens(self, sequence: SequenceState, num_tokens: int) -> BlockRangeError:
        return BlockRangeError(
            f"num_tokens={num_tokens} exceeds the {len(sequence.block_ids)} block(s) of "
            f"{self._block_size} tokens that the sequence holds: grow it first"
        )

    def _require(self, num_blocks: int, *, num_reserved: int = 0) -> None:
        """Refuses a call before it changes anything."""
        available = self.num_available_blocks - num_reserved
        if num_blocks > available:
            raise OutOfBlocksError(num_blocks, available)

    def _take(self, num_blocks: int) -> list[int]:
        """New blocks with one reference each, evicting as needed; `_require` went before."""
        num_missing = num_blocks - self._pool.num_free
        if num_missing > 0:
            self._pool.put(self._index.evict(num_missing))
        return self._pool.take(num_blocks)

    def _release(self, block_ids: Iterable[int]) -> None:
        """Drops one reference of each block, in this order."""
        unreferenced = self._pool.release(block_ids)
        held = self._copies.held
        if held:
            unreferenced = [block_id for block_id in unreferenced if block_id not in held]
        self._recycle(unreferenced)

    def _recycle(self, unreferenced: Iterable[int]) -> None:
        """Keeps what can be found again; the rest becomes free."""
        self._pool.put(self._index.retire(unreferenced))

    def _share(self, source: Hashable, target: Hashable, num_blocks: int, num_tokens: int) -> None:
        sequence = self._get(source)
        self._check_is_empty(target)
        if num_blocks > len(sequence.block_ids):
            raise BlockRangeError(
                f"n_blocks={num_blocks}: sequence {source!r} holds "
                f"{len(sequence.block_ids)} block(s)"
            )
        block_ids = sequence.block_ids[:num_blocks]
        path = sequence.path.copy()
        self._index.shorten(path, num_tokens // self._block_size, block_ids)
        self._pool.share(block_ids)
        self._sequences[target] = SequenceState(block_ids, path)

    def _copy_block(self, sequence: SequenceState, block_index: int) -> BlockCopy:
        (destination,) = self._take(1)
        source = sequence.block_ids[block_index]
        sequence.block_ids[block_index] = destination
        copy = self._copies.add(source, destination)
        self._release((source,))
        return copy

    def _find(self, tokens: Sequence[int], num_tokens: int, salt: Hashable) -> list[int]:
        """The cached blocks of the first `num_tokens` tokens, of which one is left to compute."""
        num_whole = max(num_tokens - 1, 0) // self._block_size
        if not num_whole or not len(self._index):
            return []
        return self._index.find((salt,), token_bytes(tokens, 0, num_whole * self._block_size))


def _at_least(name: str, value: SupportsIndex, minimum: int) -> int:
    value = operator.index(value)
    if value < minimum:
        raise ValueError(f"{name}={value} must be at least {minimum}")
    return value
