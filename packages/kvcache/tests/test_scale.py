"""What only shows at size: memory of a large pool, waste, and leaks over many requests."""

from __future__ import annotations

import random
import tracemalloc
from array import array

from pagetide_kvcache import BlockManager, OutOfBlocksError


def test_ten_million_blocks_cost_twenty_bytes_each_until_used() -> None:
    tracemalloc.start()
    try:
        manager = BlockManager(10_000_000)
        manager.allocate_blocks("a", 1_000)
        manager.free_sequence("a")
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(manager.free_blocks) == 10_000_000
    assert peak < 10_000_000 * (4 + 8 + 8) + 1_000_000


def test_half_a_block_a_sequence_is_all_that_is_wasted() -> None:
    rng = random.Random(5)
    manager = BlockManager(200_000, block_size=16)
    num_used = 0
    for seq_id in range(5_000):
        num_tokens = rng.randint(1, 1023)  # mean 512
        manager.admit(seq_id, array("i"), num_tokens)
        num_used += num_tokens
    num_allocated = 16 * (manager.total_blocks - len(manager.free_blocks))
    assert (num_allocated - num_used) / num_allocated <= 0.016


def test_the_pool_returns_to_its_start_after_a_hundred_thousand_requests() -> None:
    rng = random.Random(6)
    manager = BlockManager(256, block_size=4)
    texts = [array("i", [rng.randrange(2) for _ in range(64)]) for _ in range(50)]
    running: list[tuple[int, array[int], int]] = []
    for seq_id in range(100_000):
        tokens = texts[rng.randrange(50)][: rng.randint(1, 64)]
        while True:
            try:
                manager.admit(seq_id, tokens, len(tokens))
                break
            except OutOfBlocksError:
                manager.free_sequence(running.pop(rng.randrange(len(running)))[0])
        manager.commit(seq_id, tokens, len(tokens))
        running.append((seq_id, tokens, len(tokens)))
        if seq_id % 5 == 0:
            twin = -1 - seq_id
            manager.fork(seq_id, twin, len(tokens))
            manager.free_sequence(twin)
    for seq_id, _, _ in running:
        manager.free_sequence(seq_id)
    manager.verify()
    assert manager.num_available_blocks == 256
    manager.allocate_blocks("all", 256)
    manager.free_sequence("all")
    assert manager.free_blocks == set(range(256))
    assert len(manager._index) == 0
