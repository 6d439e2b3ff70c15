"""Every bad argument is refused by name, before any back end runs or any byte is written."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract_harness import make_layer

import pagetide_kernels as pk

META = pk.AttentionMetadata.from_host([1, 3], [5, 20], [[0], [2, 1]], block_size=16, num_blocks=4)


class NeverRuns(pk.AttentionBackend):
    """Fails the test if validation lets a call through."""

    name = "never"

    def unsupported_reason(
        self, shape: pk.AttentionShape | None, device: torch.device
    ) -> str | None:
        return None

    def paged_attention(self, *args: Any, **kwargs: Any) -> None:
        pytest.fail("the back end ran")

    def store_kv(self, *args: Any, **kwargs: Any) -> None:
        pytest.fail("the back end ran")


def attention_arguments(kv_dtype: str = "float32") -> dict[str, Any]:
    layer = make_layer(4, 2, 16, 64, kv_dtype)
    return {
        "q": torch.randn(4, 6, 64), "k_cache": layer.k, "v_cache": layer.v, "metadata": META,
        "scale": 0.125, **layer.scales, "backend": NeverRuns(),
    }  # fmt: skip


def store_arguments(kv_dtype: str = "float32") -> dict[str, Any]:
    arguments = attention_arguments(kv_dtype)
    del arguments["q"], arguments["scale"]
    return {"k": torch.randn(4, 2, 64), "v": torch.randn(4, 2, 64), **arguments}


def strided_last(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, 2)[..., 0]


BAD_CACHES: list[tuple[str, dict[str, Any], str]] = [
    ("float32", {"k_cache": torch.randn(4, 2, 16)}, "k_cache has shape"),
    ("float32", {"k_cache": torch.randn(4, 2, 8, 64)}, "k_cache has shape"),
    ("float32", {"v_cache": torch.randn(5, 2, 16, 64)}, "v_cache has shape"),
    ("float32", {"v_cache": torch.randn(4, 2, 16, 32)}, "v_cache has shape"),
    ("float32", {"v_cache": torch.randn(4, 2, 16, 64).half()}, "v_cache has dtype"),
    ("float32", {"k_cache": strided_last(4, 2, 16, 64)}, "k_cache has stride 2"),
    ("float32", {"v_cache": strided_last(4, 2, 16, 64)}, "v_cache has stride 2"),
    ("float32", {"k_cache": torch.randn(4, 2, 16, 64, device="meta")}, "k_cache is on meta"),
    ("float32", {"k_scales": torch.ones(4, 2, 16)}, "k_scales is given, but the cache is float32"),
    ("int8", {"k_scales": None}, "k_scales is None, but the cache is int8"),
    ("int8", {"v_scales": None}, "v_scales is None, but the cache is int8"),
    ("int8", {"k_scales": torch.ones(4, 2, 8)}, "k_scales has shape"),
    ("int8", {"v_scales": torch.ones(4, 2, 16).half()}, "v_scales has dtype"),
    ("int8", {"k_scales": torch.ones(4, 2, 1).expand(-1, -1, 16)}, "differ in kind"),
    (
        "int8",
        {"k_scales": torch.ones(1, 2, 16).expand(4, -1, -1)},
        "k_scales is an expanded view",
    ),
    ("float32", {"metadata": dataclasses.replace(META, block_size=32)}, "shape"),
]

BAD_ATTENTION: list[tuple[str, dict[str, Any], str]] = [
    *BAD_CACHES,
    ("float32", {"q": torch.randn(4, 384)}, "q has shape"),
    ("float32", {"q": torch.randn(5, 6, 64)}, "q has shape"),
    ("float32", {"q": torch.randn(4, 6, 32)}, "q has shape"),
    ("float32", {"q": torch.randn(4, 5, 64)}, "num_heads=5 is no multiple of num_kv_heads=2"),
    ("float32", {"q": torch.randn(4, 33, 64)}, "num_heads=33 is no multiple of num_kv_heads=2"),
    ("float32", {"q": torch.randn(4, 1, 64)}, "num_heads=1 is no multiple of num_kv_heads=2"),
    ("float32", {"q": strided_last(4, 6, 64)}, "q has stride 2"),
    ("float32", {"q": torch.randn(4, 6, 64).half()}, "does not go with queries of torch.float16"),
    ("float16", {"q": torch.randn(4, 6, 64).bfloat16()}, "does not go with queries"),
    ("float32", {"q": torch.randn(4, 6, 64).double()}, "queries of torch.float64 are not"),
    ("float32", {"q": torch.ones(4, 6, 64, dtype=torch.int32)}, "queries of torch.int32 are not"),
    ("float32", {"scale": float("nan")}, "scale=nan"),
    ("float32", {"scale": float("inf")}, "scale=inf"),
    ("float32", {"scale": -1e39}, "scale=-1e.39 must be a finite number in float32"),
    ("float32", {"window": 0}, "window=0"),
    ("float32", {"window": -1}, "window=-1"),
    ("float32", {"window": 2.5}, "window=2.5"),
    ("float32", {"window": True}, "window=True"),
    ("float32", {"soft_cap": 0.0}, "soft_cap=0.0"),
    ("float32", {"soft_cap": -3.0}, "soft_cap=-3.0"),
    ("float32", {"soft_cap": float("inf")}, "soft_cap=inf"),
    ("float32", {"soft_cap": 1e39}, "soft_cap=1e.39 must be a positive number in float32"),
    ("float32", {"soft_cap": 1e-300}, "soft_cap=1e-300"),
    ("float32", {"out": torch.empty(4, 6, 32)}, "out has shape"),
    ("float32", {"out": torch.empty(4, 6, 64).half()}, "out has dtype"),
    ("float32", {"out": strided_last(4, 6, 64)}, "out has stride 2"),
    ("float32", {"out": torch.empty(1, 6, 64).expand(4, -1, -1)}, "out is an expanded view"),
    ("float32", {"backend": "quantum"}, "no back end is called 'quantum'"),
]

BAD_STORE: list[tuple[str, dict[str, Any], str]] = [
    *BAD_CACHES,
    ("float32", {"k": torch.randn(4, 6, 64)}, "k has 6 heads but k_cache has 2"),
    ("float32", {"k": torch.randn(3, 2, 64)}, "k has shape"),
    ("float32", {"v": torch.randn(3, 2, 64)}, "v has shape"),
    ("float32", {"v": torch.randn(4, 2, 32)}, "v has shape"),
    ("float32", {"v": torch.randn(4, 2, 64).half()}, "v has dtype"),
    ("float32", {"k": strided_last(4, 2, 64)}, "k has stride 2"),
    ("float32", {"v": strided_last(4, 2, 64)}, "v has stride 2"),
    ("float32", {"k_cache": torch.randn(1, 2, 16, 64).expand(4, -1, -1, -1)}, "expanded view"),
    ("float32", {"v_cache": torch.randn(1, 2, 16, 64).expand(4, -1, -1, -1)}, "expanded view"),
]


@pytest.mark.parametrize(("kv_dtype", "changes", "message"), BAD_ATTENTION)
def test_paged_attention_refuses(kv_dtype: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.paged_attention(**(attention_arguments(kv_dtype) | changes))


@pytest.mark.parametrize(("kv_dtype", "changes", "message"), BAD_STORE)
def test_store_kv_refuses(kv_dtype: str, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.store_kv(**(store_arguments(kv_dtype) | changes))


def test_what_is_no_tensor_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="k_cache is a list"):
        pk.paged_attention(**(attention_arguments() | {"k_cache": [[1.0]]}))


def test_unsupported_pairs_name_the_alternative() -> None:
    with pytest.raises(pk.UnsupportedError, match="use one of float16, int8, int8-block"):
        pk.AttentionShape(4, 2, 64, 16, torch.float16, "bfloat16")
    with pytest.raises(pk.UnsupportedError, match=r"use one of torch\.float32"):
        pk.paged_attention(**(attention_arguments() | {"k_cache": torch.ones(4, 2, 16, 64).double(),
                                                       "v_cache": torch.ones(4, 2, 16, 64).double()}))  # fmt: skip  # noqa: E501


FROM_HOST = {
    "query_lens": [1, 3], "seq_lens": [5, 20], "block_tables": [[0], [2, 1]],
    "block_size": 16, "num_blocks": 4,
}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_lens": [1]}, "1, 2 and 2 sequences"),
        ({"block_tables": [[0]]}, "2, 2 and 1 sequences"),
        ({"query_lens": [6, 3]}, r"seq_lens\[0\]=5 must be an integer of at least 6"),
        ({"query_lens": [-1, 3]}, r"query_lens\[0\]=-1"),
        ({"query_lens": [1.0, 3]}, r"query_lens\[0\]=1.0"),
        ({"seq_lens": [17, 20]}, r"seq_lens\[0\]=17 needs 2 blocks"),
        ({"seq_lens": [5, 33]}, r"seq_lens\[1\]=33 needs 3 blocks"),
        ({"block_tables": [[4], [2, 1]]}, r"block_tables\[0\] names blocks from 4"),
        ({"block_tables": [[-1], [2, 1]]}, r"block_tables\[0\] names blocks from -1"),
        ({"block_tables": [[0], [2, 1, 9]]}, r"block_tables\[1\] names blocks from 1 to 9"),
        ({"seq_lens": [5, 21], "block_tables": [[1], [2, 1]]}, "the same slot"),
        ({"block_size": 0}, "block_size=0"),
        ({"num_blocks": 0}, "num_blocks=0"),
    ],
)
def test_from_host_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        pk.AttentionMetadata.from_host(**(FROM_HOST | changes))


def test_from_host_places_every_token() -> None:
    metadata = pk.AttentionMetadata.from_host(**FROM_HOST)
    assert metadata.query_start_loc.tolist() == [0, 1, 4]
    assert metadata.seq_lens.tolist() == [5, 20]
    assert metadata.rows.tolist() == [0, 1]
    assert metadata.block_tables.tolist() == [[0, 0], [2, 1]]
    assert metadata.slot_mapping.tolist() == [4, 17, 18, 19]
    assert metadata.bounds == pk.AttentionBounds(2, 4, 3, 20)


def replaced(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> pk.AttentionMetadata:
    return dataclasses.replace(META, **{name: change(getattr(META, name))})


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "rows", "block_tables"])
@pytest.mark.parametrize(
    "change", [lambda x: x.long(), lambda x: x.float(), lambda x: x[None], lambda x: x.to("meta")]
)
def test_metadata_refuses_other_dtypes_ranks_and_devices(name: str, change: Any) -> None:
    with pytest.raises(ValueError, match=r"has dtype|has shape|is on"):
        replaced(name, change)


@pytest.mark.parametrize("name", ["query_start_loc", "seq_lens", "rows"])
def test_metadata_refuses_lengths_that_disagree(name: str) -> None:
    with pytest.raises(ValueError, match="has shape"):
        replaced(name, lambda x: x[:-1])


def test_metadata_refuses_strided_buffers() -> None:
    with pytest.raises(ValueError, match="slot_mapping is not contiguous"):
        replaced("slot_mapping", lambda x: x.repeat_interleave(2)[::2])
    with pytest.raises(ValueError, match="block_tables has stride"):
        replaced("block_tables", lambda x: x.t().contiguous().t())
    with pytest.raises(ValueError, match="slot_mapping has dtype"):
        replaced("slot_mapping", lambda x: x.int())


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ((2, 4, 3, 33), "max_seq_len=33 exceeds the 32 keys"),
        ((3, 4, 3, 20), "exceed"),
        ((2, 5, 3, 20), "exceed"),
    ],
)
def test_bounds_beyond_the_tensors_are_refused(bounds: tuple, message: str) -> None:
    """One key more than the table's columns hold would be read out of bounds (B7)."""
    with pytest.raises(ValueError, match=message):
        META.with_bounds(pk.AttentionBounds(*bounds))
    assert META.with_bounds(pk.AttentionBounds(2, 4, 4, 32)).bounds.max_seq_len == 32


