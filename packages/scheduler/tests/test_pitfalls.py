"""Public bug reports of engines like this one, each as a test with the report's own input.

Names follow the project's list of pitfalls. Those of the block manager alone are tested there;
here the scheduler drives it.
"""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from harness import Engine

from pagetide_scheduler import (
    FinishReason,
    RequestState,
    RequestTooLargeError,
    SamplingParams,
    StepResult,
)

GREEDY = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a2_a_hit_leaves_a_token_and_its_keys_are_read(overlap: int) -> None:
    """A prompt of block_size + 1 tokens, twice one after the other and twice at once."""
    engine = Engine(num_blocks=32, block_size=4, overlap=overlap)
    prompt = [3, 1, 4, 1, 5]
    engine.add("first", prompt, GREEDY)
    engine.run()
    engine.add("second", prompt, GREEDY)
    engine.add("third", prompt, GREEDY)
    engine.run()
    engine.check_outputs()
    tokens = {engine.outputs[name].token_ids for name in ("first", "second", "third")}
    assert len(tokens) == 1
    assert engine.outputs["second"].num_cached_tokens == 4
    assert engine.outputs["third"].num_cached_tokens == 4


def test_a2_a_whole_prompt_hit_leaves_a_token_to_compute() -> None:
    engine = Engine(num_blocks=32, block_size=4)
    engine.add("first", [3, 1, 4, 1, 5, 9, 2, 6], GREEDY)
    engine.run()
    engine.keeps_plans = True
    engine.add("second", [3, 1, 4, 1, 5, 9, 2, 6], GREEDY)
    engine.run()
    assert engine.outputs["second"].num_cached_tokens == 4
    assert engine.plans[0].positions.tolist() == [4, 5, 6, 7]
    engine.check_outputs()


def test_a3_blocks_are_found_only_after_their_step_has_succeeded() -> None:
    engine = Engine(num_blocks=32, block_size=4, overlap=2, fails=lambda plan: plan.step_id == 1)
    prompt = [7] * 9
    engine.add("a", prompt, GREEDY)
    engine.add("b", prompt, GREEDY)
    assert engine.schedule()
    assert engine.outputs == {}
    engine.add("c", prompt, GREEDY)  # a and b are in flight, and that step fails
    assert engine.schedule()
    assert engine.blocks.match_prefix(prompt) == 0
    engine.run()
    engine.check_outputs()
    assert [engine.outputs[name].num_cached_tokens for name in "abc"] == [0, 0, 0]


def test_a5_a_preempted_request_finds_its_own_blocks_again() -> None:
    """Pool of 6; preempt, leave the blocks cached, admit again: scheduled = total - cached."""
    engine = Engine(num_blocks=6, block_size=4)
    engine.keeps_plans = True
    engine.add("older", [9], SamplingParams(max_tokens=6, seed=1))
    engine.add("a", list(range(1, 12)), GREEDY)
    engine.step()
    engine.step()
    total = engine.requests["a"].num_tokens
    assert engine.scheduler.preempt("a")
    engine.scheduler.verify()
    engine.step()
    plan = engine.plans[-1]
    index = plan.request_ids.index("a")
    assert np.diff(plan.query_start_loc)[index] == total - 12  # three full blocks were cached
    engine.run()
    engine.check_outputs()


def test_a7_an_evicted_block_is_a_miss() -> None:
    engine = Engine(num_blocks=6, block_size=4)
    prefix = [5] * 9
    engine.add("p", prefix, SamplingParams(max_tokens=1, seed=1))
    engine.run()
    assert engine.blocks.match_prefix(prefix) == 2
    engine.add("q", [6] * 20, SamplingParams(max_tokens=3, seed=1))
    engine.run()
    assert engine.blocks.match_prefix(prefix) == 0
    engine.add("again", prefix, SamplingParams(max_tokens=4, seed=1))
    engine.run()
    assert engine.outputs["again"].num_cached_tokens == 0
    engine.check_outputs()


def test_a9_a_hit_needs_the_same_past_not_only_the_same_block() -> None:
    engine = Engine(num_blocks=32, block_size=4)
    block = [1, 2, 3, 4]
    engine.add("a", [9, 9, 9, 9, *block, 5], GREEDY)
    engine.run()
    engine.add("b", [8, 8, 8, 8, *block, 5], GREEDY)
    engine.add("c", [*block, 5], GREEDY)
    engine.run()
    assert engine.outputs["b"].num_cached_tokens == 0
    assert engine.outputs["c"].num_cached_tokens == 0
    engine.check_outputs()


def test_a10_nothing_is_freed_twice() -> None:
    """A request that ends while preempted, in flight or ended already gives nothing back again."""
    engine = Engine(num_blocks=12, block_size=4, overlap=2)
    engine.add("older", [1, 2], GREEDY)
    engine.add("r", [1, 2, 3], GREEDY)
    engine.schedule()
    engine.schedule()
    assert engine.scheduler.preempt("r")
    assert not engine.scheduler.preempt("r")
    assert engine.finish("r", FinishReason.ABORT) is not None
    assert engine.finish("r", FinishReason.ABORT) is None
    assert not engine.scheduler.preempt("r")
    engine.run()
    engine.check_all_returned()


