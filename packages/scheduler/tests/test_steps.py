"""Plans and results of small, hand-checked situations."""

from __future__ import annotations

import numpy as np
import pytest
from harness import VOCAB_SIZE, Engine
from toy_model import generate_alone

from pagetide_kvcache import BlockManager
from pagetide_scheduler import (
    FinishReason,
    PlanOrderError,
    RequestState,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    StepResult,
)

LONG = SamplingParams(max_tokens=None, ignore_eos=True, seed=1)


def make(num_blocks: int = 16, block_size: int = 4, **config: int) -> Scheduler:
    clock = iter(range(1000))
    return Scheduler(
        SchedulerConfig(max_model_len=1000, **config),
        BlockManager(num_blocks, block_size),
        eos_token_ids=(0,),
        clock=lambda: float(next(clock)),
    )


def test_one_request_step_by_step() -> None:
    scheduler = make(max_num_seqs=4, max_num_batched_tokens=4)
    scheduler.add("r", [11, 12, 13, 14, 15, 16], SamplingParams(max_tokens=3, seed=5, min_tokens=2))

    first = scheduler.schedule()
    assert (first.step_id, first.request_ids) == (1, ("r",))
    assert first.token_ids.tolist() == [11, 12, 13, 14]
    assert first.positions.tolist() == [0, 1, 2, 3]
    assert first.query_start_loc.tolist() == [0, 4]
    assert first.seq_lens.tolist() == [4]
    assert first.num_samples == 0  # two prompt tokens are left
    assert first.new_rows.tolist() == first.rows.tolist() == [0]
    assert first.new_params[0].seed == 5
    assert first.new_min_positions.tolist() == [8]  # end-of-sequence is masked at 6 and 7
    assert first.table_rows.tolist() == [0, 0]  # blocks for every known token, at once
    assert first.table_indices.tolist() == [0, 1]
    assert scheduler.update(first, StepResult.of([])).request_ids == ()

    second = scheduler.schedule()
    assert second.token_ids.tolist() == [15, 16]
    assert second.seq_lens.tolist() == [6]
    assert second.sample_tokens.tolist() == [1]
    assert second.sample_positions.tolist() == [6]
    assert not len(second.new_rows)
    assert not len(second.table_rows)

    ahead = scheduler.schedule()  # before the result of `second` is read
    assert ahead.token_ids.tolist() == [0]
    assert ahead.inflight_tokens.tolist() == [0]
    assert ahead.inflight_rows.tolist() == [0]
    assert ahead.positions.tolist() == [6]

    output = scheduler.update(second, StepResult.of([21]))
    assert (output.request_ids, output.token_ids.tolist()) == (("r",), [21])
    assert not scheduler.update(ahead, StepResult.of([22])).finished

    last = scheduler.schedule()
    assert last.token_ids.tolist() == [22]  # the host knows it now
    assert not len(last.inflight_tokens)
    assert last.positions.tolist() == [7]
    (finished,) = scheduler.update(last, StepResult.of([23])).finished
    assert finished.token_ids == (21, 22, 23)
    assert finished.prompt_token_ids == (11, 12, 13, 14, 15, 16)
    assert finished.finish_reason is FinishReason.LENGTH
    assert (finished.num_prompt_tokens, finished.num_generated_tokens) == (6, 3)
    assert not scheduler.has_unfinished
    assert scheduler.schedule().is_empty


def test_times_come_from_the_clock() -> None:
    now = 0.0
    scheduler = Scheduler(
        SchedulerConfig(max_model_len=100, max_num_batched_tokens=2),
        BlockManager(8, 4),
        clock=lambda: now,
    )
    scheduler.add("r", [1, 2, 3], SamplingParams(max_tokens=2))
    now = 3.0
    scheduler.update(scheduler.schedule(), StepResult.of([]))
    now = 8.0
    scheduler.update(scheduler.schedule(), StepResult.of([5]))
    now = 20.0
    (output,) = scheduler.update(scheduler.schedule(), StepResult.of([5])).finished
    assert (output.queue_seconds, output.prefill_seconds, output.decode_seconds) == (3, 5, 12)


