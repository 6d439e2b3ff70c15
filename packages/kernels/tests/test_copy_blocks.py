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


def make_pool(kv_dtype: str, num_blocks: int, device: str, seed: int) -> KVCache:
    """A pool in which no two elements need be equal."""
    cache = KVCache(KVCacheSpec(3, 2, 32, 16, kv_dtype), num_blocks, device=device)
    generator = torch.Generator().manual_seed(seed)
    for tensor in [cache.data] if cache.scales is None else [cache.data, cache.scales]:
        tensor.copy_(torch.randint(-128, 128, tensor.shape, generator=generator))
    return cache


def contents(cache: KVCache) -> list[torch.Tensor]:
    """What each block holds: all layers, keys and values, scales."""
    blocks = cache.data.transpose(0, 2).flatten(1).float()
    if cache.scales is not None:
        blocks = torch.cat([blocks, cache.scales.transpose(0, 2).flatten(1)], dim=1)
    return list(blocks.cpu().clone())


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@BACKENDS
@DTYPES
def test_copies_in_every_direction_at_once(backend: str, device: str, kv_dtype: str) -> None:
    pool, host = make_pool(kv_dtype, 8, device, 0), make_pool(kv_dtype, 4, "cpu", 1)
    p, h = contents(pool), contents(host)
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
    assert same(contents(pool), [p[0], h[2], p[2], p[0], p[4], p[0], p[6], p[7]])
    assert same(contents(host), [p[7], h[1], h[2], p[6]])


@BACKENDS
def test_no_copies(backend: str, device: str) -> None:
    pool = make_pool("float16", 4, device, 0)
    before = contents(pool)
    pk.copy_blocks(pool, [], backend=backend)
    assert same(contents(pool), before)


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
    pool, host = make_pool("int8", 8, device, 0), make_pool("int8", 4, "cpu", 1)
    before = contents(pool), contents(host)
    with pytest.raises(ValueError, match=message):
        pk.copy_blocks(pool, [BlockCopy(6, 7), *copies], host_cache=host, backend=backend)
    assert same(contents(pool), before[0])
    assert same(contents(host), before[1])


def test_refuses_a_missing_or_different_host_pool() -> None:
    pool = make_pool("float32", 4, "cpu", 0)
    with pytest.raises(ValueError, match="pass host_cache"):
        pk.copy_blocks(pool, [BlockCopy(0, 0, OUT)])
    other = make_pool("float16", 4, "cpu", 0)
    with pytest.raises(ValueError, match="host_cache holds"):
        pk.copy_blocks(pool, [BlockCopy(0, 0, OUT)], host_cache=other)
