"""The engine on a real model: transformers' tokens, whatever the company, whatever goes wrong."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from engine_harness import FailingRunner, Harness, LateFailure, demo_causal_lm

from pagetide_runtime import FinishReason, SamplingParams
from pagetide_scheduler import Preemption, StepPlan

pytestmark = pytest.mark.model

Answers = list[dict[str, Any]]
GREEDY = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)


def prompts_of(answers: Answers) -> list[list[int]]:
    return [answer["prompt"] for answer in answers]


def tokens_of(answers: Answers) -> list[tuple[int, ...]]:
    return [tuple(answer["tokens"]) for answer in answers]


def test_twenty_prompts_in_one_batch_give_what_transformers_gives(
    demo_model: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(answers) == 20
    # A fair comparison: nowhere are the reference's two best tokens a rounding error apart.
    assert min(answer["smallest_margin"] for answer in answers) >= 1e-3
    model = demo_causal_lm(demo_model, 16)
    harness = Harness(model, num_blocks=400)
    seen: list[torch.Tensor] = []
    compute = model.compute_logits
    monkeypatch.setattr(
        model, "compute_logits", lambda hidden: seen.append(compute(hidden)) or seen[-1]
    )
    outputs = harness.run(prompts_of(answers), GREEDY)
    assert [output.token_ids for output in outputs] == tokens_of(answers)
    first = seen[0]  # all prompts were computed in the first step: a row a request, in order
    assert first.shape[0] == 20
    for row, answer in zip(first, answers, strict=True):
        stored = torch.tensor(answer["every_29th"])
        assert (row[::29] - stored).abs().max() < 1e-3
        best = row[answer["largest_ids"]]
        assert (best - torch.tensor(answer["largest_logits"])).abs().max() < 1e-3


@pytest.mark.parametrize("block_size", [4, 16])
@pytest.mark.parametrize("budget", [8, 512])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_the_same_tokens_whatever_the_company(
    demo_model: Path, answers: Answers, block_size: int, budget: int, prefix_cache: bool
) -> None:
    order = list(range(20))
    random.Random(f"{block_size} {budget} {prefix_cache}").shuffle(order)
    harness = Harness(
        demo_causal_lm(demo_model, block_size),
        num_blocks=1600 // block_size * 2,
        max_num_batched_tokens=budget,
        enable_prefix_cache=prefix_cache,
    )
    # Twice, so that with the cache on the second round reads what the first has left.
    for round_ in range(2 if prefix_cache and budget > 8 else 1):
        outputs = harness.run([answers[i]["prompt"] for i in order], GREEDY)
        assert [output.token_ids for output in outputs] == [tokens_of(answers)[i] for i in order]
        if round_:
            full_blocks = sum((len(answer["prompt"]) - 1) // block_size for answer in answers)
            assert sum(output.num_cached_tokens for output in outputs) >= full_blocks * block_size


def test_alone_and_together_are_the_same(demo_model: Path, answers: Answers) -> None:
    harness = Harness(demo_causal_lm(demo_model, 16), num_blocks=64)
    for answer in answers[::4]:
        (output,) = harness.run([answer["prompt"]], GREEDY)
        assert output.token_ids == tuple(answer["tokens"])


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_pool_so_small_that_requests_are_preempted_several_times(
    demo_model: Path, answers: Answers, prefix_cache: bool
) -> None:
    longest = max(len(answer["prompt"]) for answer in answers) + 32
    harness = Harness(
        demo_causal_lm(demo_model, 4),
        num_blocks=-(-longest // 4) + 22,
        max_num_batched_tokens=64,
        enable_prefix_cache=prefix_cache,
    )
    outputs = harness.run(prompts_of(answers), GREEDY)
    assert [output.token_ids for output in outputs] == tokens_of(answers)
    preemptions = [output.num_preemptions for output in outputs]
    assert sum(preemptions) >= 5 and max(preemptions) >= 2


@pytest.mark.parametrize("overlap", [1, 2])
def test_planning_ahead_changes_no_token(demo_model: Path, answers: Answers, overlap: int) -> None:
    harness = Harness(
        demo_causal_lm(demo_model, 4),
        num_blocks=120,
        max_num_batched_tokens=40,
        max_plans_in_flight=overlap,
    )
    outputs = harness.run(prompts_of(answers), GREEDY)
    assert [output.token_ids for output in outputs] == tokens_of(answers)


def test_aborted_in_every_state_and_the_engine_goes_on(demo_model: Path, answers: Answers) -> None:
    harness = Harness(
        demo_causal_lm(demo_model, 4), num_blocks=60, max_num_batched_tokens=16, max_num_seqs=6
    )
    rng = random.Random(5)
    aborted: set[str] = set()

    def abort(step: int) -> None:
        if step % 3 == 1 and len(aborted) < 10:
            candidates = sorted(set(map(str, range(20))) - aborted)
            request_id = rng.choice(candidates)
            output = harness.engine.finish(request_id, FinishReason.ABORT)
            if output is not None:  # waiting, in the middle of its prompt, or decoding
                assert output.finish_reason is FinishReason.ABORT
                aborted.add(request_id)
                assert harness.engine.finish(request_id, FinishReason.ABORT) is None

    outputs = harness.run(prompts_of(answers), GREEDY, abort)
    assert len(aborted) == 10 and len(outputs) == 10
    by_id = dict(zip(map(str, range(20)), tokens_of(answers), strict=True))
    assert all(output.token_ids == by_id[output.request_id] for output in outputs)
    assert harness.engine.finish("never heard of", FinishReason.ABORT) is None


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_step_that_fails_now_and_then_fails_nobody(
    demo_model: Path, answers: Answers, overlap: int
) -> None:
    harness = Harness(demo_causal_lm(demo_model, 16), num_blocks=200, max_plans_in_flight=overlap)
    # Steps of several requests fail; a request that has to prove itself alone is left in peace.
    runner = FailingRunner(
        harness.engine.runner, lambda plan: plan.num_seqs > 1 and plan.step_id in (1, 14, 15, 30)
    )
    harness.engine.runner = runner
    outputs = harness.run(prompts_of(answers)[:8], GREEDY)
    assert runner.num_failures >= 2
    assert [output.token_ids for output in outputs] == tokens_of(answers)[:8]


def test_only_the_request_that_fails_alone_fails(demo_model: Path, answers: Answers) -> None:
    harness = Harness(demo_causal_lm(demo_model, 16), num_blocks=200)
    poison = 11_111
    harness.engine.runner = FailingRunner(
        harness.engine.runner, lambda plan: poison in plan.token_ids.tolist()
    )
    prompts = prompts_of(answers)[:6]
    prompts.insert(2, [504, poison, 282])
    outputs = harness.run(prompts, GREEDY)
    assert outputs[2].finish_reason is FinishReason.ERROR
    assert "injected" in (outputs[2].error or "")
    others = outputs[:2] + outputs[3:]
    assert [output.token_ids for output in others] == tokens_of(answers)[:6]


def test_a_failure_found_only_when_the_result_is_read(demo_model: Path, answers: Answers) -> None:
    harness = Harness(demo_causal_lm(demo_model, 16), num_blocks=200, max_plans_in_flight=2)
    inner = harness.engine.runner
    submit = inner.submit

    class Late:
        def submit(self, plan: StepPlan) -> Any:
            handle = submit(plan)
            return LateFailure() if plan.step_id in (4, 5, 11) else handle

        def is_usable(self) -> bool:
            return True

    harness.engine.runner = Late()
    outputs = harness.run(prompts_of(answers)[:5], GREEDY)
    assert [output.token_ids for output in outputs] == tokens_of(answers)[:5]


def test_logits_that_are_not_finite_end_their_request_alone(
    demo_model: Path, answers: Answers, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = demo_causal_lm(demo_model, 16)
    harness = Harness(model, num_blocks=200)
    compute = model.compute_logits

    def spoil(hidden: torch.Tensor) -> torch.Tensor:
        logits = compute(hidden)
        if logits.shape[0] == 3:
            logits[1, 7] = float("nan")
        return logits

    monkeypatch.setattr(model, "compute_logits", spoil)
    outputs = harness.run(prompts_of(answers)[:3], GREEDY)
    assert [output.finish_reason for output in outputs] == [
        FinishReason.LENGTH, FinishReason.ERROR, FinishReason.LENGTH
    ]  # fmt: skip
    assert "not finite" in (outputs[1].error or "")
    assert outputs[0].token_ids == tokens_of(answers)[0]
    assert outputs[2].token_ids == tokens_of(answers)[2]


def test_a_seed_gives_the_same_tokens_in_any_company(demo_model: Path, answers: Answers) -> None:
    harness = Harness(demo_causal_lm(demo_model, 16), num_blocks=300)
    seeded = SamplingParams(temperature=0.9, top_p=0.95, seed=1234, max_tokens=24, ignore_eos=True)
    prompt = answers[0]["prompt"]
    (alone,) = harness.run([prompt], seeded)
    for companion in (
        SamplingParams(temperature=1.3, max_tokens=24, ignore_eos=True),  # unseeded
        SamplingParams(temperature=1.3, seed=1234, max_tokens=24, ignore_eos=True),
        GREEDY,
    ):
        engine = harness.engine
        engine.add_request("companion", answers[3]["prompt"], companion)
        engine.add_request("mine", prompt, seeded)
        ended = {}
        while engine.has_unfinished:
            ended.update({output.request_id: output for output in engine.step().finished})
        assert ended["mine"].token_ids == alone.token_ids
    (other,) = harness.run([prompt], SamplingParams(
        temperature=0.9, top_p=0.95, seed=1235, max_tokens=24, ignore_eos=True))  # fmt: skip
    assert other.token_ids != alone.token_ids
    harness.check_idle()


def test_min_tokens_keeps_the_end_away(demo_model: Path) -> None:
    model = demo_causal_lm(demo_model, 16)
    harness = Harness(model, num_blocks=64)
    # "What is 2+2? Answer with the number only." in the chat template: answered in few tokens.
    prompt = [1, 4093, 198, 1780, 314, 216, 34, 27, 34, 47, 19842, 351, 260, 1230, 805, 30, 2, 198]
    prompt += [1, 520, 9531, 198]
    (short,) = harness.run([prompt], SamplingParams(temperature=0, max_tokens=60))
    assert short.finish_reason is FinishReason.STOP
    assert short.token_ids[-1] in model.config.eos_token_ids
    least = short.num_generated_tokens + 5
    (long,) = harness.run([prompt], SamplingParams(temperature=0, max_tokens=60, min_tokens=least))
    assert long.num_generated_tokens >= least
    assert not set(long.token_ids[: least - 1]) & set(model.config.eos_token_ids)
    assert long.token_ids[: len(short.token_ids) - 1] == short.token_ids[:-1]


@pytest.mark.parametrize("kv_dtype", ["float16", "bfloat16", "int8", "int8-block"])
def test_every_kv_dtype_answers(demo_model: Path, answers: Answers, kv_dtype: str) -> None:
    harness = Harness(demo_causal_lm(demo_model, 16, kv_dtype), num_blocks=200)
    outputs = harness.run(prompts_of(answers)[:4], GREEDY)
    stored = tokens_of(answers)
    agreeing = [
        np.mean(np.array(output.token_ids[:8]) == np.array(stored[i][:8]))
        for i, output in enumerate(outputs)
    ]
    assert np.mean(agreeing) > 0.7


@pytest.mark.parametrize("way", ["swap", "recompute"])
@pytest.mark.parametrize("overlap", [0, 2])
def test_forced_preemption_every_few_steps_changes_no_token(
    demo_model: Path, answers: Answers, way: str, overlap: int
) -> None:
    harness = Harness(
        demo_causal_lm(demo_model, 4),
        num_blocks=300,
        num_host_blocks=200,
        max_num_batched_tokens=48,
        max_plans_in_flight=overlap,
    )
    scheduler = harness.engine.scheduler
    rng = random.Random(way)
    forced = 0

    def force(step: int) -> None:
        nonlocal forced
        if step % 4 == 3 and scheduler.unfinished_ids[1:]:
            victim = rng.choice(scheduler.unfinished_ids[1:])  # the oldest is spared
            forced += scheduler.preempt(victim, Preemption(way))

    outputs = harness.run(prompts_of(answers)[:12], GREEDY, force)
    assert forced >= 8
    assert [output.token_ids for output in outputs] == tokens_of(answers)[:12]


def test_swapping_when_blocks_run_out_changes_no_token(demo_model: Path, answers: Answers) -> None:
    longest = max(len(answer["prompt"]) for answer in answers) + 32
    harness = Harness(
        demo_causal_lm(demo_model, 4),
        num_blocks=-(-longest // 4) + 30,
        num_host_blocks=120,
        preemption="swap",
        max_num_batched_tokens=64,
    )
    outputs = harness.run(prompts_of(answers), GREEDY)
    assert [output.token_ids for output in outputs] == tokens_of(answers)
    assert sum(output.num_preemptions for output in outputs) >= 3


@pytest.mark.parametrize("admission", ["fcfs", "lookahead", "reserve"])
def test_every_admission_policy_gives_the_same_tokens(
    demo_model: Path, answers: Answers, admission: str
) -> None:
    harness = Harness(demo_causal_lm(demo_model, 4), num_blocks=70, admission=admission)
    outputs = harness.run(prompts_of(answers)[:10], GREEDY)
    assert [output.token_ids for output in outputs] == tokens_of(answers)[:10]
