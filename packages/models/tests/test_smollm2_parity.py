"""SmolLM2's real weights against transformers, from the GGUF file and re-saved as safetensors.

transformers takes 20 s to open the file, so this is the one test that lets it; test_smollm2 has its
stored answers.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle")

from pagetide_models import load_model, open_model  # noqa: E402

pytestmark = pytest.mark.model
TEXT = (
    "The tide is the rise and fall of the sea, caused by the pull of the Moon and of the Sun, and "
    "by the turning of the Earth. Twice a day the water comes up the beach, covers the rocks and "
    "the mussels, and goes back again; sailors and fishermen have kept tables of it for two "
    "thousand years. Spring tides come at new and full moon, neap tides at the quarters.\n\n"
    "1. Print the table.\n2. Add 7.4 days.\n\ndef tide(hour):\n"
    "    return 2.5 * math.cos(hour / 12.42 * 2 * math.pi)\n"
)


@pytest.fixture(scope="module")
def theirs(demo_gguf: Path) -> Any:
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(
        demo_gguf.parent, gguf_file=demo_gguf.name, dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def folder(theirs: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = tmp_path_factory.mktemp("smollm2")
    # A model read from GGUF counts as quantised and is not saved: the weights move to a plain one.
    config = transformers.LlamaConfig(**{
        key: value
        for key, value in theirs.config.to_dict().items()
        if key != "quantization_config"
    })  # fmt: skip
    with torch.device("meta"):
        plain = transformers.LlamaForCausalLM(config)
    plain.load_state_dict(theirs.state_dict(), assign=True)
    plain.tie_weights()
    plain.save_pretrained(path, max_shard_size="200MB")
    assert len(list(path.glob("*.safetensors"))) > 1
    yield path
    shutil.rmtree(path)


@pytest.fixture(scope="module")
def pair(demo_gguf: Path, theirs: Any, checks: Any, token_ids: list[int]) -> Any:
    return checks.Pair(load_model(demo_gguf, block_size=checks.BLOCK_SIZE), theirs, token_ids)


@pytest.fixture(scope="module")
def token_ids(demo_gguf: Path) -> list[int]:
    return open_model(demo_gguf).load_tokenizer().encode(TEXT)


def test_real_text_of_both_files(
    pair: Any, folder: Path, token_ids: list[int], run_paged: Any, checks: Any
) -> None:
    expected = pair.reference(token_ids)
    again = load_model(folder, block_size=checks.BLOCK_SIZE)
    for model in (pair.ours, again):
        length = len(token_ids)
        for chunks in ([length], [17, length - 20, 1, 1, 1]):
            logits = model.compute_logits(run_paged(model, token_ids, chunks))
            difference = checks.compare_logits(logits, expected)
            assert difference.largest <= checks.LOGIT_BOUND
            assert difference.first_different is None


def test_logits_of_all_positions_at_lengths_1_to_64(pair: Any) -> None:
    pair.check_lengths(range(1, 65))


def test_hidden_states_layer_by_layer(pair: Any) -> None:
    pair.check_layers(48)


def test_any_cut_is_one_prefill(pair: Any, run_paged: Any) -> None:
    pair.check_cuts(run_paged, length=49, num_random=5)


def test_an_fp16_kv_pool(pair: Any, demo_gguf: Path) -> None:
    pair.check_half_cache_of_real_weights(demo_gguf, range(1, 22))
