"""The prompt's log-probabilities: transformers', however the prompt was computed."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import FailingRunner, Harness, demo_causal_lm

from pagetide_models import load_model
from pagetide_runtime import LLM, SamplingParams, prompt_scorer
from pagetide_scheduler import FinishReason, Preemption

pytestmark = pytest.mark.model

SCORED = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, prompt_logprobs=True)
Answers = list[dict[str, Any]]
Logprobs = tuple[float | None, ...]


def close(given: Logprobs | None, expected: Logprobs | None, tolerance: float = 1e-3) -> bool:
    """Whether both are there, as long as each other, and nowhere further apart."""
    assert given is not None and expected is not None
    assert len(given) == len(expected) and given[0] is None and expected[0] is None
    return bool(np.abs(np.array(given[1:]) - np.array(expected[1:])).max(initial=0.0) < tolerance)


@pytest.fixture(scope="module")
def longest(answers: Answers) -> Answers:
    """The eight longest prompts, 11 to 50 tokens."""
    return sorted(answers, key=lambda answer: -len(answer["prompt"]))[:8]


def stored(answer: dict[str, Any]) -> Logprobs:
    return (None, *answer["prompt_logprobs"])


def test_they_are_those_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        vocab_size=307, hidden_size=48, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=3, num_key_value_heads=1, max_position_embeddings=256,
    )  # fmt: skip
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)
    model = load_model(tmp_path, device="cpu", block_size=16)
    draw = random.Random(1)
    prompts = [[draw.randrange(3, 307) for _ in range(length)] for length in (1, 2, 16, 33, 150)]
    harness = Harness(model, num_blocks=64, max_num_batched_tokens=40)
    for prompt, output in zip(prompts, harness.run(prompts, SCORED), strict=True):
        with torch.inference_mode():
            table = reference(torch.tensor([prompt])).logits[0].log_softmax(dim=-1)
        rows = range(len(prompt) - 1)
        expected = (None, *[float(table[i, prompt[i + 1]]) for i in rows])
        assert close(output.prompt_logprobs, expected)


@pytest.mark.parametrize("overlap", [0, 2])
@pytest.mark.parametrize("budget", [7, 512])
def test_the_same_in_chunks_in_company_and_planned_ahead(
    demo_model: Path,
    longest: Answers,
    monkeypatch: pytest.MonkeyPatch,
    budget: int,
    overlap: int,
) -> None:
    monkeypatch.setattr(prompt_scorer, "_ROWS_AT_ONCE", 5)
    harness = Harness(
        demo_causal_lm(demo_model, 4),
        num_blocks=400,
        max_num_batched_tokens=budget,
        max_plans_in_flight=overlap,
    )
    prompts = [answer["prompt"] for answer in longest]
    harness.run(prompts, replace(SCORED, prompt_logprobs=False))  # the cache knows them all
    outputs = harness.run(prompts, SCORED)
    assert [output.num_cached_tokens for output in outputs] == [0] * 8
    for output, answer in zip(outputs, longest, strict=True):
        assert output.token_ids == tuple(answer["tokens"][:6])
        assert close(output.prompt_logprobs, stored(answer))


@pytest.mark.parametrize("way", list(Preemption))
@pytest.mark.parametrize("overlap", [0, 2])
def test_the_same_after_preemptions(
    demo_model: Path, longest: Answers, way: Preemption, overlap: int
) -> None:
    harness = Harness(
        demo_causal_lm(demo_model, 4),
        num_blocks=300,
        num_host_blocks=200,
        max_num_batched_tokens=9,
        max_plans_in_flight=overlap,
    )
    scheduler = harness.engine.scheduler
    draw = random.Random(4)
    forced = 0

    def force(step: int) -> None:
        nonlocal forced
        if step % 3 == 2 and step < 60:
            younger = list(scheduler.unfinished_ids[1:])  # the oldest is spared
            draw.shuffle(younger)
            forced += any(scheduler.preempt(name, way) for name in younger)

    outputs = harness.run([answer["prompt"] for answer in longest], SCORED, force)
    assert forced >= 5
    for output, answer in zip(outputs, longest, strict=True):
        assert output.token_ids == tuple(answer["tokens"][:6])
        assert close(output.prompt_logprobs, stored(answer))


def test_the_same_after_a_failed_step(demo_model: Path, longest: Answers) -> None:
    harness = Harness(
        demo_causal_lm(demo_model, 16), num_blocks=200, max_num_batched_tokens=32,
        max_plans_in_flight=1,
    )  # fmt: skip
    # Only steps of several requests fail: one that fails alone would end.
    runner = FailingRunner(
        harness.engine.runner, lambda plan: plan.num_seqs > 1 and runner.num_failures < 2
    )
    harness.engine.runner = runner
    outputs = harness.run([answer["prompt"] for answer in longest[:4]], SCORED)
    assert runner.num_failures == 2
    for output, answer in zip(outputs, longest[:4], strict=True):
        assert close(output.prompt_logprobs, stored(answer))


def test_samples_share_them_and_who_did_not_ask_gets_none(
    demo_model: Path, longest: Answers
) -> None:
    llm = LLM(demo_model, num_blocks=128, progress=False, max_num_batched_tokens=16)
    prompts = [longest[0]["prompt"], longest[1]["prompt"]]
    drawn = SamplingParams(seed=1, max_tokens=3, ignore_eos=True)
    completions = llm.generate(prompts, [replace(drawn, prompt_logprobs=True), drawn], n=3)
    for completion in completions[:3]:
        assert close(completion.prompt_logprobs, stored(longest[0]))
    assert len({completion.token_ids for completion in completions[:3]}) > 1
    assert [completion.prompt_logprobs for completion in completions[3:]] == [None] * 3
    with pytest.raises(ValueError, match="agree on prompt_logprobs"):
        llm.engine.add_samples(
            ("a", "b"), prompts[0], (drawn, replace(drawn, prompt_logprobs=True))
        )


def test_one_that_ends_early_has_those_that_were_computed(
    demo_model: Path, longest: Answers
) -> None:
    harness = Harness(demo_causal_lm(demo_model, 16), num_blocks=64, max_num_batched_tokens=5)
    engine = harness.engine
    engine.add_request("r", longest[0]["prompt"], SCORED)
    engine.step()
    engine.step()
    output = engine.finish("r", FinishReason.ABORT)
    assert output is not None
    assert close(output.prompt_logprobs, stored(longest[0])[:10])
    harness.check_idle()
