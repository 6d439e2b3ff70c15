"""The automatic prefix cache: what is found, what is evicted, and in which order."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from pagetide_kvcache import (
    Admission,
    BlockManager,
    BlockRangeError,
    OutOfBlocksError,
    UnknownSequenceError,
)


def serve(
    manager: BlockManager, tokens: Sequence[int], *, frees: bool = True, seq_id: object = "served"
) -> Admission:
    """Admits, computes and commits a prompt."""
    admission = manager.admit(seq_id, tokens, len(tokens))
    manager.commit(seq_id, tokens, len(tokens))
    if frees:
        manager.free_sequence(seq_id)
    manager.verify()
    return admission


def test_a_committed_prefix_is_found_and_shared() -> None:
    manager = BlockManager(8, block_size=4)
    first = serve(manager, range(10), frees=False, seq_id="a")
    second = manager.admit("b", [*range(8), 99, 98], 10)
    assert first.num_cached_tokens == 0
    assert second.num_cached_tokens == 8
    assert second.block_ids[:2] == first.block_ids[:2]
    assert second.block_ids[2] != first.block_ids[2]
    assert [manager.ref_count[b] for b in second.block_ids] == [2, 2, 1]


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 16])
def test_a_whole_prompt_hit_leaves_at_least_one_token_to_compute(block_size: int) -> None:
    manager = BlockManager(64, block_size)
    for num_tokens in range(3 * block_size + 2):
        tokens = list(range(num_tokens))
        serve(manager, tokens)
        expected = max(num_tokens - 1, 0) // block_size
        assert manager.match_prefix(tokens) == expected
        admission = manager.admit("again", tokens, num_tokens)
        assert admission.num_cached_tokens == expected * block_size
        manager.free_sequence("again")


def test_room_beyond_the_known_tokens_is_given_but_not_looked_up() -> None:
    manager = BlockManager(16, block_size=4)
    serve(manager, range(12))
    admission = manager.admit("b", range(8), 15)
    assert admission.num_cached_tokens == 4
    assert len(admission.block_ids) == 4


def test_a_short_room_limits_what_is_looked_up() -> None:
    manager = BlockManager(16, block_size=4)
    serve(manager, range(12))
    admission = manager.admit("b", range(12), 8)
    assert admission.num_cached_tokens == 4
    assert len(admission.block_ids) == 2


def test_asking_changes_nothing_not_even_the_order_of_eviction() -> None:
    manager = BlockManager(2, block_size=2)
    serve(manager, [1, 1])
    serve(manager, [2, 2])
    assert manager.match_prefix([1, 1, 0]) == 1
    manager.allocate_blocks("x", 1)
    assert manager.match_prefix([1, 1, 0]) == 0
    assert manager.match_prefix([2, 2, 0]) == 1


def test_the_least_recently_used_chain_is_evicted_first() -> None:
    manager = BlockManager(4, block_size=2)
    for token in (1, 2, 3):
        serve(manager, [token, token])
    assert serve(manager, [1, 1, 9]).num_cached_tokens == 2  # so "2 2" is now the oldest
    manager.allocate_blocks("x", 2)  # one is free, one is evicted
    assert [manager.match_prefix([t, t, 0]) for t in (1, 2, 3)] == [1, 0, 1]
    manager.allocate_blocks("x", 1)
    assert [manager.match_prefix([t, t, 0]) for t in (1, 2, 3)] == [1, 0, 0]


def test_a_chain_is_evicted_from_its_tail() -> None:
    manager = BlockManager(4, block_size=2)
    tokens = list(range(8))
    serve(manager, tokens)
    for num_left in (3, 2, 1, 0):
        manager.allocate_blocks("x", 1)
        assert manager.match_prefix([*tokens, 0]) == num_left


def test_free_blocks_are_used_before_anything_is_evicted() -> None:
    manager = BlockManager(4, block_size=2)
    serve(manager, [1, 1])
    assert len(manager.free_blocks) == 3
    assert manager.num_available_blocks == 4
    manager.allocate_blocks("x", 3)
    assert manager.match_prefix([1, 1, 0]) == 1
    assert len(manager.free_blocks) == 0
    assert manager.num_available_blocks == 1
    manager.allocate_blocks("y", 1)
    assert manager.match_prefix([1, 1, 0]) == 0


def test_the_blocks_found_are_not_evicted_to_make_room_for_the_rest() -> None:
    manager = BlockManager(3, block_size=2)
    tokens = list(range(6))
    blocks = serve(manager, tokens).block_ids
    with pytest.raises(OutOfBlocksError) as caught:
        manager.admit("big", tokens, 8)
    assert (caught.value.needed, caught.value.available) == (2, 1)
    assert manager.match_prefix([*tokens, 0]) == 3
    admission = manager.admit("fits", tokens, 6)
    assert admission.block_ids == blocks
    assert admission.num_cached_tokens == 4
    manager.verify()


def test_a_block_computed_twice_stays_unfindable_the_second_time() -> None:
    manager = BlockManager(8, block_size=2)
    tokens = [1, 2, 3, 4]
    first = manager.admit("a", tokens, 4)
    second = manager.admit("b", tokens, 4)
    manager.commit("a", tokens, 4)
    manager.commit("b", tokens, 4)
    assert manager.admit("c", [*tokens, 5], 5).block_ids[:2] == first.block_ids
    manager.free_sequence("b")
    assert set(second.block_ids) <= set(manager.free_blocks)
    manager.verify()


def test_a_path_whose_end_was_reused_is_walked_again() -> None:
    manager = BlockManager(6, block_size=2)
    tokens = [1, 2, 3, 4, 5, 6]
    manager.admit("a", tokens[:4], 4)
    manager.admit("b", tokens, 6)
    manager.commit("a", tokens, 4)
    manager.commit("b", tokens, 4)  # b's path goes through a's blocks
    manager.free_sequence("a")
    manager.allocate_blocks("x", 3)  # evicts both
    assert manager.match_prefix([*tokens, 0]) == 0
    manager.commit("b", tokens, 6)  # now all three of b's own blocks are findable
    assert manager.match_prefix([*tokens, 0]) == 3
    manager.verify()


def test_a_block_below_a_parent_that_is_gone_moves_to_the_new_path() -> None:
    manager = BlockManager(8, block_size=2)
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    manager.admit("a", tokens[:2], 2)
    manager.admit("b", tokens, 8)
    manager.commit("a", tokens, 2)
    manager.commit("b", tokens, 4)  # b's second block becomes findable below a's first
    manager.admit("c", [*tokens[:6], 0], 6)
    manager.commit("c", tokens, 6)
    manager.commit("b", tokens, 6)  # b's path ends in c's third block
    manager.free_sequence("c")
    manager.free_sequence("a")
    manager.allocate_blocks("x", 4)  # two free ones, c's third and a's first
    assert manager.match_prefix([*tokens, 0]) == 0
    manager.verify()
    manager.commit("b", tokens, 8)
    assert manager.match_prefix([*tokens, 0]) == 4
    manager.verify()


def test_reopening_a_findable_block_leaves_it_findable_until_it_is_written() -> None:
    manager = BlockManager(8, block_size=4)
    tokens = list(range(8))
    serve(manager, tokens, frees=False, seq_id="a")
    manager.truncate("a", 6)
    assert manager.match_prefix([*tokens, 0]) == 2
    assert manager.grow("a", 6, 7) == ()  # nobody else holds it: out of the index, in place
    assert manager.match_prefix([*tokens, 0]) == 1
    manager.verify()


def test_reopening_a_findable_block_that_others_hold_copies_it() -> None:
    manager = BlockManager(8, block_size=4)
    tokens = list(range(8))
    blocks = serve(manager, tokens, frees=False, seq_id="a").block_ids
    manager.truncate("a", 6)
    manager.admit("b", [*tokens, 0], 9)
    (copy,) = manager.grow("a", 6, 7)
    assert copy.source == blocks[1]
    assert manager.match_prefix([*tokens, 0]) == 2
    manager.commit("a", [0, 1, 2, 3, 4, 5, 77, 78], 8)
    assert manager.match_prefix([0, 1, 2, 3, 4, 5, 77, 78, 0]) == 2
    assert manager.match_prefix([*tokens, 0]) == 2
    manager.verify()


def test_writing_over_a_full_block_takes_it_out_of_the_index() -> None:
    manager = BlockManager(8, block_size=4)
    tokens = list(range(8))
    serve(manager, tokens, frees=False, seq_id="a")
    manager.grow("a", 0, 4)
    assert manager.match_prefix([*tokens, 0]) == 0
    manager.commit("a", [9, *tokens[1:]], 8)
    assert manager.match_prefix([9, *tokens[1:], 0]) == 2
    manager.verify()


def test_a_fork_commits_on_its_own_path() -> None:
    manager = BlockManager(8, block_size=2)
    serve(manager, [1, 2, 3], frees=False, seq_id="a")
    manager.fork("a", "b", 3)
    manager.grow("b", 3, 4)
    manager.commit("b", [1, 2, 3, 8], 4)
    manager.grow("a", 3, 4)
    manager.commit("a", [1, 2, 3, 9], 4)
    assert manager.match_prefix([1, 2, 3, 8, 0]) == 2
    assert manager.match_prefix([1, 2, 3, 9, 0]) == 2
    manager.verify()


def test_a_salt_keeps_tenants_apart() -> None:
    manager = BlockManager(8, block_size=2)
    tokens = [1, 2, 3]
    manager.admit("a", tokens, 3, salt="one")
    manager.commit("a", tokens, 3)
    assert manager.match_prefix(tokens, salt="one") == 1
    assert manager.match_prefix(tokens, salt="two") == 0
    assert manager.match_prefix(tokens) == 0
    # Serials are integers: no salt may pass for one.
    assert [manager.match_prefix(tokens, salt=serial) for serial in range(4)] == [0] * 4
    manager.fork("a", "b", 3)
    manager.grow("b", 3, 4)
    manager.commit("b", [1, 2, 3, 4], 4)
    assert manager.match_prefix([1, 2, 3, 4, 5], salt="one") == 2


@pytest.mark.parametrize(
    "container",
    [list, tuple, lambda t: array("i", t), lambda t: array("q", t), lambda t: array("H", t), bytes],
    ids=["list", "tuple", "int32", "int64", "uint16", "bytes"],
)
def test_tokens_mean_the_same_in_every_container(container: type) -> None:
    manager = BlockManager(8, block_size=2)
    serve(manager, [1, 2, 3, 4])
    assert manager.match_prefix(container([1, 2, 3, 4, 5])) == 2
    assert manager.match_prefix(container([1, 2, 4, 3, 5])) == 1


@pytest.mark.parametrize("token", [2**31, -(2**31) - 1, 10**30])
def test_a_token_outside_int32_is_refused(token: int) -> None:
    manager = BlockManager(8, block_size=2)
    serve(manager, [0, 0])
    with pytest.raises(ValueError, match="int32"):
        manager.match_prefix([token, 0, 0])
    with pytest.raises(ValueError, match="int32"):
        manager.admit("a", [token, 0, 0], 3)
    assert "a" not in manager.sequence_blocks
    manager.admit("a", [0, 0, token, 0], 4)
    with pytest.raises(ValueError, match="int32"):
        manager.commit("a", [0, 0, token, 0], 4)
    manager.verify()


def test_committing_what_is_not_there_is_refused() -> None:
    manager = BlockManager(8, block_size=2)
    manager.admit("a", [1, 2], 2)
    with pytest.raises(ValueError, match="num_tokens=3"):
        manager.commit("a", [1, 2], 3)
    with pytest.raises(ValueError, match="holds"):
        manager.commit("a", [1, 2, 3], 3)
    with pytest.raises(ValueError, match="num_tokens=-1"):
        manager.commit("a", [1, 2], -1)
    with pytest.raises(KeyError):
        manager.commit("x", [1, 2], 2)
    assert manager.match_prefix([1, 2, 0]) == 0


def test_only_full_blocks_are_committed_and_each_once() -> None:
    manager = BlockManager(8, block_size=4)
    tokens = list(range(10))
    manager.admit("a", tokens, 10)
    for num_tokens, expected in ((3, 0), (4, 1), (4, 1), (7, 1), (2, 1), (10, 2)):
        manager.commit("a", tokens, num_tokens)
        assert manager.match_prefix(tokens) == expected
        manager.verify()


def test_the_cache_can_be_switched_off() -> None:
    manager = BlockManager(8, block_size=2, enable_prefix_cache=False)
    serve(manager, [1, 2, 3])
    assert manager.match_prefix([1, 2, 3]) == 0
    assert len(manager.free_blocks) == 8


def test_following_a_prefix_goes_on_from_the_last_answer() -> None:
    manager = BlockManager(12, 2)
    tokens = [1, 2, 3, 4, 5, 6, 7]
    path = manager.follow_prefix(tokens)
    assert path.num_blocks == 0
    manager.allocate_blocks("a", 4)
    for num_tokens, found in ((2, 1), (4, 2), (6, 3)):
        manager.commit("a", tokens, num_tokens)
        path = manager.follow_prefix(tokens, path)
        assert path.num_blocks == found == manager.match_prefix(tokens)
    assert manager.follow_prefix(tokens[:6]).num_blocks == 2  # one token is left to compute
    assert manager.follow_prefix(tokens, salt="other").num_blocks == 0


def test_following_asks_once_for_what_it_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    manager = BlockManager(200, 2)
    tokens = list(range(300))
    manager.allocate_blocks("a", 150)
    manager.commit("a", tokens, 200)
    path = manager.follow_prefix(tokens)
    assert path.num_blocks == 100
    asked = []
    step = type(manager._index).step

    def counting(*arguments: object) -> bool:
        asked.append(arguments)
        return step(*arguments)

    monkeypatch.setattr(type(manager._index), "step", counting)
    assert manager.follow_prefix(tokens, path).num_blocks == 100
    assert len(asked) == 1


def test_a_path_whose_end_was_evicted_starts_over() -> None:
    manager = BlockManager(4, 2)
    tokens = [1, 2, 3, 4, 5]
    manager.allocate_blocks("a", 2)
    manager.commit("a", tokens, 4)
    path = manager.follow_prefix(tokens)
    assert path.num_blocks == 2
    manager.free_sequence("a")
    manager.allocate_blocks("b", 3)  # the chain's tail is evicted, its head stays
    assert manager.follow_prefix(tokens, path).num_blocks == manager.match_prefix(tokens) == 1
    manager.allocate_blocks("b", 1)
    assert manager.follow_prefix(tokens, path).num_blocks == 0
    manager.verify()


def test_the_next_blocks_of_many_are_committed_at_once() -> None:
    manager = BlockManager(12, block_size=2)
    tokens = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8], "c": [1, 2, 3, 4]}
    for seq_id in tokens:
        manager.admit(seq_id, tokens[seq_id], 4)
    manager.commit("a", tokens["a"], 2)

    def contents(*parts: list[int]) -> list[bytes]:
        return [array("i", part).tobytes() for part in parts]

    # a goes on, b starts, and c has a block before this one that nobody committed.
    missed = manager.commit_next(["a", "b", "c"], [1, 0, 1], contents([3, 4], [5, 6], [3, 4]))
    assert missed == [2]
    assert manager.match_prefix([1, 2, 3, 4, 0]) == 2
    assert manager.match_prefix([5, 6, 7, 8, 0]) == 1
    manager.verify()
    assert manager.commit_next(["a"], [1], contents([3, 4])) == [0]  # it is committed already
    assert manager.commit_next([], [], []) == []


def test_a_path_whose_end_was_reused_is_not_gone_on_with() -> None:
    manager = BlockManager(6, block_size=2)
    tokens = [1, 2, 3, 4]
    manager.admit("a", tokens[:2], 2)
    manager.admit("b", tokens, 4)
    manager.commit("a", tokens, 2)
    manager.commit("b", tokens, 2)  # b's path goes through a's block
    manager.free_sequence("a")
    manager.allocate_blocks("x", 4)  # evicts it
    assert manager.commit_next(["b"], [1], [array("i", [3, 4]).tobytes()]) == [0]
    assert manager.match_prefix([*tokens, 0]) == 0
    manager.verify()


def test_committing_the_next_blocks_is_whole_or_not_at_all() -> None:
    manager = BlockManager(6, block_size=2)
    manager.admit("a", [1, 2], 2)
    block = array("i", [1, 2]).tobytes()
    with pytest.raises(UnknownSequenceError):
        manager.commit_next(["a", "b"], [0, 0], [block, block])
    with pytest.raises(BlockRangeError, match="block table"):
        manager.commit_next(["a"], [1], [block])
    for contents in ([block[:4]], [block, block], []):
        with pytest.raises(ValueError, match="contents"):
            manager.commit_next(["a"], [0], contents)
    assert manager.match_prefix([1, 2, 3]) == 0
    without = BlockManager(6, block_size=2, enable_prefix_cache=False)
    without.admit("a", [1, 2], 2)
    assert without.commit_next(["a"], [0], [block]) == []
    assert without.match_prefix([1, 2, 3]) == 0


def test_blocks_that_proved_wrong_are_found_by_nobody() -> None:
    """Those that a sequence committed and those that it found, whoever still holds them."""
    manager = BlockManager(12, block_size=4)
    serve(manager, range(8), frees=False, seq_id="first")
    serve(manager, range(14), frees=False, seq_id="second")
    serve(manager, [70, 71, 72, 73, 74], frees=False, seq_id="other")
    manager.uncache("second")
    manager.verify()
    assert manager.match_prefix(range(14)) == 0
    assert manager.match_prefix([70, 71, 72, 73, 74]) == 1
    shared = manager.sequence_blocks["first"]
    assert manager.sequence_blocks["second"][:2] == shared
    assert [manager.ref_count[block_id] for block_id in shared] == [2, 2]

    manager.free_sequence("second")
    manager.free_sequence("first")
    manager.verify()
    assert manager.num_available_blocks == 12 - 2
    assert len(manager.free_blocks) == 12 - 2, "an unfindable block was kept"
    assert serve(manager, range(14)).num_cached_tokens == 0
    assert manager.match_prefix(range(14)) == 3, "right ones take their place"
    with pytest.raises(UnknownSequenceError):
        manager.uncache("second")


@pytest.mark.parametrize("is_cached", [False, True])
def test_a_salt_that_cannot_be_hashed_is_refused_at_once(is_cached: bool) -> None:
    manager = BlockManager(8, block_size=4)
    if is_cached:
        serve(manager, range(8))
    with pytest.raises(TypeError, match="unhashable"):
        manager.admit("a", range(8), 8, salt=["s"])
    manager.verify()
    assert manager.num_available_blocks == 8
