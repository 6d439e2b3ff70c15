"""Faults that engines of this kind have had in public, each as the case that shows it.

The entry's number in our list of them stands beside each test, with the report it comes from.
"""

from __future__ import annotations

from array import array

import pytest

from pagetide_kvcache import BlockManager, InvariantError, OutOfBlocksError, UnknownSequenceError
from pagetide_kvcache.block_pool import BlockPool


def test_a_forked_partial_tail_is_never_written_by_two() -> None:  # A1: Avarok atlas#1193
    manager = BlockManager(8, block_size=4)
    memory: dict[tuple[int, int], int] = {}

    def write(seq_id: str, position: int, token: int) -> None:
        for copy in manager.grow(seq_id, position, position + 1):
            for offset in range(4):
                memory[copy.destination, offset] = memory.get((copy.source, offset), -1)
        memory[manager.sequence_blocks[seq_id][position // 4], position % 4] = token

    def read(seq_id: str, num_tokens: int) -> list[int]:
        table = manager.sequence_blocks[seq_id]
        return [memory[table[p // 4], p % 4] for p in range(num_tokens)]

    manager.allocate_blocks("A", 0)
    for position in range(6):
        write("A", position, position + 1)
    manager.fork("A", "B", 6)
    write("A", 6, 7)
    write("B", 6, 8)
    assert read("A", 7) == [1, 2, 3, 4, 5, 6, 7]
    assert read("B", 7) == [1, 2, 3, 4, 5, 6, 8]
    manager.free_sequence("A")
    manager.free_sequence("B")
    assert manager.free_blocks == set(range(8))
    manager.verify()


def test_a_cached_prompt_leaves_tokens_to_compute() -> None:  # A2: MinivLLM PR#98
    # The manager's part: the count of cached tokens and the table say where computing starts.
    manager = BlockManager(8, block_size=4)
    prompt = array("i", range(5))
    first = manager.admit("first", prompt, 5)
    manager.commit("first", prompt, 5)
    second = manager.admit("second", prompt, 5)
    assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 4)
    assert second.block_ids[0] == first.block_ids[0]
    assert manager.grow("second", 4, 5) == ()  # position 4 is private and writable


def test_blocks_not_computed_yet_are_not_hit() -> None:  # A3: nano-vllm#208, PR#209
    manager = BlockManager(8, block_size=4)
    prompt = array("i", range(9))
    assert manager.admit("first", prompt, 9).num_cached_tokens == 0
    assert manager.admit("second", prompt, 9).num_cached_tokens == 0
    manager.commit("first", prompt, 9)
    assert manager.match_prefix(prompt) == 2


def test_admitting_after_preemption_counts_the_cached_blocks_once() -> None:  # A5: nano-vllm PR#211
    manager = BlockManager(6, block_size=4)
    tokens = array("i", range(20))
    manager.admit("A", tokens, 20)
    manager.commit("A", tokens, 20)
    manager.free_sequence("A")  # preempted: five blocks cached, one free
    assert (len(manager.free_blocks), manager.num_available_blocks) == (1, 6)
    admission = manager.admit("A", tokens, 24)
    assert admission.num_cached_tokens == 16
    assert len(admission.block_ids) == 6
    manager.verify()
    manager.free_sequence("A")
    with pytest.raises(OutOfBlocksError):
        manager.admit("A", tokens, 25)
    manager.verify()


def test_a_reused_block_is_no_longer_found() -> None:  # A7: vllm PR#4764
    manager = BlockManager(4, block_size=4)
    prefix, other = array("i", range(9)), array("i", range(100, 116))
    blocks = manager.admit("P", prefix, 9).block_ids
    manager.commit("P", prefix, 9)
    manager.free_sequence("P")
    assert set(manager.admit("Q", other, 16).block_ids) >= set(blocks)
    manager.commit("Q", other, 16)
    assert manager.match_prefix(prefix) == 0
    manager.free_sequence("Q")
    assert manager.admit("P", prefix, 9).num_cached_tokens == 0
    manager.verify()


class Colliding:
    """A salt whose hash is that of every other."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Colliding) and other.name == self.name

    def __hash__(self) -> int:
        return 1


def test_equal_hashes_are_not_equal_prefixes() -> None:  # A9: vllm PR#12621, CVE-2025-25183
    manager = BlockManager(64, block_size=2)
    for number in range(8):
        salt = Colliding(str(number))
        manager.admit(number, [1, 2, number], 3, salt=salt)
        assert manager.match_prefix([1, 2, number], salt=salt) == 0
        manager.commit(number, [1, 2, number], 3)
    for number in range(8):
        block = manager.sequence_blocks[number][0]
        hit = manager.admit("hit", [1, 2, 3], 3, salt=Colliding(str(number)))
        assert hit.block_ids[0] == block
        manager.free_sequence("hit")


def test_equal_tokens_after_another_past_are_not_found() -> None:  # A9: openvino.genai#3722
    manager = BlockManager(64, block_size=2)
    prompts = [[1, 1, 7, 7, 7, 7], [2, 2, 7, 7, 7, 7], [7, 7, 7, 7, 7, 7]]
    tables = []
    for number, prompt in enumerate(prompts):
        tables.append(manager.admit(number, prompt, 6).block_ids)
        manager.commit(number, prompt, 6)
    assert len({block for table in tables for block in table}) == 9
    # -1 and -2 have the same hash in CPython.
    assert manager.match_prefix([-1, -1, 0]) == manager.match_prefix([-2, -2, 0]) == 0


def test_freeing_twice_changes_nothing() -> None:  # A10: UCM PR#1053
    manager = BlockManager(4)
    manager.allocate_blocks("a", 2)
    manager.allocate_blocks("b", 1)
    manager.free_sequence("a")
    before = list(manager.free_blocks)
    with pytest.raises(UnknownSequenceError):
        manager.free_sequence("a")
    assert list(manager.free_blocks) == before
    assert len(set(before)) == len(before) == 3
    manager.verify()


def test_releasing_a_block_twice_in_one_call_changes_nothing() -> None:  # A10: vllm-ascend#15990
    pool = BlockPool(4)
    first, second = pool.take(2)
    for duplicates in ([first, second, first], [second, second], [3]):
        with pytest.raises(InvariantError, match="more often"):
            pool.release(duplicates)
        assert list(pool.ref_counts) == [1, 1, 0, 0]
        assert list(pool.free_block_ids()) == [2, 3]


@pytest.mark.parametrize("num_cached", range(4))
def test_an_admission_that_fails_keeps_nothing(num_cached: int) -> None:  # A14: nm-vllm PR#92
    manager = BlockManager(8, block_size=4)
    tokens = array("i", range(4 * num_cached))
    manager.admit("cached", tokens, len(tokens))
    manager.commit("cached", tokens, len(tokens))
    manager.free_sequence("cached")
    manager.allocate_blocks("x", 4)
    before = (dict(manager.ref_count), list(manager.free_blocks), manager.num_available_blocks)
    with pytest.raises(OutOfBlocksError):
        manager.admit("A", array("i", range(20)), 20)
    assert "A" not in manager.sequence_blocks
    after = (dict(manager.ref_count), list(manager.free_blocks), manager.num_available_blocks)
    assert after == before
    assert manager.match_prefix(array("i", range(20))) == num_cached
    manager.verify()
