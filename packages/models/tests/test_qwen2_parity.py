"""Qwen2-0.5B at full size: 494 million seeded weights, 14 query heads over 2 kv heads, biases."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle")

from pagetide_models import load_model  # noqa: E402

QWEN2_0_5B = {
    "vocab_size": 151936,
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32768,
    "max_window_layers": 24,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
    "tie_word_embeddings": True,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen2")


@pytest.fixture(scope="module")
def pair(folder: Path, checks: Any) -> Iterator[Any]:
    theirs = checks.save_random(folder, transformers.Qwen2Config(**QWEN2_0_5B))
    yield checks.Pair(load_model(folder, block_size=checks.BLOCK_SIZE), theirs)
    (folder / "model.safetensors").unlink()  # 2 GB


def test_it_is_qwen2(pair: Any) -> None:
    config = pair.ours.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (24, 14, 2)
    assert config.qkv_bias
    assert config.layer_windows == ()
    assert config.rope_theta == 1e6


def test_logits_of_all_positions_at_every_residue(pair: Any) -> None:
    pair.check_lengths([*range(1, 18), 31, 33, 64])


def test_hidden_states_layer_by_layer(pair: Any) -> None:
    pair.check_layers(48)


def test_any_cut_is_one_prefill(pair: Any, run_paged: Any) -> None:
    pair.check_cuts(run_paged, length=36, num_random=4)


def test_an_fp16_kv_pool(pair: Any, folder: Path) -> None:
    pair.check_half_cache(folder, range(1, 22))


@pytest.mark.long
def test_logits_of_all_positions_at_lengths_1_to_64(pair: Any) -> None:
    pair.check_lengths(range(1, 65))
