"""Tiny random Llama models, saved by transformers and loaded by us: the same numbers in fp32.

Whole prompt, token by token and chunked must all be the answer of transformers, since K and V are
read from the cache and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
transformers = pytest.importorskip("transformers", reason="the oracle")

from pagetide_kernels import AttentionMetadata  # noqa: E402
from pagetide_kvcache import KVCache  # noqa: E402
from pagetide_models import CausalLM, load_model  # noqa: E402

TINY: dict[str, Any] = {
    "vocab_size": 101,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "ratio 7": {
        "hidden_size": 56,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "head_dim": 16,
    },
    "ratio 3, head_dim 40": {
        "hidden_size": 45,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 40,
    },
    "one kv head, head_dim 96": {"num_key_value_heads": 1, "head_dim": 96},
    "attention bias": {"attention_bias": True},
    "mlp bias": {"mlp_bias": True},
    "norm_eps": {"rms_norm_eps": 0.1},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "factor": 3.0}},
    "dynamic": {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
    "llama3": {"rope_parameters": {**LLAMA3, "rope_theta": 10000.0}},
    "yarn": {"rope_parameters": {**YARN, "rope_theta": 10000.0}},
    "yarn, its own factor": {
        "rope_parameters": {**YARN, "attention_factor": 0.7, "beta_fast": 16, "truncate": False}
    },
    "vocabulary of 64": {"vocab_size": 64},
}


@pytest.fixture(scope="module")
def save(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., tuple[Path, Any]]:
    """Save a random model of a configuration; returns the folder and transformers' model."""

    def write(**changes: Any) -> tuple[Path, Any]:
        config = transformers.LlamaConfig(**{**TINY, **changes})
        torch.manual_seed(1)
        model = transformers.LlamaForCausalLM(config).eval()
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones and biases as zeros: tell them apart
                torch.nn.init.normal_(parameter, mean=0.5, std=0.3)
        folder = tmp_path_factory.mktemp("llama")
        model.save_pretrained(folder)
        return folder, model

    return write


def run(
    model: CausalLM, token_ids: Sequence[int], chunks: Sequence[int], *, block_size: int = 4
) -> Any:
    """Hidden states of all positions, computed in chunks through a cache with shuffled blocks."""
    num_blocks = 64
    cache = KVCache(model.kv_cache_spec, num_blocks)
    table = [(7 * index + 3) % num_blocks for index in range(-(-len(token_ids) // block_size))]
    parts, start = [], 0
    for size in chunks:
        metadata = AttentionMetadata.from_host(
            [size], [start + size], [table], block_size=block_size, num_blocks=num_blocks
        )
        ids = torch.tensor(token_ids[start : start + size])
        parts.append(model(ids, torch.arange(start, start + size), cache, metadata))
        start += size
    assert start == len(token_ids)
    return torch.cat(parts)


@pytest.mark.parametrize("name", CASES)
def test_logits_are_those_of_transformers(save: Callable[..., tuple[Path, Any]], name: str) -> None:
    folder, reference = save(**CASES[name])
    model = load_model(folder, block_size=4)
    vocab_size = model.config.vocab_size
    token_ids = torch.randint(0, vocab_size, (45,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = reference(token_ids[None]).logits[0]
    scale = float(expected.abs().max())
    for chunks in ([45], [1] * 45, [7, 1, 16, 20, 1], [44, 1]):
        logits = model.compute_logits(run(model, token_ids.tolist(), chunks))
        assert logits.shape == (45, vocab_size)
        assert logits.dtype == torch.float32
        assert float((logits - expected).abs().max()) < 2e-5 * max(scale, 1.0)


def test_a_batch_of_different_lengths_is_each_alone(
    save: Callable[..., tuple[Path, Any]],
) -> None:
    folder, _ = save()
    model = load_model(folder, block_size=4)
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(0, 101, (n,), generator=generator).tolist() for n in (1, 4, 5, 17)]
    cache = KVCache(model.kv_cache_spec, 32)
    tables = [[0], [5], [9, 2], [4, 8, 1, 30, 31]]
    lengths = [len(prompt) for prompt in prompts]
    metadata = AttentionMetadata.from_host(lengths, lengths, tables, block_size=4, num_blocks=32)
    hidden = model(
        torch.tensor([id_ for prompt in prompts for id_ in prompt], dtype=torch.int32),
        torch.cat([torch.arange(n) for n in lengths]).int(),
        cache,
        metadata,
    )
    for prompt, part in zip(prompts, hidden.split(lengths), strict=True):
        alone = run(model, prompt, [len(prompt)])
        torch.testing.assert_close(part, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("kv_dtype", ["float32", "float16", "bfloat16", "int8"])
def test_kv_dtypes(save: Callable[..., tuple[Path, Any]], backend: str, kv_dtype: str) -> None:
    folder, reference = save()
    model = load_model(folder, block_size=4, kv_dtype=kv_dtype, attention_backend=backend)
    assert model.kv_cache_spec.kv_dtype == kv_dtype
    token_ids = list(range(3, 33))
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0].log_softmax(-1)
    actual = model.compute_logits(run(model, token_ids, [9, 21])).log_softmax(-1)
    bound = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-2, "int8": 2e-1}[kv_dtype]
    assert float((actual - expected).abs().max()) < bound


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_on_the_cpu(save: Callable[..., tuple[Path, Any]], dtype: str) -> None:
    folder, reference = save()
    model = load_model(folder, dtype=dtype, block_size=4)
    assert model.dtype == getattr(torch, dtype)
    assert model.kv_cache_spec.kv_dtype == dtype
    token_ids = list(range(3, 33))
    with torch.no_grad():
        expected = reference(torch.tensor([token_ids])).logits[0].log_softmax(-1)
        half = (
            reference.to(model.dtype)(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)
        )
    actual = model.compute_logits(run(model, token_ids, [9, 21])).log_softmax(-1)
    # Judged by what transformers itself loses in this dtype.
    lost = float((half - expected).abs().mean())
    assert float((actual - expected).abs().mean()) < 1.5 * lost + 1e-4


def test_a_cache_of_another_layout_is_refused(save: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = save()
    model = load_model(folder, block_size=4)
    other = load_model(folder, block_size=8)
    metadata = AttentionMetadata.from_host([1], [1], [[0]], block_size=8, num_blocks=4)
    with pytest.raises(ValueError, match=r"model\.kv_cache_spec"):
        model(torch.tensor([1]), torch.tensor([0]), KVCache(other.kv_cache_spec, 4), metadata)


def test_nothing_to_sample(save: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = save()
    model = load_model(folder)
    assert model.compute_logits(torch.empty(0, 48)).shape == (0, 101)


def test_no_parameter_asks_for_gradients(save: Callable[..., tuple[Path, Any]]) -> None:
    folder, _ = save()
    model = load_model(folder, block_size=4)
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert not run(model, [1, 2], [2]).requires_grad


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"dtype": "int4"}, "int4"),
        ({"dtype": torch.float64}, "float64"),
        ({"kv_dtype": "fp8"}, "fp8"),
        ({"block_size": 0}, "block_size"),
        ({"attention_backend": "magic"}, "magic"),
        ({"dtype": "float16", "kv_dtype": "float32"}, "float32"),
    ],
)
def test_wrong_arguments_are_named(
    save: Callable[..., tuple[Path, Any]], arguments: dict[str, Any], named: str
) -> None:
    folder, _ = save()
    with pytest.raises(ValueError, match=named):
        load_model(folder, **arguments)
