"""Steps that fail: who starts over, who is to blame, and that the others never notice."""

from __future__ import annotations

import pytest
from harness import Engine

from pagetide_scheduler import FinishReason, SamplingParams, StepPlan

PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


def run(
    overlap: int, *, bad: set[str], failing_steps: set[int] = frozenset(), num_blocks: int = 40
) -> Engine:
    def fails(plan: StepPlan) -> bool:
        return plan.step_id in failing_steps or not bad.isdisjoint(plan.request_ids)

    engine = Engine(
        num_blocks=num_blocks, block_size=4, overlap=overlap, max_num_seqs=8, fails=fails
    )
    engine.keeps_plans = True
    for index in range(8):
        engine.add(f"r{index}", [index + 1] * (3 + index), PARAMS)
    engine.run(max_steps=2_000)  # failing for ever must not take long
    engine.check_outputs()
    engine.check_all_returned()
    return engine


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("num_blocks", [8, 40])
def test_only_the_request_that_fails_alone_ends_with_an_error(
    overlap: int, num_blocks: int
) -> None:
    engine = run(overlap, bad={"r3"}, num_blocks=num_blocks)
    errors = {n for n, o in engine.outputs.items() if o.finish_reason is FinishReason.ERROR}
    assert errors == {"r3"}
    assert engine.outputs["r3"].error is not None
    assert "step" in engine.outputs["r3"].error


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_passing_failure_costs_nobody_anything_but_time(overlap: int) -> None:
    engine = run(overlap, bad=set(), failing_steps={2, 40})
    assert {o.finish_reason for o in engine.outputs.values()} == {FinishReason.LENGTH}


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_every_request_bad(overlap: int) -> None:
    engine = run(overlap, bad={f"r{i}" for i in range(8)})
    assert {o.finish_reason for o in engine.outputs.values()} == {FinishReason.ERROR}


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_restarted_requests_run_alone_until_their_next_token(overlap: int) -> None:
    engine = run(overlap, bad=set(), failing_steps={4})
    failed = engine.plans[3]
    restarted = [r.request_id for r in failed.sequences.requests]
    # Behind the failed plan and those in flight with it, each restarted one has a plan of its own.
    rest = engine.plans[4 + overlap :]
    for name in restarted:
        first = next(plan for plan in rest if name in plan.request_ids)
        assert first.request_ids == (name,)
        while name not in first.samples.request_ids:
            first = next(p for p in rest if p.step_id > first.step_id and name in p.request_ids)
            assert first.request_ids == (name,)


def test_a_failure_with_an_older_step_still_in_flight() -> None:
    """The submission of k+1 itself may raise while k is healthy and not read yet."""
    engine = Engine(num_blocks=20, block_size=4, overlap=1)
    engine.add("r", [1, 2, 3], PARAMS)
    assert engine.schedule()
    doomed = engine.scheduler.schedule()
    engine.scheduler.rollback(doomed, "cannot submit")
    assert engine.scheduler.schedule().is_empty  # plan 1 names r and is not read yet
    engine.read()
    assert len(engine.requests["r"].token_ids) == 4
    engine.run()
    engine.check_outputs()


def test_an_error_of_one_sample_ends_that_request_only() -> None:
    for overlap in (0, 1, 2):
        engine = Engine(num_blocks=20, block_size=4, overlap=overlap)
        engine.add("bad", [1, 2, 3], SamplingParams(stop="raise"))
        engine.add("good", [1, 2, 3, 4], PARAMS)
        engine.run()
        assert engine.outputs["bad"].finish_reason is FinishReason.ERROR
        assert engine.outputs["bad"].error == "asked to fail"
        assert engine.outputs["bad"].token_ids == ()
        assert engine.outputs["good"].token_ids == engine.expected("good")
        engine.check_all_returned()


def test_aborts_of_suspects() -> None:
    engine = Engine(
        num_blocks=40, block_size=4, overlap=1, fails=lambda plan: plan.step_id in (2, 5)
    )
    for index in range(4):
        engine.add(f"r{index}", [index + 1] * 3, PARAMS)
    engine.step()
    engine.step()
    for name in ("r1", "r3"):
        engine.finish(name, FinishReason.ABORT)
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()


@pytest.mark.parametrize("budget", [4, 64])
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_nobody_finds_what_a_failed_sample_computed(overlap: int, budget: int) -> None:
    """Its logits were not finite, say: so its keys and values need not be, in earlier steps too."""
    engine = Engine(
        num_blocks=40, block_size=4, overlap=overlap, max_num_seqs=4, max_num_batched_tokens=budget
    )
    prompt = list(range(1, 21))
    engine.add("bad", prompt, SamplingParams(max_tokens=4, stop=("raise",)))
    engine.run()
    assert engine.outputs["bad"].finish_reason is FinishReason.ERROR
    engine.add("good", [*prompt, 50], PARAMS)
    engine.run()
    assert engine.outputs["good"].num_cached_tokens == 0
    engine.add("again", [*prompt, 51], PARAMS)
    engine.run()
    assert engine.outputs["again"].num_cached_tokens == 20
    engine.check_outputs()
    engine.check_all_returned()


def test_a_minimum_beyond_int32_is_no_more_than_a_very_long_one() -> None:
    engine = Engine(num_blocks=8, block_size=4, max_num_seqs=2)
    endless = SamplingParams(max_tokens=None, min_tokens=2**40)
    engine.add("endless", [1, 2, 3], endless)
    engine.add("company", [4, 5, 6], PARAMS)
    engine.run()
    assert engine.outputs["endless"].finish_reason in (FinishReason.POOL, FinishReason.CONTEXT)
    engine.check_outputs()
    engine.check_all_returned()
