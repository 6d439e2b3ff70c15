"""Each operation of the block manager: what it does, and what it refuses without a change."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest

from pagetide_kvcache import (
    BlockCopy,
    BlockManager,
    BlockRangeError,
    CopyDirection,
    KVCacheError,
    OutOfBlocksError,
    SequenceExistsError,
    UnknownSequenceError,
)


def books(manager: BlockManager) -> tuple[object, ...]:
    """Everything a caller can see."""
    manager.verify()
    return (
        dict(manager.sequence_blocks),
        dict(manager.ref_count),
        list(manager.free_blocks),
        manager.num_available_blocks,
    )


def refuses(
    manager: BlockManager, error: type[Exception], call: Callable[..., Any], *args: Any
) -> Exception:
    before = books(manager)
    with pytest.raises(error) as caught:
        call(*args)
    assert books(manager) == before
    return caught.value


# ---- allocating and freeing ------------------------------------------------------------------


def test_allocating_appends_to_the_table_and_counts_one_reference() -> None:
    manager = BlockManager(8)
    first = manager.allocate_blocks("a", 2)
    second = manager.allocate_blocks("a", 3)
    assert manager.sequence_blocks["a"] == first + second
    assert len(set(first + second)) == 5
    assert all(manager.ref_count[b] == 1 for b in first + second)
    assert len(manager.free_blocks) == 3
    manager.verify()


def test_allocating_nothing_makes_an_empty_sequence() -> None:
    manager = BlockManager(1)
    assert manager.allocate_blocks("a", 0) == ()
    assert manager.sequence_blocks["a"] == ()
    manager.free_sequence("a")
    assert "a" not in manager.sequence_blocks


def test_allocating_is_all_or_nothing() -> None:
    manager = BlockManager(4)
    manager.allocate_blocks("a", 1)
    error = refuses(manager, OutOfBlocksError, manager.allocate_blocks, "b", 4)
    assert isinstance(error, OutOfBlocksError)
    assert (error.needed, error.available) == (4, 3)
    assert "b" not in manager.sequence_blocks
    refuses(manager, OutOfBlocksError, manager.allocate_blocks, "a", 4)


def test_the_whole_pool_can_be_given_away_and_comes_back() -> None:
    manager = BlockManager(7, 4)
    assert sorted(manager.allocate_blocks("a", 7)) == list(range(7))
    assert len(manager.free_blocks) == 0
    manager.free_sequence("a")
    assert manager.free_blocks == set(range(7))
    manager.verify()


def test_the_block_freed_last_is_used_first() -> None:
    manager = BlockManager(8)
    first = manager.allocate_blocks("a", 2)
    manager.allocate_blocks("b", 1)
    manager.free_sequence("a")
    assert manager.allocate_blocks("c", 2) == first


@pytest.mark.parametrize("n", [-1, -(10**9)])
def test_a_negative_number_of_blocks_is_refused(n: int) -> None:
    manager = BlockManager(4)
    refuses(manager, ValueError, manager.allocate_blocks, "a", n)


def test_a_number_that_is_no_integer_is_refused() -> None:
    manager = BlockManager(4)
    refuses(manager, TypeError, manager.allocate_blocks, "a", 1.5)


def test_freeing_an_unknown_sequence_is_refused() -> None:
    manager = BlockManager(4)
    manager.allocate_blocks("a", 1)
    error = refuses(manager, UnknownSequenceError, manager.free_sequence, "b")
    assert "'b'" in str(error)
    assert isinstance(error, KeyError)


def test_freeing_a_shared_block_leaves_it_to_the_others() -> None:
    manager = BlockManager(4)
    (block,) = manager.allocate_blocks("a", 1)
    manager.share_prefix("a", "b", 1)
    assert manager.ref_count[block] == 2
    manager.free_sequence("a")
    assert manager.ref_count[block] == 1
    assert block not in manager.free_blocks
    manager.free_sequence("b")
    assert block in manager.free_blocks


# ---- appending for many ----------------------------------------------------------------------


def test_appending_gives_one_block_to_each_in_order() -> None:
    manager = BlockManager(8)
    for seq_id in "abc":
        manager.allocate_blocks(seq_id, 1)
    given = manager.append_blocks(["c", "a", "b"])
    assert [manager.sequence_blocks[s][-1] for s in "cab"] == list(given)
    assert manager.append_blocks([]) == ()


def test_appending_is_all_or_nothing() -> None:
    manager = BlockManager(4)
    for seq_id in "abc":
        manager.allocate_blocks(seq_id, 1)
    refuses(manager, OutOfBlocksError, manager.append_blocks, ["a", "b"])
    error = refuses(manager, UnknownSequenceError, manager.append_blocks, ["a", ("x", 1)])
    assert isinstance(error, UnknownSequenceError)
    assert error.seq_id == ("x", 1)


# ---- sharing ---------------------------------------------------------------------------------


def test_sharing_references_the_same_blocks() -> None:
    manager = BlockManager(8)
    blocks = manager.allocate_blocks("a", 3)
    manager.share_prefix("a", "b", 2)
    assert manager.sequence_blocks["b"] == blocks[:2]
    assert [manager.ref_count[b] for b in blocks] == [2, 2, 1]
    assert len(manager.free_blocks) == 5


def test_sharing_more_blocks_than_the_source_has_is_refused() -> None:
    manager = BlockManager(8)
    manager.allocate_blocks("a", 3)
    error = refuses(manager, BlockRangeError, manager.share_prefix, "a", "b", 4)
    assert isinstance(error, ValueError)
    assert isinstance(error, KVCacheError)
    assert "b" not in manager.sequence_blocks


def test_sharing_into_a_sequence_that_holds_blocks_is_refused() -> None:
    manager = BlockManager(8)
    manager.allocate_blocks("a", 3)
    manager.allocate_blocks("b", 1)
    refuses(manager, SequenceExistsError, manager.share_prefix, "a", "b", 2)
    refuses(manager, SequenceExistsError, manager.share_prefix, "a", "a", 2)


def test_sharing_into_an_empty_sequence_is_allowed() -> None:
    manager = BlockManager(8)
    manager.allocate_blocks("a", 3)
    manager.allocate_blocks("b", 0)
    manager.share_prefix("a", "b", 2)
    assert manager.sequence_blocks["b"] == manager.sequence_blocks["a"][:2]


def test_sharing_from_an_unknown_source_or_a_negative_number_is_refused() -> None:
    manager = BlockManager(8)
    manager.allocate_blocks("a", 3)
    refuses(manager, UnknownSequenceError, manager.share_prefix, "x", "b", 0)
    refuses(manager, ValueError, manager.share_prefix, "a", "b", -1)


# ---- copy on write ---------------------------------------------------------------------------


def test_copying_a_shared_block_gives_the_writer_its_own() -> None:
    manager = BlockManager(8)
    blocks = manager.allocate_blocks("a", 2)
    manager.share_prefix("a", "b", 2)
    copy = manager.cow_block("b", 1)
    assert copy is not None
    assert copy.source == blocks[1]
    assert copy.direction is CopyDirection.WITHIN
    assert manager.sequence_blocks["a"] == blocks
    assert manager.sequence_blocks["b"] == (blocks[0], copy.destination)
    assert manager.ref_count[copy.source] == manager.ref_count[copy.destination] == 1
    manager.verify()


def test_copying_a_block_held_once_does_nothing() -> None:
    manager = BlockManager(1)
    manager.allocate_blocks("a", 1)
    before = books(manager)
    assert manager.cow_block("a", 0) is None
    assert books(manager) == before


def test_the_last_holder_keeps_the_original() -> None:
    manager = BlockManager(8)
    manager.allocate_blocks("a", 1)
    for seq_id in "bc":
        manager.share_prefix("a", seq_id, 1)
    assert manager.cow_block("a", 0) is not None
    assert manager.cow_block("b", 0) is not None
    assert manager.cow_block("c", 0) is None


def test_copying_with_nothing_free_is_refused() -> None:
    manager = BlockManager(2)
    manager.allocate_blocks("a", 2)
    manager.share_prefix("a", "b", 2)
    refuses(manager, OutOfBlocksError, manager.cow_block, "b", 0)


@pytest.mark.parametrize("block_index", [2, -1, 10**9])
def test_copying_a_block_that_the_sequence_does_not_have_is_refused(block_index: int) -> None:
    manager = BlockManager(4)
    manager.allocate_blocks("a", 2)
    refuses(manager, BlockRangeError, manager.cow_block, "a", block_index)
    refuses(manager, UnknownSequenceError, manager.cow_block, "x", 0)


# ---- growing, forking, truncating ------------------------------------------------------------


def test_growing_appends_what_is_missing() -> None:
    manager = BlockManager(8, block_size=4)
    manager.allocate_blocks("a", 0)
    assert manager.grow("a", 0, 5) == ()
    assert len(manager.sequence_blocks["a"]) == 2
    assert manager.grow("a", 5, 8) == ()
    assert len(manager.sequence_blocks["a"]) == 2
    assert manager.grow("a", 8, 9) == ()
    assert len(manager.sequence_blocks["a"]) == 3


def test_growing_by_nothing_changes_nothing() -> None:
    manager = BlockManager(4, block_size=4)
    manager.allocate_blocks("a", 1)
    manager.share_prefix("a", "b", 1)
    before = books(manager)
    assert manager.grow("a", 2, 2) == ()
    assert books(manager) == before


def test_a_partly_filled_tail_is_copied_by_whoever_writes_it_first() -> None:
    manager = BlockManager(8, block_size=4)
    head, tail = manager.allocate_blocks("a", 2)
    manager.fork("a", "b", 6)
    assert manager.sequence_blocks["b"] == (head, tail)
    (copy,) = manager.grow("b", 6, 7)
    assert copy == BlockCopy(tail, manager.sequence_blocks["b"][1])
    assert manager.sequence_blocks["a"] == (head, tail)
    assert manager.grow("a", 6, 7) == ()
    assert manager.ref_count[head] == 2


def test_growing_is_all_or_nothing_over_copies_and_new_blocks() -> None:
    manager = BlockManager(4, block_size=4)
    manager.allocate_blocks("a", 2)
    manager.fork("a", "b", 8)
    # Two copies and one new block are three; two are free.
    error = refuses(manager, OutOfBlocksError, manager.grow, "b", 0, 9)
    assert isinstance(error, OutOfBlocksError)
    assert (error.needed, error.available) == (3, 2)
    assert len(manager.grow("b", 0, 8)) == 2


def test_growing_over_a_gap_or_backwards_is_refused() -> None:
    manager = BlockManager(8, block_size=4)
    manager.allocate_blocks("a", 1)
    refuses(manager, BlockRangeError, manager.grow, "a", 5, 6)
    refuses(manager, ValueError, manager.grow, "a", 3, 2)
    refuses(manager, ValueError, manager.grow, "a", -1, 2)
    refuses(manager, UnknownSequenceError, manager.grow, "x", 0, 1)


def test_forking_beyond_the_blocks_of_the_source_is_refused() -> None:
    manager = BlockManager(8, block_size=4)
    manager.allocate_blocks("a", 1)
    refuses(manager, BlockRangeError, manager.fork, "a", "b", 5)
    refuses(manager, UnknownSequenceError, manager.fork, "x", "b", 0)
    refuses(manager, SequenceExistsError, manager.fork, "a", "a", 1)
    manager.fork("a", "b", 0)
    assert manager.sequence_blocks["b"] == ()


def test_truncating_gives_back_whole_blocks_only() -> None:
    manager = BlockManager(8, block_size=4)
    blocks = manager.allocate_blocks("a", 3)
    manager.truncate("a", 5)
    assert manager.sequence_blocks["a"] == blocks[:2]
    manager.truncate("a", 4)
    assert manager.sequence_blocks["a"] == blocks[:1]
    manager.truncate("a", 0)
    assert manager.sequence_blocks["a"] == ()
    assert len(manager.free_blocks) == 8


def test_truncating_beyond_the_blocks_is_refused() -> None:
    manager = BlockManager(8, block_size=4)
    manager.allocate_blocks("a", 2)
    refuses(manager, BlockRangeError, manager.truncate, "a", 9)
    refuses(manager, ValueError, manager.truncate, "a", -1)
    refuses(manager, UnknownSequenceError, manager.truncate, "x", 0)


# ---- making a manager, looking at it ---------------------------------------------------------


@pytest.mark.parametrize(("total_blocks", "block_size"), [(0, 16), (-1, 16), (4, 0), (4, -2)])
def test_sizes_below_one_are_refused(total_blocks: int, block_size: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        BlockManager(total_blocks, block_size)


def test_views_are_live_and_cannot_be_changed() -> None:
    manager = BlockManager(4, block_size=2)
    free, counts, tables = manager.free_blocks, manager.ref_count, manager.sequence_blocks
    manager.allocate_blocks("a", 1)
    assert len(free) == 3
    assert counts[0] == 1
    assert tables["a"] == (0,)
    for view in (free, counts, tables):
        with pytest.raises(TypeError):
            view[0] = 1  # type: ignore[index]
        assert not hasattr(view, "append")
        assert not hasattr(view, "clear")
        assert not hasattr(view, "__dict__")
        assert repr(view).startswith("<")
    for name in ("total_blocks", "block_size", "free_blocks", "ref_count", "sequence_blocks"):
        with pytest.raises(AttributeError):
            setattr(manager, name, None)


def test_views_answer_about_what_is_not_there() -> None:
    manager = BlockManager(4)
    assert 4 not in manager.free_blocks
    assert -1 not in manager.free_blocks
    assert "a" not in manager.free_blocks  # type: ignore[comparison-overlap]
    assert manager.free_blocks - {0} == {1, 2, 3}
    with pytest.raises(KeyError):
        manager.ref_count[-1]
    assert manager.ref_count.get(4) is None
    assert manager.sequence_blocks.get("a") is None
    with pytest.raises(UnknownSequenceError):
        manager.sequence_blocks["a"]


def test_free_blocks_iterate_in_the_order_in_which_they_are_given_away() -> None:
    manager = BlockManager(6)
    for seq_id in range(4):
        manager.allocate_blocks(seq_id, 1)
    for seq_id in (2, 0, 3):
        manager.free_sequence(seq_id)
    order = list(manager.free_blocks)
    assert manager.allocate_blocks("all", 5) == tuple(order)


def test_errors_survive_pickling() -> None:
    for error in (OutOfBlocksError(3, 1), UnknownSequenceError("a"), SequenceExistsError(("b", 1))):
        twin = pickle.loads(pickle.dumps(error))
        assert type(twin) is type(error)
        assert str(twin) == str(error)
        assert vars(twin) == vars(error)


def test_an_id_that_cannot_be_hashed_takes_no_block() -> None:
    manager = BlockManager(4, block_size=4)
    for call in (manager.allocate_blocks, lambda seq_id, n: manager.admit(seq_id, [1], n)):
        with pytest.raises(TypeError, match="unhashable"):
            call(["a"], 2)
        manager.verify()
        assert manager.num_available_blocks == 4
