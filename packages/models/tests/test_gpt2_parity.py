"""GPT-2 small at full size: 124 million seeded weights, saved by transformers, loaded by us."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle")

from pagetide_models import load_model  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("gpt2")


@pytest.fixture(scope="module")
def pair(folder: Path, checks: Any) -> Iterator[Any]:
    theirs = checks.save_random(folder, transformers.GPT2Config())
    yield checks.Pair(load_model(folder, block_size=checks.BLOCK_SIZE), theirs)
    (folder / "model.safetensors").unlink()


def test_it_is_gpt2_small(pair: Any) -> None:
    config = pair.ours.config
    assert (config.num_layers, config.hidden_size, config.num_heads) == (12, 768, 12)
    assert (config.vocab_size, config.max_position_embeddings) == (50257, 1024)
    assert config.tie_word_embeddings
    assert pair.ours.compute_logits(torch.zeros(1, 768)).shape == (1, 50257)


def test_logits_of_all_positions_at_lengths_1_to_64(pair: Any) -> None:
    pair.check_lengths(range(1, 65))


def test_hidden_states_layer_by_layer(pair: Any) -> None:
    pair.check_layers(64)


def test_any_cut_is_one_prefill(pair: Any, run_paged: Any) -> None:
    pair.check_cuts(run_paged, length=49, num_random=6)


def test_an_fp16_kv_pool(pair: Any, folder: Path) -> None:
    pair.check_half_cache(folder, range(1, 22))


def test_the_last_position_of_the_context_and_not_one_more(pair: Any, run_paged: Any) -> None:
    prompt = pair.prompt(1024)
    hidden = run_paged(pair.ours, prompt, [1023, 1])
    last = pair.ours.compute_logits(hidden[-1:])[0]
    assert float((last - pair.reference(prompt)[-1]).abs().max()) <= 1e-3
    with pytest.raises(ValueError, match="1025 tokens is beyond the model's context of 1024"):
        run_paged(pair.ours, [*prompt, 0], [1025])
