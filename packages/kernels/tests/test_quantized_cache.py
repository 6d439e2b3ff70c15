"""INT8 caches: scales that are written, ranges that grow, lives that end, zeros and NaN."""

from __future__ import annotations

import pytest
import torch
from contract_harness import Layer, backends_here, make_layer, read_back

import pagetide_kernels as pk

BACKENDS = pytest.mark.parametrize(
    ("backend", "device"), backends_here(), ids=lambda value: str(value)
)
KINDS = pytest.mark.parametrize("kv_dtype", ["int8", "int8-block"])
TABLE = [3, 1, 2]


def randn(*shape: int) -> torch.Tensor:
    """The same numbers in every test and on every device."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def store(
    layer: Layer, backend: str, x: torch.Tensor, start: int, table: list[int] = TABLE
) -> None:
    """Append tokens ``x`` at position ``start`` of the sequence."""
    metadata = pk.AttentionMetadata.from_host(
        [len(x)], [start + len(x)], [table], block_size=16, num_blocks=5, device=x.device
    )
    pk.store_kv(x, -x, layer.k, layer.v, metadata, **layer.scales, backend=backend)


def check(layer: Layer, x: torch.Tensor, bound: float, table: list[int] = TABLE) -> None:
    """What the cache gives back for K and V lies within ``bound`` of each block's largest."""
    for sign, cache, scales in ((1, layer.k, layer.k_scales), (-1, layer.v, layer.v_scales)):
        stored = read_back(cache, scales, table, len(x))
        for first in range(0, len(x), 16):
            block = x[first : first + 16].double()
            largest = block.abs().amax(dim=(0, 2), keepdim=True)
            assert ((sign * stored[first : first + 16] - block).abs() <= bound * largest).all()


@BACKENDS
@KINDS
def test_zero_tokens_have_scale_zero_and_read_as_zeros(
    backend: str, device: str, kv_dtype: str
) -> None:
    layer = make_layer(5, 2, 16, 32, kv_dtype, device=device, fill="nan")
    store(layer, backend, torch.zeros(20, 2, 32, device=device), 0)
    assert layer.k_scales is not None
    assert (layer.k_scales[3] == 0).all()
    assert (read_back(layer.k, layer.k_scales, TABLE, 20) == 0).all()
    metadata = pk.AttentionMetadata.from_host(
        [1], [20], [TABLE], block_size=16, num_blocks=5, device=device
    )
    q = torch.ones(1, 4, 32, device=device)
    out = pk.paged_attention(
        q, layer.k, layer.v, metadata, scale=1.0, **layer.scales, backend=backend
    )
    assert (out == 0).all()


