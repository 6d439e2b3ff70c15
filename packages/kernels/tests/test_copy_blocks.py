"""Block copies: every layer, data and scales, within a pool and to and from the host."""

from __future__ import annotations

import pytest
import torch
from contract_harness import backends_here

import pagetide_kernels as pk
from pagetide_kvcache import BlockCopy, CopyDirection, KVCacheSpec
from pagetide_kvcache.storage import KVCache

BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), backends_here(), ids=lambda value: str(value)
)
DTYPES = pytest.mark.parametrize(
    "kv_dtype", ["float32", "float16", "bfloat16", "int8", "int8-block"]
)
OUT, IN = CopyDirection.OUT, CopyDirection.IN


def make_pool(kv_dtype: str, num_blocks: int, device: str, first: int) -> KVCache:
    """A pool whose block ``i`` holds ``first + i`` everywhere."""
    cache = KVCache(KVCacheSpec(3, 2, 32, 16, kv_dtype), num_blocks, device=device)
    values = torch.arange(first, first + num_blocks, device=device)
    cache.data.copy_(values.view(1, 1, -1, 1, 1, 1).expand_as(cache.data))
    if cache.scales is not None:
        cache.scales.copy_(values.view(1, 1, -1, 1, 1).expand_as(cache.scales))
    return cache


def contents(cache: KVCache) -> list[int]:
    """The value each block holds; fails if a block is not of one piece."""
    blocks = cache.data.transpose(0, 2).flatten(1).float()
    assert (blocks == blocks[:, :1]).all()
    if cache.scales is not None:
        assert (cache.scales.transpose(0, 2).flatten(1) == blocks[:, :1]).all()
    return blocks[:, 0].int().tolist()


@BACKENDS
@DTYPES
def test_copies_in_every_direction_at_once(backend: str, device: str, kv_dtype: str) -> None:
    pool, host = make_pool(kv_dtype, 8, device, 10), make_pool(kv_dtype, 4, "cpu", 50)
    pk.copy_blocks(
        pool,
        [
            BlockCopy(0, 3),
            BlockCopy(2, 1, IN),
            BlockCopy(0, 5),
            BlockCopy(7, 0, OUT),
            BlockCopy(6, 3, OUT),
        ],
        host_cache=host,
        backend=backend,
    )
    assert contents(pool) == [10, 52, 12, 10, 14, 10, 16, 17]
    assert contents(host) == [17, 51, 52, 16]


@BACKENDS
def test_no_copies(backend: str, device: str) -> None:
    pool = make_pool("float16", 4, device, 0)
    pk.copy_blocks(pool, [], backend=backend)
    assert contents(pool) == [0, 1, 2, 3]


@BACKENDS
@pytest.mark.parametrize(
    ("copies", "message"),
    [
        ([BlockCopy(0, 8)], "lies outside kv_cache"),
        ([BlockCopy(-1, 2)], "lies outside kv_cache"),
        ([BlockCopy(0, 4, OUT)], "lies outside host_cache"),
        ([BlockCopy(4, 0, IN)], "lies outside host_cache"),
        ([BlockCopy(0, 2), BlockCopy(1, 2)], "two copies write the same block"),
        ([BlockCopy(0, 2), BlockCopy(1, 2, IN)], "two copies write the same block"),
        ([BlockCopy(0, 2), BlockCopy(2, 3)], "copied from and to"),
        ([BlockCopy(5, 5)], "copied from and to"),
        ([BlockCopy(2, 1, OUT), BlockCopy(0, 2, IN)], "copied from and to"),
    ],
)
def test_refuses_what_would_depend_on_order(
    backend: str, device: str, copies: list[BlockCopy], message: str
) -> None:
    """Nothing is copied when one of the copies is wrong."""
    pool, host = make_pool("int8", 8, device, 10), make_pool("int8", 4, "cpu", 50)
    with pytest.raises(ValueError, match=message):
        pk.copy_blocks(pool, [BlockCopy(6, 7), *copies], host_cache=host, backend=backend)
    assert contents(pool) == list(range(10, 18))
    assert contents(host) == list(range(50, 54))


def test_refuses_a_missing_or_different_host_pool() -> None:
    pool = make_pool("float32", 4, "cpu", 0)
    with pytest.raises(ValueError, match="pass host_cache"):
        pk.copy_blocks(pool, [BlockCopy(0, 0, OUT)])
    other = make_pool("float16", 4, "cpu", 0)
    with pytest.raises(ValueError, match="host_cache holds"):
        pk.copy_blocks(pool, [BlockCopy(0, 0, OUT)], host_cache=other)
