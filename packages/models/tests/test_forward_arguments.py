"""Arguments of different steps or layouts are refused before any layer runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from pagetide_kernels import AttentionMetadata  # noqa: E402
from pagetide_kvcache import KVCache, KVCacheSpec  # noqa: E402
from pagetide_models import CausalLM, load_model  # noqa: E402


@pytest.fixture
def model(tiny_folder: Callable[..., Path]) -> CausalLM:
    return load_model(tiny_folder(), block_size=4)


def _arguments(model: CausalLM, block_size: int = 4) -> dict[str, Any]:
    return {
        "input_ids": torch.tensor([1, 2, 3]),
        "positions": torch.arange(3),
        "kv_cache": KVCache(model.kv_cache_spec, 8),
        "metadata": AttentionMetadata.from_host(
            [3], [3], [[5, 2]], block_size=block_size, num_blocks=8
        ),
    }


@pytest.mark.parametrize("name", ["input_ids", "positions"])
def test_tokens_must_be_those_of_the_step(model: CausalLM, name: str) -> None:
    for wrong in (torch.arange(2), torch.arange(4), torch.arange(3).unsqueeze(0)):
        arguments = _arguments(model) | {name: wrong}
        with pytest.raises(ValueError, match=f"{name} has shape .* of a step of 3 tokens"):
            model(**arguments)
        assert not arguments["kv_cache"].data.any()


def test_blocks_must_be_those_of_the_cache(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="blocks of 8 tokens, but the cache's have 4"):
        model(**_arguments(model, block_size=8))
    spec = model.kv_cache_spec
    other = KVCacheSpec(spec.num_layers, spec.num_kv_heads, spec.head_dim, 8, spec.kv_dtype)
    with pytest.raises(ValueError, match="make the cache from model"):
        model(**_arguments(model) | {"kv_cache": KVCache(other, 8)})


def test_everything_must_be_where_the_model_is(model: CausalLM) -> None:
    with pytest.raises(ValueError, match="kv_cache is on meta, but the model is on cpu"):
        model(**_arguments(model) | {"kv_cache": KVCache(model.kv_cache_spec, 8, device="meta")})


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_a_layer_names_what_does_not_fit(model: CausalLM, name: str) -> None:
    arguments = _arguments(model)
    shape = model.attention_shape
    heads = {"q": shape.num_heads, "k": shape.num_kv_heads, "v": shape.num_kv_heads}
    sound = {key: torch.zeros(3, count, shape.head_dim) for key, count in heads.items()}
    cached: Any = model.layers[0].attention.cached
    rest = (arguments["kv_cache"], arguments["metadata"])
    assert cached(**sound, kv_cache=rest[0], metadata=rest[1]).shape == sound["q"].shape
    for wrong in (sound[name][:, :, 1:], sound[name][:2], sound[name].half()):
        with pytest.raises(ValueError, match=f"^{name} is torch.float.*layer 0 attends with"):
            cached(*(sound | {name: wrong}).values(), *rest)