@BACKENDS
@KINDS
@pytest.mark.parametrize("chunk", [1, 3, 16, 40])
def test_a_much_larger_token_harms_neither_itself_nor_the_block(
    backend: str, device: str, kv_dtype: str, chunk: int
) -> None:
    """A token 100 times the earlier ones: all stay within the widened range's step (B19)."""
    x = randn(40, 2, 32)
    x[7] *= 100
    x[21, 1] *= 100
    x = x.to(device)
    layer = make_layer(5, 2, 16, 32, kv_dtype, device=device, fill="7f")
    for start in range(0, 40, chunk):
        store(layer, backend, x[start : start + chunk], start)
    # Half a step when written; half a step of the wider range each time the block is rounded again.
    num_roundings = 1 if kv_dtype == "int8" else -(-16 // chunk) + 1
    check(layer, x, num_roundings * 0.5001 / 127)


@BACKENDS
def test_block_scale_requantises_only_upwards(backend: str, device: str) -> None:
    """Smaller tokens leave the block's bytes and scale alone; only a larger one rewrites them."""
    layer = make_layer(5, 1, 16, 32, "int8-block", device=device)
    first, small, large = randn(3, 4, 1, 32).to(device)
    store(layer, backend, first, 0)
    assert layer.k_scales is not None
    data, scale = layer.k[3, :, :4].clone(), layer.k_scales[3].clone()
    store(layer, backend, small * 0.1, 4)
    assert torch.equal(layer.k[3, :, :4], data)
    assert torch.equal(layer.k_scales[3], scale)
    store(layer, backend, large * 10, 8)
    assert (layer.k_scales[3] > scale).all()
    check(layer, torch.cat([first, small * 0.1, large * 10]), 1.01 / 127)


@BACKENDS
@pytest.mark.parametrize("stale", [1e30, 0.0, torch.nan, torch.inf])
def test_a_block_begins_afresh_at_its_first_slot(backend: str, device: str, stale: float) -> None:
    """The scale of a block's earlier life does not coarsen (or poison) the next."""
    layer = make_layer(5, 2, 16, 32, "int8-block", device=device, fill="7f")
    assert layer.k_scales is not None
    assert layer.v_scales is not None
    for scales in (layer.k_scales, layer.v_scales):
        scales[..., 0] = stale
    x = randn(20, 2, 32).to(device)
    store(layer, backend, x[:1], 0)
    store(layer, backend, x[1:18], 1)
    store(layer, backend, x[18:], 18)
    check(layer, x, 1.01 / 127)
    # The block is given to another sequence, whose tokens are far smaller.
    y = randn(3, 2, 32).to(device) * 1e-3
    store(layer, backend, y, 0, table=[1])
    check(layer, y, 0.5001 / 127, table=[1])


@BACKENDS
def test_blocks_of_one_step_do_not_mix(backend: str, device: str) -> None:
    """Several sequences' open blocks, and several blocks of one, each get a scale of their own."""
    layer = make_layer(8, 2, 16, 32, "int8-block", device=device, fill="nan")
    tables = [[6], [2, 0], [5]]
    sizes = [1.0, 100.0, 0.01]
    x = [randn(n, 2, 32).to(device) * size for n, size in zip((9, 30, 16), sizes, strict=True)]
    done = [0, 0, 0]
    for stops in ([4, 13, 16], [5, 17, 16], [9, 30, 16]):
        metadata = pk.AttentionMetadata.from_host(
            [b - a for a, b in zip(done, stops, strict=True)], stops, tables,
            block_size=16, num_blocks=8, device=device,
        )  # fmt: skip
        new = torch.cat([t[a:b] for t, a, b in zip(x, done, stops, strict=True)])
        pk.store_kv(new, -new, layer.k, layer.v, metadata, **layer.scales, backend=backend)
        done = stops
    for tokens, table in zip(x, tables, strict=True):
        check(layer, tokens, 2.01 / 127, table=table)


@BACKENDS
@KINDS
@pytest.mark.parametrize("count", [1, 5, 16, 20])
def test_what_lies_behind_the_steps_tokens_is_not_read(
    backend: str, device: str, kv_dtype: str, count: int
) -> None:
    """Block 0 first: a slot that stands for no token must not be taken for one of its own."""
    layer = make_layer(5, 2, 16, 32, kv_dtype, device=device, fill="7f")
    buffer = torch.full((64, 2, 32), torch.inf, device=device)
    buffer[16 : 16 + count] = randn(count, 2, 32).to(device)
    store(layer, backend, buffer[16 : 16 + count], 0, table=[0, 3])
    check(layer, buffer[16 : 16 + count], 0.5001 / 127, table=[0, 3])


@BACKENDS
@KINDS
def test_nan_stays_visible(backend: str, device: str, kv_dtype: str) -> None:
    """A model that computes NaN must not get plausible numbers back from the cache."""
    layer = make_layer(5, 1, 16, 32, kv_dtype, device=device)
    x = torch.ones(4, 1, 32, device=device)
    x[2, 0, 5] = torch.nan
    store(layer, backend, x, 0)
    assert read_back(layer.k, layer.k_scales, TABLE, 4)[2].isnan().all()


@BACKENDS
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_scales_are_of_the_stored_values(backend: str, device: str, dtype: torch.dtype) -> None:
    """Half-precision tokens are quantised in float32: their largest element maps to 127 exactly."""
    layer = make_layer(5, 3, 16, 64, "int8", device=device)
    x = randn(16, 3, 64).to(device, dtype)
    store(layer, backend, x, 0)
    assert (layer.k[3].abs().amax(dim=-1) == 127).all()
    check(layer, x, 0.5001 / 127)