@pytest.mark.parametrize("length", [13, 17, 21, 31])
def test_a14_an_admission_that_does_not_fit_takes_nothing(length: int) -> None:
    engine = Engine(num_blocks=8, block_size=4)
    engine.add("holder", [1] * 18, SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
    engine.step()
    before = engine.blocks.num_available_blocks
    engine.add("waits", [2] * length, SamplingParams(max_tokens=1, seed=1))
    engine.step()
    assert engine.requests["waits"].state is RequestState.WAITING
    assert engine.blocks.num_available_blocks == before
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()


def test_c1_a_request_that_can_never_fit_does_not_hang_the_others() -> None:
    engine = Engine(num_blocks=49, block_size=16)
    for index in range(4):
        engine.add(f"r{index}", [index + 1] * 40, GREEDY)
    with pytest.raises(RequestTooLargeError, match="1003 tokens, but the pool holds 784"):
        engine.scheduler.add("giant", [1] * 1002, GREEDY)
    engine.run()
    assert len(engine.outputs) == 4
    engine.check_outputs()


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_c6_two_requests_do_not_wait_for_each_other_s_blocks(overlap: int) -> None:
    """Each would grow to more than half of the pool."""
    engine = Engine(num_blocks=10, block_size=4, overlap=overlap)
    for name in ("a", "b"):
        params = SamplingParams(max_tokens=26, ignore_eos=True, seed=ord(name))
        engine.add(name, [ord(name) - 90] * 8, params)
    engine.run(max_steps=200)
    engine.check_outputs()
    assert engine.outputs["a"].num_preemptions == 0
    assert engine.outputs["b"].num_preemptions >= 1


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("block_size", [3, 4])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_c7_resuming_continues_exactly(overlap: int, block_size: int, prefix_cache: bool) -> None:
    for generated in (1, block_size - 1, block_size, 3 * block_size):
        engine = Engine(
            num_blocks=24, block_size=block_size, overlap=overlap, prefix_cache=prefix_cache
        )
        engine.add("older", [1], SamplingParams(max_tokens=40, ignore_eos=True, seed=2))
        engine.add("r", [5, 6, 7, 8, 9], SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
        while engine.requests["r"].num_generated_tokens < generated:
            engine.step()
        assert engine.scheduler.preempt("r")
        engine.run()
        engine.check_outputs()


def test_c8_replay_covers_every_token_in_chunks() -> None:
    """Chunk 3, prompt 4, 5 generated, preempt: the replay computes 9 tokens in 3 chunks."""
    engine = Engine(
        num_blocks=24, block_size=4, prefix_cache=False, max_chunk_tokens=3, max_num_seqs=4
    )
    engine.add("older", [1], SamplingParams(max_tokens=40, ignore_eos=True, seed=2))
    engine.add("r", [5, 6, 7, 8], SamplingParams(max_tokens=9, ignore_eos=True, seed=1))
    while engine.requests["r"].num_generated_tokens < 5:
        engine.step()
    assert engine.scheduler.preempt("r")
    engine.keeps_plans = True
    for _ in range(3):
        engine.step()
    chunks = []
    for plan in engine.plans:
        index = plan.request_ids.index("r")
        start, end = plan.query_start_loc[index : index + 2]
        chunks.append(plan.positions[start:end].tolist())
    assert chunks == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
    assert [("r" in plan.samples.request_ids) for plan in engine.plans] == [False, False, True]
    engine.run()
    engine.check_outputs()


def test_c10_prompt_logprobs_see_every_position_after_a_preemption() -> None:
    """Prompt 10, chunk 3, preempt at 6: all ten positions are computed from the start again."""
    engine = Engine(num_blocks=24, block_size=4, max_chunk_tokens=3)
    prompt = list(range(1, 11))
    wants = SamplingParams(max_tokens=2, prompt_logprobs=True, seed=1)
    engine.add("fills the cache", prompt, GREEDY)
    engine.run()
    engine.add("older", [1], SamplingParams(max_tokens=40, ignore_eos=True, seed=2))
    engine.add("r", prompt, wants)
    engine.step()
    engine.step()
    assert engine.requests["r"].num_computed_tokens == 6
    assert engine.scheduler.preempt("r")
    engine.keeps_plans = True
    engine.run()
    positions: list[int] = []
    for plan in engine.plans:
        if "r" in plan.request_ids:
            index = plan.request_ids.index("r")
            start, end = plan.query_start_loc[index : index + 2]
            positions += plan.positions[start:end].tolist()
    assert positions[:10] == list(range(10))
    assert engine.outputs["r"].num_cached_tokens == 0
    engine.check_outputs()


def test_c10_its_blocks_are_cached_for_others_all_the_same() -> None:
    engine = Engine(num_blocks=24, block_size=4)
    engine.add("r", [1] * 10, SamplingParams(max_tokens=2, prompt_logprobs=True, seed=1))
    engine.run()
    engine.add("s", [1] * 10, GREEDY)
    engine.run()
    assert engine.outputs["s"].num_cached_tokens == 8


def test_c12_outputs_do_not_depend_on_rows_or_company() -> None:
    """16 requests, all with different parameters, under 50 random orders with finishes between."""
    names = [f"r{i}" for i in range(16)]
    wishes = {
        name: SamplingParams(
            max_tokens=3 + index,
            seed=index * 31,
            temperature=index / 4,
            top_k=index,
            min_tokens=index % 4,
            stop_token_ids=(index,),
        )
        for index, name in enumerate(names)
    }
    prompts = {name: [index + 1] * (1 + index % 5) for index, name in enumerate(names)}
    seen: dict[str, set[tuple[int, ...]]] = {name: set() for name in names}
    draw = random.Random(12)
    for round_number in range(50):
        engine = Engine(
            num_blocks=30, block_size=4, overlap=round_number % 3, max_num_seqs=5 + round_number % 7
        )
        order = draw.sample(names, len(names))
        for name in order:
            engine.add(name, prompts[name], wishes[name])
            if draw.random() < 0.5:
                engine.step()
        engine.run()
        engine.check_outputs()
        for name in names:
            seen[name].add(engine.outputs[name].token_ids)
    assert all(len(outputs) == 1 for outputs in seen.values())


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_c13_aborts_in_every_state(overlap: int) -> None:
    engine = Engine(
        num_blocks=16, block_size=4, overlap=overlap, max_num_seqs=3, max_num_batched_tokens=6
    )
    scheduler = engine.scheduler
    assert scheduler.finish("nobody", FinishReason.ABORT) is None

    engine.add("waiting", [1, 2], GREEDY)
    output = engine.finish("waiting", FinishReason.ABORT)
    assert output is not None
    assert (output.token_ids, output.finish_reason) == ((), FinishReason.ABORT)
    assert scheduler.num_waiting == 0

    engine.add("stays", [7], SamplingParams(max_tokens=30, ignore_eos=True, seed=1))
    engine.add("chunked", [1] * 20, GREEDY)
    engine.schedule()
    assert 0 < engine.requests["chunked"].num_computed_tokens < 20
    assert engine.finish("chunked", FinishReason.ABORT) is not None
    assert scheduler.num_running == 1

    engine.add("running", [2] * 3, GREEDY)
    while engine.requests["running"].num_generated_tokens < 3:
        engine.step()
    output = engine.finish("running", FinishReason.ABORT)
    assert output is not None
    assert output.num_generated_tokens >= 3

    engine.add("preempted", [3] * 3, GREEDY)
    while engine.requests["preempted"].num_generated_tokens < 2:
        engine.step()
    assert scheduler.preempt("preempted")
    assert engine.finish("preempted", FinishReason.ABORT) is not None

    engine.run()
    for name in ("stays", "waiting", "chunked", "running", "preempted", "nobody"):
        assert engine.finish(name, FinishReason.ABORT) is None
    engine.check_outputs()
    engine.check_all_returned()
    assert (scheduler.num_running, scheduler.num_waiting) == (0, 0)


def test_c13_every_moment_of_a_request_is_a_good_moment_to_abort_it() -> None:
    for moment in itertools.count():
        engine = Engine(num_blocks=12, block_size=2, overlap=1, max_num_batched_tokens=4)
        engine.add("older", [9], SamplingParams(max_tokens=12, ignore_eos=True, seed=1))
        engine.add("r", [1, 2, 3, 4, 5], GREEDY)
        for index in range(moment):
            if index % 2:
                engine.step()
            else:
                engine.schedule()
        if engine.requests["r"].state is RequestState.FINISHED:
            break
        assert engine.finish("r", FinishReason.ABORT) is not None
        engine.run()
        engine.check_outputs()
        engine.check_all_returned()
    assert moment > 8


def test_results_for_a_row_given_away_go_to_nobody_else() -> None:
    """The row of an aborted request has a new tenant before the old one's token is read."""
    engine = Engine(num_blocks=16, block_size=4, overlap=2, max_num_seqs=1)
    engine.add("old", [1, 2], GREEDY)
    engine.schedule()
    engine.finish("old", FinishReason.ABORT)
    engine.add("new", [3, 4], GREEDY)
    engine.schedule()
    first, second = engine.pending[0].plan, engine.pending[1].plan
    assert first.rows.tolist() == second.rows.tolist()
    output = engine.scheduler.update(first, StepResult.of([50]))
    assert output.request_ids == ()
    assert list(engine.requests["new"].token_ids) == [3, 4]
