"""Copies of one plan do not depend on their order: what the manager holds back for that."""

from __future__ import annotations

import pytest

from pagetide_kvcache import BlockManager, OutOfBlocksError


def forked(total_blocks: int, *, has_plan: bool = True) -> BlockManager:
    """A and B share one partly filled block."""
    manager = BlockManager(total_blocks, block_size=4)
    manager.allocate_blocks("A", 1)
    manager.fork("A", "B", 2)
    if has_plan:
        manager.start_plan()
    return manager


def test_the_source_of_a_copy_is_not_given_away_within_the_plan() -> None:
    manager = forked(3)
    (copy,) = manager.grow("A", 2, 3)
    manager.free_sequence("B")  # the last holder of the source leaves
    assert copy.source not in manager.free_blocks
    assert manager.num_available_blocks == 1
    manager.verify()
    manager.allocate_blocks("C", 1)
    with pytest.raises(OutOfBlocksError):
        manager.allocate_blocks("C", 1)
    manager.start_plan()
    assert manager.allocate_blocks("C", 1) == (copy.source,)
    manager.verify()


def test_the_destination_of_a_copy_is_not_given_away_within_the_plan() -> None:
    manager = forked(2)
    (copy,) = manager.grow("A", 2, 3)
    manager.free_sequence("A")
    assert copy.destination not in manager.free_blocks
    manager.fork("B", "C", 2)
    with pytest.raises(OutOfBlocksError):
        manager.grow("C", 2, 3)  # would make it a destination twice
    manager.start_plan()
    (again,) = manager.grow("C", 2, 3)
    assert again.destination == copy.destination
    manager.verify()


def test_a_copy_of_a_copy_reads_the_first_source() -> None:
    manager = forked(4)
    (first,) = manager.grow("A", 2, 3)
    manager.fork("A", "C", 2)
    (second,) = manager.grow("C", 2, 3)
    assert second.source == first.source
    assert second.destination != first.destination
    manager.start_plan()
    manager.fork("C", "D", 2)
    (third,) = manager.grow("D", 2, 3)
    assert third.source == second.destination


def test_the_last_holder_writes_a_held_source_in_place() -> None:
    manager = forked(4)
    (copy,) = manager.grow("A", 2, 3)
    assert manager.grow("B", 2, 3) == ()
    assert manager.sequence_blocks["B"] == (copy.source,)


def test_a_held_findable_block_can_be_hit_but_not_evicted() -> None:
    manager = BlockManager(3, block_size=2)
    tokens = [1, 2, 3]
    manager.admit("A", tokens[:2], 2)
    manager.commit("A", tokens, 2)
    manager.fork("A", "B", 2)
    manager.start_plan()
    copy = manager.cow_block("A", 0)
    assert copy is not None
    manager.free_sequence("B")
    manager.verify()
    manager.allocate_blocks("X", 1)
    with pytest.raises(OutOfBlocksError):
        manager.allocate_blocks("X", 1)
    manager.free_sequence("X")
    admission = manager.admit("C", tokens, 3)
    assert admission.block_ids[0] == copy.source
    manager.free_sequence("C")
    manager.start_plan()
    manager.verify()
    manager.free_sequence("A")
    assert manager.num_available_blocks == 3
    assert manager.match_prefix(tokens) == 1


def test_without_plans_nothing_is_held() -> None:
    manager = forked(2, has_plan=False)
    (copy,) = manager.grow("A", 2, 3)
    manager.free_sequence("B")
    assert manager.allocate_blocks("C", 1) == (copy.source,)
    manager.verify()
