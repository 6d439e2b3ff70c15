"""The layout contract in numbers, against the numbers worked out by hand."""

from __future__ import annotations

import dataclasses

import pytest

from pagetide_kvcache import KVCacheSpec
from pagetide_kvcache.spec import KVDType


@pytest.mark.parametrize(
    ("kv_dtype", "element_size", "scale_bytes_per_tile"),
    [
        ("float32", 4, 0),
        ("float16", 2, 0),
        ("bfloat16", 2, 0),
        ("int8", 1, 16 * 4),
        ("int8-block", 1, 4),
    ],
)
def test_bytes_of_a_block(kv_dtype: KVDType, element_size: int, scale_bytes_per_tile: int) -> None:
    spec = KVCacheSpec(3, 5, 64, block_size=16, kv_dtype=kv_dtype)
    tile = 16 * 64 * element_size + scale_bytes_per_tile
    assert spec.element_size == element_size
    assert spec.bytes_per_block == 3 * 2 * 5 * tile
    assert spec.bytes_per_token * 16 == spec.bytes_per_block
    assert spec.is_quantized == bool(scale_bytes_per_tile)


def test_a_tile_of_the_usual_shape_is_two_kibibytes() -> None:
    assert KVCacheSpec(1, 1, 64).bytes_per_block == 2 * 2048


@pytest.mark.parametrize(
    ("head_dim", "padded"), [(1, 16), (16, 16), (17, 32), (40, 48), (64, 64), (72, 80), (100, 112)]
)
def test_the_head_is_padded_to_a_multiple_of_sixteen(head_dim: int, padded: int) -> None:
    spec = KVCacheSpec(2, 3, head_dim, block_size=4)
    assert spec.padded_head_dim == padded
    assert spec.data_shape(7) == (2, 2, 7, 3, 4, padded)


def test_scales_are_one_a_token_and_head_or_one_a_block_and_head() -> None:
    assert KVCacheSpec(2, 3, 64, 4, "int8").scale_shape(7) == (2, 2, 7, 3, 4)
    assert KVCacheSpec(2, 3, 64, 4, "int8-block").scale_shape(7) == (2, 2, 7, 3, 1)
    with pytest.raises(ValueError, match="no scales"):
        KVCacheSpec(2, 3, 64, 4).scale_shape(7)


@pytest.mark.parametrize(("head_dim", "least"), [(64, 1.88), (128, 1.93)])
@pytest.mark.parametrize("kv_dtype", ["int8", "int8-block"])
def test_int8_holds_nearly_twice_the_tokens_in_the_same_bytes(
    head_dim: int, least: float, kv_dtype: KVDType
) -> None:
    num_bytes = 1 << 30
    half = KVCacheSpec(24, 2, head_dim).num_blocks_for(num_bytes)
    quantized = KVCacheSpec(24, 2, head_dim, kv_dtype=kv_dtype).num_blocks_for(num_bytes)
    assert quantized / half >= least


def test_blocks_for_bytes_never_exceed_them() -> None:
    spec = KVCacheSpec(2, 2, 24, 4, "int8")
    for num_bytes in (0, spec.bytes_per_block - 1, spec.bytes_per_block, 10**9):
        num_blocks = spec.num_blocks_for(num_bytes)
        assert num_blocks * spec.bytes_per_block <= num_bytes
        assert (num_blocks + 1) * spec.bytes_per_block > num_bytes
    with pytest.raises(ValueError, match="num_bytes=-1"):
        spec.num_blocks_for(-1)


@pytest.mark.parametrize("name", ["num_layers", "num_kv_heads", "head_dim", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "2", None])
def test_a_number_that_makes_no_sense_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        dataclasses.replace(KVCacheSpec(1, 1, 64), **{name: value})  # type: ignore[arg-type]


def test_an_unknown_dtype_is_refused_with_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"'fp8'.*'int8-block'"):
        KVCacheSpec(1, 1, 64, kv_dtype="fp8")  # type: ignore[arg-type]


def test_a_spec_is_a_frozen_value() -> None:
    spec = KVCacheSpec(1, 2, 64)
    assert spec == KVCacheSpec(1, 2, 64)
    assert hash(spec) == hash(KVCacheSpec(1, 2, 64))
    with pytest.raises(dataclasses.FrozenInstanceError):
        spec.num_layers = 2  # type: ignore[misc]