@pytest.mark.parametrize("values", [(-1, 4, 1, 5), (2, 4, 5, 5), (2, 4, 1.5, 5)])
def test_bounds_refuse_nonsense(values: tuple) -> None:
    with pytest.raises(ValueError, match=r"must be an integer|exceeds num_tokens"):
        pk.AttentionBounds(*values)


@pytest.mark.parametrize("heads", [(33, 2), (3, 2), (2, 4), (0, 1), (4, 0)])
def test_shape_refuses_bad_head_counts(heads: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"num_heads|num_kv_heads"):
        pk.AttentionShape(*heads, 64, 16, torch.float32, "float32")


def test_a_work_list_does_not_outlive_its_bounds() -> None:
    prepared = META.with_work_list(object())
    assert prepared.work_list is not None
    assert prepared.with_bounds(META.bounds).work_list is None


@pytest.mark.parametrize("name", ["q", "k_cache"])
def test_out_needs_memory_of_its_own(name: str) -> None:
    """Zeros go out before all queries have been read."""
    arguments = attention_arguments()
    memory = arguments[name]
    arguments["out"] = memory.flatten()[: 4 * 6 * 64].view(4, 6, 64)
    with pytest.raises(ValueError, match=f"out is the memory of {name}"):
        pk.paged_attention(**arguments)
