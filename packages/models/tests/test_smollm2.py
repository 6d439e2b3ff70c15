"""The demo model against transformers' stored answers (tests/tools/make_smollm2_answers.py)."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from pagetide_kernels import AttentionMetadata  # noqa: E402
from pagetide_kvcache import KVCache  # noqa: E402
from pagetide_models import CausalLM, load_model, open_model  # noqa: E402

pytestmark = pytest.mark.model
RECORD = json.loads((Path(__file__).parent / "data" / "smollm2_answers.json").read_text())
ANSWERS: list[dict[str, Any]] = RECORD["answers"]


@pytest.fixture(scope="module")
def model(demo_gguf: Path) -> CausalLM:
    return load_model(demo_gguf)


def last_logits(model: CausalLM, prompts: list[list[int]]) -> Any:
    """Logits [S, vocab_size] after each prompt, all in one batch."""
    lengths = [len(prompt) for prompt in prompts]
    tables = [list(range(8 * index, 8 * index + 8)) for index in range(len(prompts))]
    num_blocks = 8 * len(prompts)
    metadata = AttentionMetadata.from_host(
        lengths, lengths, tables, block_size=16, num_blocks=num_blocks
    )
    hidden = model(
        torch.tensor([id_ for prompt in prompts for id_ in prompt]),
        torch.cat([torch.arange(length) for length in lengths]),
        KVCache(model.kv_cache_spec, num_blocks),
        metadata,
    )
    return model.compute_logits(hidden[metadata.query_start_loc[1:].long() - 1])


def test_the_configuration_is_the_files_own(model: CausalLM) -> None:
    config = model.config
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (30, 9, 3)
    assert (config.bos_token_id, config.eos_token_ids, config.pad_token_id) == (1, (2,), 2)
    assert config.rope_theta == 1e5
    assert config.tie_word_embeddings
    assert model.dtype == torch.float32
    assert model.kv_cache_spec.kv_dtype == "float32"


def test_last_position_logits_within_1e_3(model: CausalLM) -> None:
    logits = last_logits(model, [answer["prompt"] for answer in ANSWERS])
    for row, answer in zip(logits, ANSWERS, strict=True):
        largest = torch.tensor(answer["largest_logits"])
        spread = torch.tensor(answer["every_101st"])
        assert float((row[answer["largest_ids"]] - largest).abs().max()) < 1e-3
        assert float((row[::101] - spread).abs().max()) < 1e-3
        assert int(row.argmax()) == answer["tokens"][0]


def test_greedy_tokens_of_the_whole_batch(model: CausalLM) -> None:
    """64 tokens of five prompts in one batch, decoded step by step through the cache."""
    prompts = [answer["prompt"] for answer in ANSWERS]
    assert min(answer["smallest_margin"] for answer in ANSWERS) > 1e-3  # or it would be luck
    tables = [list(range(8 * index, 8 * index + 8)) for index in range(len(prompts))]
    num_blocks = 8 * len(prompts)
    cache = KVCache(model.kv_cache_spec, num_blocks)
    pending, starts = [list(prompt) for prompt in prompts], [0] * len(prompts)
    tokens: list[list[int]] = [[] for _ in prompts]
    for _ in range(64):
        lengths = [len(ids) for ids in pending]
        ends = [start + length for start, length in zip(starts, lengths, strict=True)]
        metadata = AttentionMetadata.from_host(
            lengths, ends, tables, block_size=16, num_blocks=num_blocks
        )
        positions = [torch.arange(a, b) for a, b in zip(starts, ends, strict=True)]
        hidden = model(
            torch.tensor([id_ for ids in pending for id_ in ids]),
            torch.cat(positions),
            cache,
            metadata,
        )
        last = metadata.query_start_loc[1:].long() - 1
        sampled = model.compute_logits(hidden[last]).argmax(-1).tolist()
        starts, pending = ends, [[token] for token in sampled]
        for sequence, token in zip(tokens, sampled, strict=True):
            sequence.append(token)
    assert tokens == [answer["tokens"] for answer in ANSWERS]


def test_loading_needs_little_more_memory_than_the_model(
    demo_gguf: Path, run_python: Callable[[str], str]
) -> None:
    printed = run_python(
        "import torch\n"
        "from pagetide_models import cpu_linear, load_model\n"
        "def status(key):\n"
        "    lines = open('/proc/self/status').read().splitlines()\n"
        "    return int(next(line.split()[1] for line in lines if line.startswith(key))) << 10\n"
        "torch.set_num_threads(1)\n"
        "cpu_linear.can_pack()\n"  # oneDNN's own start is not the model's
        f"model = load_model({str(demo_gguf)!r})\n"
        "table = model.embedding.weight\n"
        "print(status('VmHWM') - status('VmRSS'), table.numel() * table.element_size())"
    )
    above, largest = map(int, printed.split())
    assert above <= largest + 200 * 2**20


def test_the_capital_of_france(model: CausalLM, demo_gguf: Path) -> None:
    tokenizer = open_model(demo_gguf).load_tokenizer()
    prompt = tokenizer.encode("The capital of France is")
    token = int(last_logits(model, [prompt])[0].argmax())
    assert tokenizer.decode([token]) == " Paris"
