"""The engine on a GPU: transformers' tokens in fp32, in fp16 wherever rounding cannot decide."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import Harness

from pagetide_kernels import AttentionMetadata, available_backends
from pagetide_kvcache import KVCache
from pagetide_models import CausalLM, load_model
from pagetide_runtime import SamplingParams

pytestmark = [
    pytest.mark.model,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]

Answers = list[dict[str, Any]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def gpu_backends() -> list[str]:
    if not torch.cuda.is_available():
        return ["reference"]
    return [name for name, status in available_backends("cuda").items() if status.is_available]


@cache
def gpu_model(path: Path, backend: str, dtype: str, kv_dtype: str = "auto") -> CausalLM:
    return load_model(
        path, device="cuda", dtype=dtype, attention_backend=backend, kv_dtype=kv_dtype
    )


def forced_logits(model: CausalLM, tokens: list[int]) -> torch.Tensor:
    """float32 [T, vocab_size]: logits after every token of one sequence, in one prefill."""
    block_size = model.kv_cache_spec.block_size
    num_blocks = -(-len(tokens) // block_size)
    kv_cache = KVCache(model.kv_cache_spec, num_blocks, device="cuda")
    metadata = AttentionMetadata.from_host(
        [len(tokens)], [len(tokens)], [list(range(num_blocks))],
        block_size=block_size, num_blocks=num_blocks, device="cuda",
    )  # fmt: skip
    ids = torch.tensor(tokens, device="cuda")
    hidden = model(ids, torch.arange(len(tokens), device="cuda"), kv_cache, metadata)
    return model.compute_logits(hidden).float()


@pytest.mark.parametrize("backend", gpu_backends())
def test_fp32_gives_transformers_tokens(demo_model: Path, answers: Answers, backend: str) -> None:
    harness = Harness(gpu_model(demo_model, backend, "float32"), num_blocks=400)
    outputs = harness.run([answer["prompt"] for answer in answers], GREEDY)
    assert [output.token_ids for output in outputs] == [tuple(a["tokens"]) for a in answers]


@pytest.mark.parametrize("backend", [name for name in gpu_backends() if name != "reference"])
@pytest.mark.parametrize("overlap", [0, 1])
@pytest.mark.parametrize("budget", [24, 2048])
def test_company_planning_ahead_and_preemption_change_no_token(
    demo_model: Path, answers: Answers, backend: str, overlap: int, budget: int
) -> None:
    order = list(range(20))
    random.Random(f"{overlap} {budget}").shuffle(order)
    harness = Harness(
        gpu_model(demo_model, backend, "float32"),
        num_blocks=24,
        num_host_blocks=16 if budget > 24 else 0,
        max_num_batched_tokens=budget,
        max_plans_in_flight=overlap,
    )
    outputs = harness.run([answers[i]["prompt"] for i in order], GREEDY)
    assert [o.token_ids for o in outputs] == [tuple(answers[i]["tokens"]) for i in order]
    assert sum(output.num_preemptions for output in outputs) > 0


@pytest.mark.parametrize("backend", gpu_backends())
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_half_precision_differs_only_where_rounding_may_decide(
    demo_model: Path, answers: Answers, backend: str, dtype: str
) -> None:
    half = gpu_model(demo_model, backend, dtype)
    exact = gpu_model(demo_model, "reference", "float32")
    outputs = Harness(half, num_blocks=400).run([a["prompt"] for a in answers], GREEDY)
    close_calls = []
    for output, answer in zip(outputs, answers, strict=True):
        expected = answer["tokens"]
        sequence = answer["prompt"] + expected
        reference = forced_logits(exact, sequence)
        error = (forced_logits(half, sequence) - reference).abs().max().item()
        differing = [i for i, (a, b) in enumerate(zip(output.token_ids, expected, strict=True))
                     if a != b]  # fmt: skip
        if differing:
            two = reference[len(answer["prompt"]) + differing[0] - 1].topk(2).values
            margin = (two[0] - two[1]).item()
            close_calls.append((answer["text"][:30], differing[0], margin, error))
            assert margin < 2 * error
    print(f"{backend} {dtype}: {len(close_calls)} of 20 part where the margin is small")
    for text, token, margin, error in close_calls:
        print(f"  {text!r} at token {token}: margin {margin:.4f}, largest logit error {error:.4f}")


@pytest.mark.parametrize("backend", [name for name in gpu_backends() if name != "reference"])
@pytest.mark.parametrize("kv_dtype", ["int8", "int8-block"])
def test_int8_kv_agrees_with_half_precision_mostly(
    demo_model: Path, answers: Answers, backend: str, kv_dtype: str
) -> None:
    half = gpu_model(demo_model, backend, "float16")
    int8 = gpu_model(demo_model, backend, "float16", kv_dtype)
    equal = total = 0
    for answer in answers:
        sequence = answer["prompt"] + answer["tokens"]
        best = forced_logits(half, sequence).argmax(-1)
        equal += int((forced_logits(int8, sequence).argmax(-1) == best).sum())
        total += len(sequence)
    print(f"{backend} {kv_dtype}: argmax equal at {equal} of {total} positions")
    assert equal >= (0.97 if kv_dtype == "int8" else 0.9) * total
