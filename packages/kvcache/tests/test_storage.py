"""The tensors of the cache. The only tests of this package that need torch."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="KVCache needs the extra pagetide-kvcache[torch]")

from pagetide_kvcache import KVCache, KVCacheSpec, LayerKVCache  # noqa: E402
from pagetide_kvcache.spec import KVDType  # noqa: E402

DTYPES = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "int8": torch.int8,
    "int8-block": torch.int8,
}


@pytest.mark.parametrize("kv_dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 16, 20, 64])
def test_shapes_dtypes_and_bytes_are_the_specs(kv_dtype: KVDType, head_dim: int) -> None:
    spec = KVCacheSpec(2, 3, head_dim, block_size=4, kv_dtype=kv_dtype)
    cache = KVCache(spec, 5)
    assert cache.data.shape == spec.data_shape(5)
    assert cache.data.dtype == DTYPES[kv_dtype]
    assert cache.data.is_contiguous()
    assert cache.device == torch.device("cpu")
    assert cache.num_bytes == 5 * spec.bytes_per_block
    assert not cache.data.any()
    if spec.is_quantized:
        assert cache.scales is not None
        assert cache.scales.shape == spec.scale_shape(5)
        assert cache.scales.dtype == torch.float32
        assert not cache.scales.any()
    else:
        assert cache.scales is None


@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_a_layer_is_views_of_the_unpadded_part(kv_dtype: KVDType) -> None:
    spec = KVCacheSpec(2, 3, 20, block_size=4, kv_dtype=kv_dtype)
    cache = KVCache(spec, 5)
    layer = cache.layer(1)
    assert isinstance(layer, LayerKVCache)
    assert layer is cache.layer(1)
    for part, view in enumerate((layer.k, layer.v)):
        assert view.shape == (5, 3, 4, 20)
        assert view.stride() == (3 * 4 * 32, 4 * 32, 32, 1)
        view[2, 1, 3] = 7
        assert (cache.data[1, part, 2, 1, 3, :20] == 7).all()
        assert not cache.data[1, part, 2, 1, 3, 20:].any()
    assert not cache.data[0].any()


def test_a_tile_is_contiguous_when_nothing_is_padded() -> None:
    layer = KVCache(KVCacheSpec(2, 3, 64, block_size=16), 5).layer(0)
    assert layer.k.is_contiguous()
    assert layer.k[1, 2].is_contiguous()


def test_scales_a_token_are_views() -> None:
    cache = KVCache(KVCacheSpec(2, 3, 16, 4, "int8"), 5)
    layer = cache.layer(1)
    for part, scales in enumerate((layer.k_scales, layer.v_scales)):
        assert scales is not None
        assert scales.shape == (5, 3, 4)
        scales[4, 2, 1] = 0.5
        assert cache.scales is not None
        assert cache.scales[1, part, 4, 2, 1] == 0.5
    assert cache.scales is not None
    assert cache.scales.count_nonzero() == 2


def test_scales_a_block_are_seen_from_every_slot() -> None:
    cache = KVCache(KVCacheSpec(2, 3, 16, 4, "int8-block"), 5)
    layer = cache.layer(1)
    assert cache.scales is not None
    cache.scales[1, 0, 4, 2, 0] = 0.5
    assert layer.k_scales is not None
    assert layer.k_scales.shape == (5, 3, 4)
    assert layer.k_scales.stride(2) == 0
    assert layer.k_scales[4, 2].tolist() == [0.5] * 4
    assert layer.v_scales is not None
    assert not layer.v_scales.any()


def test_what_does_not_exist_is_refused() -> None:
    cache = KVCache(KVCacheSpec(2, 3, 16), 5)
    for index in (-1, 2):
        with pytest.raises(IndexError, match="2 layer"):
            cache.layer(index)
    for num_blocks in (0, -1):
        with pytest.raises(ValueError, match="num_blocks"):
            KVCache(KVCacheSpec(2, 3, 16), num_blocks)


def test_only_host_memory_can_be_pinned() -> None:
    with pytest.raises(ValueError, match="pin_memory"):
        KVCache(KVCacheSpec(2, 3, 16), 2, device="meta", pin_memory=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_a_pinned_pool_is_pinned_whole(kv_dtype: KVDType) -> None:
    cache = KVCache(KVCacheSpec(2, 3, 16, 4, kv_dtype), 2, pin_memory=True)
    assert cache.data.is_pinned()
    assert cache.scales is None or cache.scales.is_pinned()
