"""The block manager against a model with content, by hypothesis and by seeded fuzz.

The model keeps what a device would keep: a memory of cells, one a slot. The cell of a token holds
a number that stands for that token *and everything before it* (and the salt), as its keys and
values would. The model performs the manager's copies, writes tokens through the block tables, and
asserts that every computed token of every sequence is still what it was. So a block shared,
evicted, reused or found wrongly shows as wrong content, however consistent the books are.
"""

from __future__ import annotations

import random
from array import array
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pagetide_kvcache import (
    Admission,
    BlockCopy,
    BlockManager,
    BlockRangeError,
    OutOfBlocksError,
    SequenceExistsError,
    UnknownSequenceError,
)
from pagetide_kvcache.block_pool import BlockPool
from pagetide_kvcache.copies import PlanCopies
from pagetide_kvcache.prefix_index import PrefixIndex

BLOCK_SIZES = (1, 2, 3, 4, 16)
MAX_SEQUENCES = 7
NUM_TOKEN_IDS = 3  # few, so that prefixes meet


@dataclass
class ModelSequence:
    """Tokens known, how many of them are in the table's cells, how many of these for certain."""

    salt: Hashable
    tokens: array[int] = field(default_factory=lambda: array("i"))
    num_computed: int = 0  # some may be in the plan that is being made
    num_executed: int = 0


