"""`verify` finds books that were falsified; each way of falsifying them is a defect to catch."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pagetide_kvcache import BlockManager, InvariantError


def busy_manager() -> BlockManager:
    """Held, shared, findable, cached and free blocks, one of each at least."""
    manager = BlockManager(12, block_size=2)
    manager.admit("a", range(5), 5)
    manager.commit("a", range(5), 5)
    manager.fork("a", "b", 5)
    manager.admit("c", range(10, 14), 4)
    manager.commit("c", range(10, 14), 4)
    manager.free_sequence("c")
    manager.allocate_blocks("d", 1)
    manager.free_sequence("d")
    manager.verify()
    return manager


def lose_a_reference(manager: BlockManager) -> None:
    manager._pool.ref_counts[0] -= 1


def leak_a_block(manager: BlockManager) -> None:
    manager._pool._freed.pop()


def free_a_block_twice(manager: BlockManager) -> None:
    manager._pool._freed.append(manager._pool._freed[-1])


def free_a_block_that_is_held(manager: BlockManager) -> None:
    manager._pool._freed[-1] = 0


def free_a_block_that_does_not_exist(manager: BlockManager) -> None:
    manager._pool._freed.append(99)


def free_a_block_that_is_findable(manager: BlockManager) -> None:
    block_id, _ = manager._index.unreferenced.popitem()
    manager._pool._freed.append(block_id)


def evict_a_block_that_is_held(manager: BlockManager) -> None:
    manager._index.unreferenced[0] = None


def evict_a_block_that_is_not_findable(manager: BlockManager) -> None:
    manager._index.unreferenced[manager._pool._freed.pop()] = None


def put_a_block_twice_into_a_table(manager: BlockManager) -> None:
    table = manager._sequences["a"].block_ids
    table.append(table[0])
    manager._pool.ref_counts[table[0]] += 1


def lengthen_a_path(manager: BlockManager) -> None:
    manager._sequences["a"].path.num_blocks = 7


def forget_a_serial(manager: BlockManager) -> None:
    manager._index._serials[0] = -1


def leave_a_key_that_leads_nowhere(manager: BlockManager) -> None:
    manager._index._blocks[99, b"12345678"] = 3


def use_a_serial_twice(manager: BlockManager) -> None:
    manager._index._serials[0] = manager._index._serials[1]


def make_a_block_older_than_its_parent(manager: BlockManager) -> None:
    index = manager._index
    index._next_serial = 0


def swap_two_blocks(manager: BlockManager) -> None:
    keys = manager._index._keys
    keys[0], keys[1] = keys[1], keys[0]


def index_part_of_a_block(manager: BlockManager) -> None:
    index = manager._index
    key = index._keys[0]
    assert key is not None
    parent, data = key
    del index._blocks[parent, data]
    index._keys[0] = (parent, data[:4])
    index._blocks[parent, data[:4]] = 0


@pytest.mark.parametrize(
    "falsify",
    [
        lose_a_reference,
        leak_a_block,
        free_a_block_twice,
        free_a_block_that_is_held,
        free_a_block_that_does_not_exist,
        free_a_block_that_is_findable,
        evict_a_block_that_is_held,
        evict_a_block_that_is_not_findable,
        put_a_block_twice_into_a_table,
        lengthen_a_path,
        forget_a_serial,
        leave_a_key_that_leads_nowhere,
        use_a_serial_twice,
        make_a_block_older_than_its_parent,
        swap_two_blocks,
        index_part_of_a_block,
    ],
    ids=lambda falsify: falsify.__name__,
)
def test_verify_finds(falsify: Callable[[BlockManager], None]) -> None:
    manager = busy_manager()
    falsify(manager)
    with pytest.raises(InvariantError):
        manager.verify()
