"""Log-probabilities of the prompt: reported by whoever runs the plans, kept with the requests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from pagetide_kvcache import BlockManager
from pagetide_scheduler import (
    FinishReason,
    Preemption,
    PromptLogprobs,
    RequestOutput,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    StepOutput,
    StepPlan,
    StepResult,
)

ASKS = SamplingParams(max_tokens=2, prompt_logprobs=True, seed=1)
PROMPT = list(range(1, 11))


def make(**options: object) -> Scheduler:
    config = SchedulerConfig(max_model_len=64, max_chunk_tokens=3, **options)
    return Scheduler(config, BlockManager(32, 4), host_block_manager=BlockManager(32, 4))


def report(plan: StepPlan, names: Sequence[str], sign: float = -1.0) -> tuple[PromptLogprobs, ...]:
    """For the token at position p: p, with that sign."""
    parts = []
    for sequence, name in enumerate(plan.request_ids):
        start, end = plan.query_start_loc[sequence : sequence + 2]
        positions = plan.positions[start:end]
        positions = positions[(positions > 0) & (positions < len(PROMPT))]
        if name in names and len(positions):
            values = positions.astype(np.float32) * sign
            parts.append(PromptLogprobs(sequence, int(positions[0]), values))
    return tuple(parts)


def step(scheduler: Scheduler, *names: str) -> StepOutput:
    plan = scheduler.schedule()
    tokens = [7] * plan.num_samples
    return scheduler.update(plan, StepResult.of(tokens, prompt_logprobs=report(plan, names)))


def run(scheduler: Scheduler, *names: str) -> dict[str, RequestOutput]:
    outputs = {}
    while scheduler.has_unfinished:
        outputs.update({out.request_id: out for out in step(scheduler, *names).finished})
    return outputs


WHOLE = (None, *(-float(position) for position in range(1, 10)))


def test_they_come_chunk_by_chunk_and_end_whole() -> None:
    scheduler = make()
    scheduler.add("asks", PROMPT, ASKS)
    scheduler.add("does not", PROMPT, SamplingParams(max_tokens=2))
    outputs = run(scheduler, "asks", "does not")
    assert outputs["asks"].prompt_logprobs == WHOLE
    assert outputs["does not"].prompt_logprobs is None
    scheduler.add("short", [1], ASKS)
    assert run(scheduler)["short"].prompt_logprobs == (None,)


@pytest.mark.parametrize("way", list(Preemption))
def test_a_prompt_half_scored_starts_over(way: Preemption) -> None:
    scheduler = make()
    request = scheduler.add("r", PROMPT, ASKS)
    step(scheduler, "r")
    step(scheduler, "r")
    assert scheduler.preempt("r", way)
    # The state that its next token needs lies in the row it had, so it is never swapped.
    assert request.swapped is None
    assert run(scheduler, "r")["r"].prompt_logprobs == WHOLE


def test_one_that_is_scored_is_swapped_like_any_other() -> None:
    scheduler = make()
    request = scheduler.add("r", PROMPT, ASKS)
    while request.num_generated_tokens < 1:
        step(scheduler, "r")
    assert scheduler.preempt("r", Preemption.SWAP)
    assert request.swapped is not None
    assert run(scheduler, "r")["r"].prompt_logprobs == WHOLE


def test_samples_share_what_the_first_computes_even_if_it_ends_before() -> None:
    scheduler = make()
    scheduler.add_samples(("a", "b", "c"), PROMPT, (ASKS, ASKS, ASKS))
    plans = [scheduler.schedule() for _ in range(4)]
    assert "b" in plans[-1].samples.request_ids
    aborted = scheduler.finish("a", FinishReason.ABORT)
    assert aborted is not None and aborted.prompt_logprobs == (None,)
    for plan in plans:
        tokens = [7] * plan.num_samples
        scheduler.update(plan, StepResult.of(tokens, prompt_logprobs=report(plan, ["a"])))
    outputs = run(scheduler)
    assert [outputs[name].prompt_logprobs for name in "bc"] == [WHOLE, WHOLE]


def test_what_does_not_belong_to_the_plan_is_refused_and_changes_nothing() -> None:
    scheduler = make()
    scheduler.add("r", PROMPT, ASKS)
    plan = scheduler.schedule()
    one = np.zeros(1, np.float32)
    for part in (PromptLogprobs(1, 1, one), PromptLogprobs(-1, 1, one), PromptLogprobs(0, 0, one)):
        with pytest.raises(ValueError, match="prompt_logprobs"):
            scheduler.update(plan, StepResult.of([], prompt_logprobs=(part,)))
    scheduler.update(plan, StepResult.of([], prompt_logprobs=report(plan, ["r"])))
    assert run(scheduler, "r")["r"].prompt_logprobs == WHOLE