class Harness:
    """A manager, the model beside it, and every operation on both."""

    def __init__(self, total_blocks: int, block_size: int, *, uses_plans: bool) -> None:
        self.manager = BlockManager(total_blocks, block_size)
        self.block_size = block_size
        self.uses_plans = uses_plans
        self.memory = [[-1] * block_size for _ in range(total_blocks)]
        self.sequences: dict[int, ModelSequence] = {}
        self.contents: dict[tuple[Hashable, int], int] = {}
        self.committed: set[int] = set()  # contents of the last cells of committed full blocks
        self.has_forgotten = False  # whether anything ever left the index
        self.copies: list[BlockCopy] = []
        # Sequence and position to content. The blocks are those of the tables when the plan is
        # complete: a fork later in the plan may still make its source move.
        self.writes: dict[tuple[int, int], int] = {}
        self.shuffle = random.Random(0).shuffle
        self.next_id = 0
        if uses_plans:
            self.manager.start_plan()

    # ---- the model's own arithmetic -------------------------------------------------------------

    def content_of(self, sequence: ModelSequence) -> list[int]:
        """A number for each token that no other past and token has."""
        numbers: list[int] = []
        parent: Hashable = ("root", sequence.salt)
        for token in sequence.tokens:
            number = self.contents.setdefault((parent, token), len(self.contents))
            numbers.append(number)
            parent = number
        return numbers

    def table(self, seq_id: int) -> tuple[int, ...]:
        return self.manager.sequence_blocks[seq_id]

    def num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def references(self) -> Counter[int]:
        return Counter(b for seq_id in self.sequences for b in self.table(seq_id))

    def num_available(self) -> int:
        held = {b for copy in self.copies for b in (copy.source, copy.destination)}
        return self.manager.total_blocks - len(held | self.references().keys())

    def snapshot(self) -> tuple[object, ...]:
        manager = self.manager
        return (
            dict(manager.sequence_blocks),
            dict(manager.ref_count),
            list(manager.free_blocks),
            list(manager._index.unreferenced),
            list(manager._index._keys),
            list(manager._copies.held),
        )

    def pick(self, number: int) -> int | None:
        seq_ids = list(self.sequences)
        return seq_ids[number % len(seq_ids)] if seq_ids else None

    @contextmanager
    def expect(self, error: type[Exception] | None) -> Iterator[None]:
        """The block must raise just this, and then must have changed nothing."""
        if error is None:
            yield
            return
        before = self.snapshot()
        with pytest.raises(error):
            yield
        assert self.snapshot() == before

    @contextmanager
    def needing(self, num_blocks: int, num_available: int | None = None) -> Iterator[bool]:
        """Expects OutOfBlocksError just when the model says so; gives whether there is room."""
        available = self.num_available() if num_available is None else num_available
        fits = num_blocks <= available
        if num_blocks > len(self.manager.free_blocks):
            self.has_forgotten = True
        with self.expect(None if fits else OutOfBlocksError):
            yield fits

    # ---- operations -----------------------------------------------------------------------------

    def admit(self, number: int, tokens: list[int], keep: int, extra: int, salt: Hashable) -> None:
        """Admits a new prompt: the beginning of a known sequence, then `tokens`."""
        donor = self.pick(number)
        known = self.sequences[donor].tokens[:keep] if donor is not None else array("i")
        sequence = ModelSequence(salt, known + array("i", tokens))
        num_tokens = len(sequence.tokens) + extra
        num_cached = self.manager.match_prefix(sequence.tokens, salt=salt)
        assert num_cached <= max(len(sequence.tokens) - 1, 0) // self.block_size
        if not self.has_forgotten:
            assert num_cached == self.longest_committed(sequence)
        before = set(self.references())
        admission = None
        unreferenced = list(self.manager._index.unreferenced)
        # The blocks found are not evicted to make room for the others.
        found = self.manager._find(sequence.tokens, len(sequence.tokens), salt)
        reserved = sum(b in unreferenced for b in found)
        needed = self.num_blocks(num_tokens) - num_cached
        with self.needing(needed, self.num_available() - reserved):
            admission = self.manager.admit(self.next_id, sequence.tokens, num_tokens, salt=salt)
        if admission is None:
            return
        assert isinstance(admission, Admission)
        assert admission.num_cached_tokens == num_cached * self.block_size
        assert admission.block_ids == self.manager.sequence_blocks[self.next_id]
        assert len(admission.block_ids) == self.num_blocks(num_tokens)
        assert not before & set(admission.block_ids[num_cached:])
        sequence.num_computed = sequence.num_executed = admission.num_cached_tokens
        self.sequences[self.next_id] = sequence
        self.next_id += 1

    def longest_committed(self, sequence: ModelSequence) -> int:
        numbers = self.content_of(sequence)
        num_blocks = 0
        for end in range(self.block_size, len(numbers), self.block_size):
            if numbers[end - 1] not in self.committed:
                break
            num_blocks += 1
        return num_blocks

    def compute(self, number: int, tokens: list[int], num_tokens: int) -> None:
        """Grows a sequence and computes its next tokens, known ones first."""
        seq_id = self.pick(number)
        if seq_id is None:
            return
        sequence = self.sequences[seq_id]
        start = sequence.num_computed
        end = min(start + num_tokens, len(sequence.tokens) + len(tokens))
        table = self.table(seq_id)
        counts = self.references()
        touched = table[start // self.block_size : self.num_blocks(end)] if start < end else ()
        shared = [b for b in touched if counts[b] > 1]
        needed = max(self.num_blocks(end) - len(table), 0) + len(shared)
        copies = None
        with self.needing(needed):
            copies = self.manager.grow(seq_id, start, end)
        if copies is None:
            return
        if any(b in self.manager._index for b in touched):
            self.has_forgotten = True
        self.has_forgotten |= bool(set(touched) - set(shared))
        assert len(copies) == len(shared)
        new_table = self.table(seq_id)
        assert new_table[: start // self.block_size] == table[: start // self.block_size]
        counts = self.references()
        if start < end:
            for b in new_table[start // self.block_size : self.num_blocks(end)]:
                assert counts[b] == 1
                assert b not in self.manager._index
        self.take(copies)
        sequence.tokens.extend(tokens[: max(end - len(sequence.tokens), 0)])
        numbers = self.content_of(sequence)
        for position in range(start, end):
            self.writes[seq_id, position] = numbers[position]
        sequence.num_computed = end
        self.execute_unless_planned()

    def commit(self, number: int, num_tokens: int) -> None:
        seq_id = self.pick(number)
        if seq_id is None:
            return
        sequence = self.sequences[seq_id]
        num_tokens = min(num_tokens, sequence.num_executed)
        self.manager.commit(seq_id, sequence.tokens, num_tokens)
        numbers = self.content_of(sequence)
        for end in range(self.block_size, num_tokens + 1, self.block_size):
            self.committed.add(numbers[end - 1])

    def commit_next(self, numbers: list[int], most: int) -> None:
        """One block each: the one that its path asks for, or another if that is not there."""
        size = self.block_size
        chosen: dict[Hashable, int] = {}
        for number in numbers:
            seq_id = self.pick(number)
            if seq_id is not None:
                num_full = self.sequences[seq_id].num_executed // size
                path = self.manager._sequences[seq_id].path
                index = min(path.num_blocks, most, num_full - 1)
                if index >= 0:
                    chosen[seq_id] = index
        contents = [
            self.sequences[seq_id].tokens[index * size : (index + 1) * size].tobytes()
            for seq_id, index in chosen.items()
        ]
        seq_ids = list(chosen)
        missed = self.manager.commit_next(seq_ids, list(chosen.values()), contents)
        for position, seq_id in enumerate(seq_ids):
            sequence, end = self.sequences[seq_id], (chosen[seq_id] + 1) * size
            if position in missed:
                self.manager.commit(seq_id, sequence.tokens, end)
            assert self.manager._sequences[seq_id].path.num_blocks * size >= end
            numbers = self.content_of(sequence)
            self.committed.update(numbers[last - 1] for last in range(size, end + 1, size))

    def truncate(self, number: int, num_tokens: int) -> None:
        seq_id = self.pick(number)
        if seq_id is None:
            return
        room = len(self.table(seq_id)) * self.block_size
        with self.expect(None if num_tokens <= room else BlockRangeError):
            self.manager.truncate(seq_id, num_tokens)
        if num_tokens > room:
            return
        sequence = self.sequences[seq_id]
        del sequence.tokens[num_tokens:]
        sequence.num_computed = min(sequence.num_computed, num_tokens)
        sequence.num_executed = min(sequence.num_executed, num_tokens)
        self.drop_writes(seq_id, num_tokens)
        assert len(self.table(seq_id)) == self.num_blocks(num_tokens)

    def fork(self, number: int, num_tokens: int) -> None:
        seq_id = self.pick(number)
        if seq_id is None:
            return
        sequence = self.sequences[seq_id]
        num_tokens = min(num_tokens, sequence.num_executed)
        self.manager.fork(seq_id, self.next_id, num_tokens)
        assert self.table(self.next_id) == self.table(seq_id)[: self.num_blocks(num_tokens)]
        self.add_twin(sequence, num_tokens)

    def share_prefix(self, number: int, n_blocks: int) -> None:
        seq_id = self.pick(number)
        if seq_id is None:
            return
        sequence = self.sequences[seq_id]
        if n_blocks > len(self.table(seq_id)):
            with self.expect(BlockRangeError):
                self.manager.share_prefix(seq_id, self.next_id, n_blocks)
            return
        n_blocks = min(n_blocks, sequence.num_executed // self.block_size)
        self.manager.share_prefix(seq_id, self.next_id, n_blocks)
        assert self.table(self.next_id) == self.table(seq_id)[:n_blocks]
        self.add_twin(sequence, n_blocks * self.block_size)

    def add_twin(self, sequence: ModelSequence, num_tokens: int) -> None:
        twin = ModelSequence(sequence.salt, sequence.tokens[:num_tokens], num_tokens, num_tokens)
        self.sequences[self.next_id] = twin
        self.next_id += 1

    def cow_block(self, number: int, block_index: int) -> None:
        seq_id = self.pick(number)
        if seq_id is None:
            return
        table = self.table(seq_id)
        if block_index >= len(table):
            with self.expect(BlockRangeError):
                self.manager.cow_block(seq_id, block_index)
            return
        is_shared = self.references()[table[block_index]] > 1
        copy = None
        with self.needing(int(is_shared)) as has_room:
            copy = self.manager.cow_block(seq_id, block_index)
        if not is_shared:
            assert copy is None
            assert self.table(seq_id) == table
        elif has_room:
            assert copy is not None
            assert copy.destination == self.table(seq_id)[block_index]
            self.take([copy])
            self.execute_unless_planned()

    def allocate(self, number: int, n: int) -> None:
        seq_id = self.pick(number)
        is_new = seq_id is None or (number % 2 and len(self.sequences) < MAX_SEQUENCES)
        if is_new:
            seq_id = self.next_id
        assert seq_id is not None
        given = None
        with self.needing(n):
            given = self.manager.allocate_blocks(seq_id, n)
        if given is None:
            return
        assert self.table(seq_id)[len(self.table(seq_id)) - n :] == given
        if is_new:
            self.sequences[seq_id] = ModelSequence(None)
            self.next_id += 1

    def append_blocks(self, numbers: list[int]) -> None:
        seq_ids = list(dict.fromkeys(s for n in numbers if (s := self.pick(n)) is not None))
        tables = [self.table(seq_id) for seq_id in seq_ids]
        given = None
        with self.needing(len(seq_ids)):
            given = self.manager.append_blocks(seq_ids)
        if given is not None:
            for seq_id, table, block_id in zip(seq_ids, tables, given, strict=True):
                assert self.table(seq_id) == (*table, block_id)

    def free(self, number: int) -> None:
        seq_id = self.pick(number)
        if seq_id is not None:
            self.manager.free_sequence(seq_id)
            del self.sequences[seq_id]
            self.drop_writes(seq_id, 0)
        with self.expect(UnknownSequenceError):
            self.manager.free_sequence(seq_id)

    def refuse_a_full_target(self, number: int, other: int) -> None:
        source, target = self.pick(number), self.pick(other)
        if source is not None and target is not None and self.table(target):
            for call in (
                lambda: self.manager.share_prefix(source, target, 0),
                lambda: self.manager.fork(source, target, 0),
                lambda: self.manager.admit(target, array("i", [1]), 1),
            ):
                with self.expect(SequenceExistsError):
                    call()

    # ---- the device -----------------------------------------------------------------------------

    def take(self, copies: tuple[BlockCopy, ...] | list[BlockCopy]) -> None:
        self.copies.extend(copies)
        destinations = [copy.destination for copy in self.copies]
        assert len(set(destinations)) == len(destinations), "a block is destination twice"
        assert not {c.source for c in self.copies} & set(destinations), "source and destination"

    def drop_writes(self, seq_id: int, num_tokens: int) -> None:
        """What a sequence gave up in this plan is not computed; its copies still happen."""
        for key in [key for key in self.writes if key[0] == seq_id and key[1] >= num_tokens]:
            del self.writes[key]

    def execute_unless_planned(self) -> None:
        if not self.uses_plans:
            self.execute()

    def execute(self) -> None:
        """The copies in any order, then the tokens."""
        self.shuffle(self.copies)
        for copy in self.copies:
            self.memory[copy.destination] = list(self.memory[copy.source])
        for (seq_id, position), number in self.writes.items():
            block_id = self.table(seq_id)[position // self.block_size]
            self.memory[block_id][position % self.block_size] = number
        self.copies.clear()
        self.writes.clear()
        for sequence in self.sequences.values():
            sequence.num_executed = sequence.num_computed

    def start_plan(self) -> None:
        if self.uses_plans:
            self.execute()
            self.manager.start_plan()
            self.check_content()

    # ---- what always holds ----------------------------------------------------------------------

    def check_books(self) -> None:
        manager = self.manager
        manager.verify()
        references = self.references()
        assert manager.ref_count == {b: references[b] for b in range(manager.total_blocks)}
        assert manager.num_available_blocks == self.num_available()
        assert len(manager.free_blocks) == len(set(manager.free_blocks))
        assert set(manager.sequence_blocks) == set(self.sequences)

    def check_content(self) -> None:
        assert not self.copies
        for seq_id, sequence in self.sequences.items():
            table = self.table(seq_id)
            numbers = self.content_of(sequence)
            for position in range(sequence.num_executed):
                block_id, offset = table[position // self.block_size], position % self.block_size
                assert self.memory[block_id][offset] == numbers[position], (seq_id, position)

    def check(self) -> None:
        self.check_books()
        if not self.uses_plans:
            self.check_content()


def pattern(seed: int, length: int) -> list[int]:
    """One of eight endless texts, cut off: so prompts that hypothesis makes up have prefixes."""
    return [(seed >> position % 3) & 1 for position in range(length)]


numbers = st.integers(0, MAX_SEQUENCES - 1)
token_lists = st.builds(pattern, st.integers(0, 7), st.integers(0, 48))
lengths = st.integers(0, 48)
all_or_some = st.just(10**6) | lengths


class BlockManagerMachine(RuleBasedStateMachine):
    @initialize(
        total_blocks=st.integers(1, 64) | st.integers(12, 64),
        block_size=st.sampled_from(BLOCK_SIZES),
        uses_plans=st.booleans(),
    )
    def begin(self, total_blocks: int, block_size: int, uses_plans: bool) -> None:
        self.harness = Harness(total_blocks, block_size, uses_plans=uses_plans)

    def has_place(self) -> bool:
        return len(self.harness.sequences) < MAX_SEQUENCES

    @rule(
        number=numbers,
        tokens=token_lists,
        keep=all_or_some,
        extra=st.integers(0, 5),
        salt=st.sampled_from([None, None, "tenant"]),
    )
    def admit(self, number: int, tokens: list[int], keep: int, extra: int, salt: Hashable) -> None:
        if self.has_place():
            self.harness.admit(number, tokens, keep, extra, salt)

    @rule(number=numbers, tokens=token_lists, num_tokens=all_or_some)
    def compute(self, number: int, tokens: list[int], num_tokens: int) -> None:
        self.harness.compute(number, tokens, num_tokens)

    @rule(number=numbers, tokens=token_lists, keep=all_or_some, frees=st.booleans())
    def serve(self, number: int, tokens: list[int], keep: int, frees: bool) -> None:
        """A prompt all the way: admitted, computed, committed, perhaps freed."""
        harness = self.harness
        num_sequences = len(harness.sequences)
        if num_sequences < MAX_SEQUENCES:
            harness.admit(number, tokens, keep, 0, None)
        if len(harness.sequences) > num_sequences:
            harness.compute(num_sequences, [], 10**6)
            harness.start_plan()
            harness.commit(num_sequences, 10**6)
            if frees:
                harness.free(num_sequences)

    @rule(number=numbers, num_tokens=all_or_some)
    def commit(self, number: int, num_tokens: int) -> None:
        self.harness.commit(number, num_tokens)

    @rule(several=st.lists(numbers, max_size=4), most=st.integers(0, 4))
    def commit_next(self, several: list[int], most: int) -> None:
        self.harness.commit_next(several, most)

    @rule(number=numbers, num_tokens=lengths)
    def truncate(self, number: int, num_tokens: int) -> None:
        self.harness.truncate(number, num_tokens)

    @rule(number=numbers, num_tokens=all_or_some)
    def fork(self, number: int, num_tokens: int) -> None:
        if self.has_place():
            self.harness.fork(number, num_tokens)

    @rule(number=numbers, n_blocks=st.integers(0, 10))
    def share_prefix(self, number: int, n_blocks: int) -> None:
        if self.has_place():
            self.harness.share_prefix(number, n_blocks)

    @rule(number=numbers, block_index=st.integers(0, 10))
    def cow_block(self, number: int, block_index: int) -> None:
        self.harness.cow_block(number, block_index)

    @rule(number=numbers, n=st.integers(0, 3))
    def allocate(self, number: int, n: int) -> None:
        self.harness.allocate(number, n)

    @rule(several=st.lists(numbers, max_size=4))
    def append_blocks(self, several: list[int]) -> None:
        self.harness.append_blocks(several)

    @rule(number=numbers)
    def free(self, number: int) -> None:
        self.harness.free(number)

    @rule(number=numbers, other=numbers)
    def refuse_a_full_target(self, number: int, other: int) -> None:
        self.harness.refuse_a_full_target(number, other)

    @rule()
    def start_plan(self) -> None:
        self.harness.start_plan()

    @invariant()
    def everything_agrees(self) -> None:
        if hasattr(self, "harness"):
            self.harness.check()

    def teardown(self) -> None:
        if hasattr(self, "harness"):
            self.harness.start_plan()
            while self.harness.sequences:
                self.harness.free(0)
            self.harness.start_plan()
            manager = self.harness.manager
            assert manager.num_available_blocks == manager.total_blocks


TestBlockManagerMachine = BlockManagerMachine.TestCase
TestBlockManagerMachine.settings = settings(max_examples=400, stateful_step_count=60, deadline=None)


def fuzz(seed: int, num_operations: int) -> None:
    """Random operations in pools of random sizes, a new one every 2,000 operations."""
    rng = random.Random(seed)
    harness = Harness(1, 1, uses_plans=False)

    def tokens(most: int) -> list[int]:
        return [rng.randrange(NUM_TOKEN_IDS) for _ in range(rng.randrange(most + 1))]

    def number() -> int:
        return rng.randrange(MAX_SEQUENCES)

    for operation in range(num_operations):
        if operation % 2000 == 0:
            harness = Harness(
                rng.randint(1, 64), rng.choice(BLOCK_SIZES), uses_plans=rng.random() < 0.5
            )
        reach = min(3 * harness.block_size, 32)
        length = rng.choice((rng.randrange(6 * harness.block_size), 10**6))
        kind = rng.choices(range(11), (3, 8, 5, 1, 2, 1, 1, 1, 1, 2, 2))[0]
        if kind in (0, 4, 5) and len(harness.sequences) >= MAX_SEQUENCES:
            kind = 9
        if kind == 0:
            salt = rng.choice((None, None, "tenant"))
            harness.admit(number(), tokens(reach), length, rng.choice((0, 0, 0, 2)), salt)
        elif kind == 1:
            harness.compute(number(), tokens(reach // 2), rng.randint(0, reach))
        elif kind == 2 and rng.random() < 0.5:
            harness.commit(number(), length)
        elif kind == 2:
            harness.commit_next([number() for _ in range(3)], rng.randrange(6))
        elif kind == 3:
            harness.truncate(number(), length)
        elif kind == 4:
            harness.fork(number(), length)
        elif kind == 5:
            harness.share_prefix(number(), rng.randrange(6))
        elif kind == 6:
            harness.cow_block(number(), rng.randrange(6))
        elif kind == 7:
            harness.allocate(number(), rng.randrange(3))
        elif kind == 8:
            harness.append_blocks([number() for _ in range(rng.randrange(4))])
        elif kind == 9:
            harness.free(number())
            harness.refuse_a_full_target(number(), number())
        else:
            harness.start_plan()
        if operation % 4 == 0:
            harness.check()


def test_forty_thousand_random_operations() -> None:
    fuzz(seed=1, num_operations=40_000)


@pytest.mark.long
def test_a_million_random_operations() -> None:
    fuzz(seed=2, num_operations=1_000_000)


# ---- the model itself, against managers broken on purpose ----------------------------------------


def _keep_writing_shared_blocks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BlockManager, "_is_shared", lambda self, block_id: False)


def _evict_the_newest_and_leave_it_findable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PrefixIndex,
        "evict",
        lambda self, n: [self.unreferenced.popitem()[0] for _ in range(n)],
    )


def _trust_the_tokens_without_their_past(patch: pytest.MonkeyPatch) -> None:
    def find_each(self: PrefixIndex, root: tuple[Hashable], data: bytes) -> list[int]:
        step = self._block_bytes
        found: list[int] = []
        for offset in range(0, len(data), step):
            known = [b for (_, t), b in self._blocks.items() if t == data[offset : offset + step]]
            if not known or known[0] in found:
                break
            found.append(known[0])
        return found

    patch.setattr(PrefixIndex, "find", find_each)


def _ignore_the_salt(patch: pytest.MonkeyPatch) -> None:
    find = PrefixIndex.find
    patch.setattr(PrefixIndex, "find", lambda self, root, data: find(self, (None,), data))


def _hold_no_copied_block(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        PlanCopies, "add", lambda self, source, destination: BlockCopy(source, destination)
    )


def _use_serials_again(patch: pytest.MonkeyPatch) -> None:
    evict = PrefixIndex.evict

    def evict_and_forget(self: PrefixIndex, num_blocks: int) -> list[int]:
        self._next_serial -= num_blocks
        return evict(self, num_blocks)

    patch.setattr(PrefixIndex, "evict", evict_and_forget)


def _leave_a_reopened_block_findable(patch: pytest.MonkeyPatch) -> None:
    grow = BlockManager.grow

    def grow_and_keep(self: BlockManager, *args: int) -> tuple[BlockCopy, ...]:
        patch.setattr(PrefixIndex, "remove", lambda self, block_id: None)
        try:
            return grow(self, *args)
        finally:
            patch.setattr(PrefixIndex, "remove", remove)

    remove = PrefixIndex.remove
    patch.setattr(BlockManager, "grow", grow_and_keep)


def _forget_to_shorten_the_path(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PrefixIndex, "shorten", lambda *args: None)


def _free_a_block_that_others_hold(patch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release

    def release_all(self: BlockPool, block_ids: list[int]) -> list[int]:
        block_ids = list(block_ids)
        release(self, block_ids)
        return block_ids

    patch.setattr(BlockPool, "release", release_all)


@pytest.mark.parametrize(
    "sabotage",
    [
        _keep_writing_shared_blocks,
        _evict_the_newest_and_leave_it_findable,
        _trust_the_tokens_without_their_past,
        _ignore_the_salt,
        _hold_no_copied_block,
        _use_serials_again,
        _leave_a_reopened_block_findable,
        _forget_to_shorten_the_path,
        _free_a_block_that_others_hold,
    ],
    ids=lambda sabotage: sabotage.__name__.lstrip("_"),
)
def test_the_model_catches(
    sabotage: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    sabotage(monkeypatch)
    with pytest.raises((Exception, pytest.fail.Exception)):
        fuzz(seed=3, num_operations=40_000)