def test_decode_goes_first_and_prompts_share_what_is_left() -> None:
    scheduler = make(max_num_batched_tokens=8, max_chunk_tokens=5)
    scheduler.add("a", [1, 2], LONG)
    scheduler.update(scheduler.schedule(), StepResult.of([9]))
    scheduler.add("b", [1] * 9, LONG)
    scheduler.add("c", [2] * 3, LONG)
    plan = scheduler.schedule()
    assert plan.request_ids == ("a", "b", "c")
    assert np.diff(plan.query_start_loc).tolist() == [1, 5, 2]  # the cap leaves b's rest to c
    assert plan.sample_rows.tolist() == [plan.rows[0]]
    scheduler.update(plan, StepResult.of([9]))
    plan = scheduler.schedule()
    assert plan.request_ids == ("a", "c", "b")  # c has one token left: it decodes
    assert np.diff(plan.query_start_loc).tolist() == [1, 1, 4]
    assert plan.num_samples == 3


def test_a_budget_below_the_number_of_running_requests() -> None:
    engine = Engine(num_blocks=40, block_size=4, max_num_seqs=5, max_num_batched_tokens=3)
    for index in range(5):
        engine.add(f"r{index}", [index + 1], SamplingParams(max_tokens=6))
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_late_stop_discards_the_extra_tokens(overlap: int) -> None:
    engine = Engine(num_blocks=32, block_size=4, overlap=overlap)
    prompts = {f"r{i}": [i + 1, 5, 7] for i in range(12)}
    for name, prompt in prompts.items():
        engine.add(name, prompt, SamplingParams(max_tokens=40, seed=len(name) + prompt[0]))
    engine.run()
    engine.check_outputs()
    reasons = {output.finish_reason for output in engine.outputs.values()}
    assert FinishReason.STOP in reasons
    # Nothing past the end was ever told to the caller either.
    for name, output in engine.outputs.items():
        assert tuple(engine.streams[name]) == output.token_ids


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("keep", [0, 1, 5])
def test_a_stop_string_found_by_the_caller_keeps_what_it_says(overlap: int, keep: int) -> None:
    engine = Engine(num_blocks=32, block_size=4, overlap=overlap)
    engine.add("r", [1, 2, 3], LONG)
    engine.add("other", [4, 5], SamplingParams(max_tokens=30, ignore_eos=True))
    while len(engine.streams["r"]) < 6:
        engine.step()
    output = engine.finish("r", FinishReason.STOP, keep)
    assert output is not None
    assert output.token_ids == tuple(engine.streams["r"][:keep])
    assert output.finish_reason is FinishReason.STOP
    engine.run()
    assert engine.outputs["other"].token_ids == engine.expected("other")
    engine.check_all_returned()


def test_keep_tokens_must_exist() -> None:
    scheduler = make()
    scheduler.add("r", [1, 2, 3], LONG)
    for keep in (-1, 1):
        with pytest.raises(ValueError, match="keep_tokens"):
            scheduler.finish("r", FinishReason.STOP, keep)
    assert scheduler.has_unfinished


def test_min_tokens_holds_stops_back() -> None:
    scheduler = make()
    scheduler.add("r", [1], SamplingParams(max_tokens=9, min_tokens=2, stop_token_ids=(7,)))
    ended = []
    for token in (7, 0, 7):
        ended.append(scheduler.update(scheduler.schedule(), StepResult.of([token])).finished)
    assert ended[:2] == [(), ()]
    assert ended[2][0].finish_reason is FinishReason.STOP
    assert ended[2][0].token_ids == (7, 0, 7)


def test_min_tokens_is_masked_on_the_device_too() -> None:
    engine = Engine(num_blocks=32, block_size=4, overlap=1)
    for index in range(20):
        params = SamplingParams(max_tokens=30, min_tokens=index, seed=index, stop_token_ids=(3,))
        engine.add(f"r{index}", [index + 1, 2], params)
    engine.run()
    engine.check_outputs()
    assert all(len(engine.outputs[f"r{i}"].token_ids) > i for i in range(20))


def test_ignored_end_of_sequence_is_an_ordinary_token() -> None:
    scheduler = make()
    scheduler.add("r", [1], SamplingParams(max_tokens=3, ignore_eos=True))
    for _ in range(2):
        assert not scheduler.update(scheduler.schedule(), StepResult.of([0])).finished
    (output,) = scheduler.update(scheduler.schedule(), StepResult.of([0])).finished
    assert output.finish_reason is FinishReason.LENGTH


def test_another_request_s_stop_token_is_an_ordinary_token() -> None:
    scheduler = make()
    scheduler.add("a", [1], SamplingParams(stop_token_ids=(5,)))
    scheduler.add("b", [1], SamplingParams())
    output = scheduler.update(scheduler.schedule(), StepResult.of([5, 5]))
    assert [o.request_id for o in output.finished] == ["a"]


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_request_that_fills_the_pool_ends_by_it(overlap: int) -> None:
    engine = Engine(num_blocks=3, block_size=4, overlap=overlap)
    engine.add("r", [1, 2], SamplingParams(max_tokens=None, ignore_eos=True))
    engine.run()
    output = engine.outputs["r"]
    assert output.finish_reason is FinishReason.POOL
    assert len(output.token_ids) == 3 * 4 + 1 - 2  # the last token needs no slot
    assert output.num_preemptions == 0
    engine.check_outputs()


