"""Prompts through the paged scheduler against transformers' greedy decoding, for every KV dtype.

GPT-2 small at full size with seeded random weights, whose logits lie close together, and SmolLM2
with its real ones. Equal means: except where the reference's two best logits are closer than twice
the measured error. Such positions are counted and must be few.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from engine_harness import Harness, demo_causal_lm

from pagetide_kernels import AttentionMetadata
from pagetide_kvcache import KVCache
from pagetide_models import CausalLM, load_model
from pagetide_runtime import SamplingParams

NEW_TOKENS = 16
GREEDY = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
PROMPTS = [
    [(7919 * (i + 1) * (j + 3)) % 50_000 for j in range(length)]
    for i, length in enumerate((1, 5, 16, 33))
]
Greedy = list[tuple[list[int], list[int], torch.Tensor]]  # prompt, tokens, teacher-forced logits


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Greedy]:
    """A folder with a full-size GPT-2, and transformers' greedy answers from it."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    reference = transformers.GPT2LMHeadModel(transformers.GPT2Config()).eval()
    folder = tmp_path_factory.mktemp("gpt2")
    reference.save_pretrained(folder)
    answers = []
    with torch.inference_mode():
        for prompt in PROMPTS:
            out = reference.generate(
                torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                do_sample=False, max_new_tokens=NEW_TOKENS, min_new_tokens=NEW_TOKENS,
                pad_token_id=0,
            )  # fmt: skip
            tokens = out[0, len(prompt) :].tolist()
            answers.append((prompt, tokens, reference(out).logits[0]))
    return folder, answers


def forced_logits(model: CausalLM, tokens: list[int]) -> torch.Tensor:
    """float32 [T, vocab_size]: token by token through the cache, as decoding does."""
    block_size = model.kv_cache_spec.block_size
    num_blocks = -(-len(tokens) // block_size)
    kv_cache = KVCache(model.kv_cache_spec, num_blocks)
    rows = []
    for position, token in enumerate(tokens):
        metadata = AttentionMetadata.from_host(
            [1], [position + 1], [list(range(num_blocks))],
            block_size=block_size, num_blocks=num_blocks,
        )  # fmt: skip
        hidden = model(torch.tensor([token]), torch.tensor([position]), kv_cache, metadata)
        rows.append(model.compute_logits(hidden))
    return torch.cat(rows)


def compare(model: CausalLM, greedy: Greedy, most_close_calls: float) -> None:
    """Engine tokens and teacher-forced argmax against transformers'."""
    outputs = Harness(model, num_blocks=60).run([prompt for prompt, _, _ in greedy], GREEDY)
    parted = close = total = agreeing = 0
    for output, (prompt, tokens, reference) in zip(outputs, greedy, strict=True):
        logits = forced_logits(model, prompt + tokens)
        error = (logits - reference).abs().max().item()
        two = reference.topk(2).values
        margins = two[:, 0] - two[:, 1]
        differs = logits.argmax(-1) != reference.argmax(-1)
        assert bool((margins[differs] < 2 * error).all())
        close += int(differs.sum())
        total += len(differs)
        agreeing += sum(a == b for a, b in zip(output.token_ids, tokens, strict=True))
        for index, (mine, theirs) in enumerate(zip(output.token_ids, tokens, strict=True)):
            if mine != theirs:  # from here on the two continue different texts
                assert margins[len(prompt) + index - 1] < 2 * error
                parted += 1
                break
    print(
        f"{model.kv_cache_spec.kv_dtype}: argmax differs at {close} of {total} positions; running "
        f"freely {parted} of {len(greedy)} answers part, {agreeing} of {len(greedy) * NEW_TOKENS} "
        "tokens are equal"
    )
    assert close <= most_close_calls * total


@pytest.mark.parametrize(
    ("kv_dtype", "most"), [("float32", 0.01), ("float16", 0.01), ("int8", 0.10)]
)
def test_gpt2_at_full_size(gpt2: tuple[Path, Greedy], kv_dtype: str, most: float) -> None:
    folder, greedy = gpt2
    model = load_model(folder, device="cpu", dtype="float32", kv_dtype=kv_dtype)
    compare(model, greedy, most)


@pytest.mark.model
@pytest.mark.parametrize(
    ("kv_dtype", "most"), [("float32", 0.01), ("float16", 0.01), ("int8", 0.10)]
)
def test_smollm2_with_its_real_weights(
    demo_model: Path, answers: list[dict[str, Any]], kv_dtype: str, most: float
) -> None:
    exact = demo_causal_lm(demo_model, 16)
    # Held to transformers elsewhere in this folder; here it stands for it at every position.
    greedy = [
        (a["prompt"], a["tokens"][:NEW_TOKENS],
         forced_logits(exact, a["prompt"] + a["tokens"][:NEW_TOKENS]))
        for a in answers[:5]
    ]  # fmt: skip
    compare(demo_causal_lm(demo_model, 16, kv_dtype), greedy, most)