def test_plans_are_read_in_order_and_once() -> None:
    scheduler = make()
    scheduler.add("r", [1, 2], LONG)
    first, second = scheduler.schedule(), scheduler.schedule()
    with pytest.raises(PlanOrderError, match="plan 1 is the oldest"):
        scheduler.update(second, StepResult.of([5]))
    with pytest.raises(ValueError, match="1 samples"):
        scheduler.update(first, StepResult.of([5, 6]))
    with pytest.raises(ValueError, match="num_tokens"):
        scheduler.update(first, StepResult(np.zeros((1, 2), np.int32), np.full(1, 2, np.int32)))
    scheduler.update(first, StepResult.of([5]))
    with pytest.raises(PlanOrderError):
        scheduler.update(first, StepResult.of([5]))
    scheduler.update(second, StepResult.of([6]))
    with pytest.raises(PlanOrderError):
        scheduler.rollback(second)
    assert list(scheduler.add("s", [1], LONG).token_ids) == [1]


def test_an_empty_plan_marks_nothing() -> None:
    scheduler = make()
    for _ in range(3):
        plan = scheduler.schedule()
        assert plan.is_empty
        assert plan.num_seqs == plan.num_tokens == plan.num_samples == 0
        assert plan.max_query_len == plan.max_seq_len == 0
    assert scheduler.update(plan, StepResult.of([])).request_ids == ()
    assert scheduler.num_plans_in_flight == 0
    scheduler.add("r", [1], LONG)
    assert scheduler.schedule().step_id == 1


def test_plans_do_not_change_behind_the_runner_s_back() -> None:
    engine = Engine(num_blocks=20, block_size=2, max_num_seqs=6, overlap=2)
    engine.keeps_plans = True
    for index in range(10):
        engine.add(f"r{index}", [index + 1] * 3, SamplingParams(max_tokens=12))
    seen: list[bytes] = []

    def picture(plan: object) -> bytes:
        return b"".join(
            getattr(plan, name).tobytes()
            for name in plan.__slots__
            if isinstance(getattr(plan, name), np.ndarray)
        )

    while engine.scheduler.has_unfinished:
        engine.step()
        seen += [picture(plan) for plan in engine.plans[len(seen) :]]
    assert [picture(plan) for plan in engine.plans] == seen


def test_request_properties_follow_its_life() -> None:
    scheduler = make(max_num_batched_tokens=4)
    request = scheduler.add("r", list(range(1, 7)), SamplingParams(max_tokens=4))
    assert request.state is RequestState.WAITING
    assert (request.num_tokens, request.num_computed_tokens) == (6, 0)
    scheduler.update(scheduler.schedule(), StepResult.of([]))
    assert request.state is RequestState.RUNNING
    assert (request.num_computed_tokens, request.num_inflight_tokens) == (4, 0)
    first = scheduler.schedule()
    assert (request.num_tokens, request.num_computed_tokens) == (6, 6)
    assert request.num_inflight_tokens == 1
    scheduler.update(first, StepResult.of([8]))
    assert list(request.token_ids) == [1, 2, 3, 4, 5, 6, 8]
    assert request.num_generated_tokens == 1
    scheduler.preempt("r")
    assert request.state is RequestState.WAITING
    assert list(request.token_ids) == [1, 2, 3, 4, 5, 6, 8]
    scheduler.finish("r", FinishReason.ABORT)
    assert request.state is RequestState.FINISHED


def test_the_toy_model_notices_a_wrong_block() -> None:
    """The judge must not be blind: one wrong entry in one table changes what comes out."""
    prompt = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=3)
    outputs = []
    for is_broken in (False, True):
        engine = Engine(num_blocks=8, block_size=4)
        engine.add("r", prompt, params)
        engine.step()
        if is_broken:
            engine.model.block_tables[0, [0, 1]] = engine.model.block_tables[0, [1, 0]]
        engine.run()
        outputs.append(engine.outputs["r"].token_ids)
    key = engine.requests["r"].key
    alone = generate_alone(prompt, params, key, vocab_size=VOCAB_SIZE, max_new_tokens=2)
    assert outputs[0] == alone
    assert outputs[1] != alone
