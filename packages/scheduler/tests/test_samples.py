"""Several samples of one prompt: computed once, shared, parted by copy-on-write."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from harness import Engine
from toy_model import keys_and_values

from pagetide_kvcache import CopyDirection
from pagetide_scheduler import FinishReason, RequestRefusedError, RequestState, SamplingParams

NAMES = ("a", "b", "c")


def wishes(max_tokens: int = 9, count: int = 3) -> list[SamplingParams]:
    return [
        SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed) for seed in range(count)
    ]


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("prompt_length", [1, 3, 4, 5, 8, 11])
@pytest.mark.parametrize("chunk", [None, 3])
def test_each_sample_is_what_it_would_be_alone(
    overlap: int, prompt_length: int, chunk: int | None
) -> None:
    engine = Engine(num_blocks=40, block_size=4, overlap=overlap, max_chunk_tokens=chunk)
    engine.keeps_plans = True
    engine.add_samples(NAMES, list(range(1, prompt_length + 1)), wishes())
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()
    computed = sum(int((plan.positions < prompt_length).sum()) for plan in engine.plans)
    assert computed == prompt_length  # once for all three
    copies = [copy for plan in engine.plans for copy in plan.copies]
    assert all(copy.direction is CopyDirection.WITHIN for copy in copies)
    assert len(copies) == (2 if prompt_length % 4 else 0)  # the last holder writes in place


def test_they_part_in_the_plan_that_computes_the_last_prompt_token() -> None:
    engine = Engine(num_blocks=40, block_size=4, max_chunk_tokens=4)
    engine.keeps_plans = True
    engine.add_samples(NAMES, list(range(1, 7)), wishes())
    engine.schedule()
    assert engine.plans[0].num_samples == 0
    assert engine.scheduler.num_running == 1
    engine.read()
    engine.schedule()
    plan = engine.plans[1]
    assert plan.request_ids == ("a",)
    assert plan.samples.request_ids == NAMES
    assert plan.sample_tokens.tolist() == [1, 1, 1]
    assert plan.sample_positions.tolist() == [6, 6, 6]
    assert len(plan.new_rows) == 2
    assert len({tuple(engine.blocks.sequence_blocks[name]) for name in NAMES}) == 1
    engine.run()
    engine.check_outputs()


def test_a1_a_shared_open_block_is_copied_by_whoever_writes_first() -> None:
    """Block size 4, six tokens, fork; one appends 7, the other 8: each reads its own."""
    engine = Engine(num_blocks=12, block_size=4)
    prompt = [1, 2, 3, 4, 5, 6]
    engine.add_samples(("a", "b"), prompt, wishes(3, 2))
    while len(engine.requests["a"].token_ids) < 8:
        engine.step()
    for name in ("a", "b"):
        request = engine.requests[name]
        computed = request.num_computed_tokens
        table = list(engine.blocks.sequence_blocks[name])
        ids = np.array(request.token_ids[:computed])
        stored = engine.model.cache[table].reshape(-1)[:computed]
        assert (stored == keys_and_values(ids, np.arange(computed))).all()
    tables = [engine.blocks.sequence_blocks[name] for name in ("a", "b")]
    assert tables[0][0] == tables[1][0]
    assert tables[0][1] != tables[1][1]
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()


def test_if_the_first_ends_early_the_next_leads() -> None:
    for moment in itertools.count():
        engine = Engine(num_blocks=20, block_size=4, overlap=1, max_num_batched_tokens=3)
        engine.add("other", [9], SamplingParams(max_tokens=9, ignore_eos=True, seed=1))
        engine.add_samples(NAMES, [1, 2, 3, 4, 5, 6, 7], wishes())
        engine.add("behind", [8], SamplingParams(max_tokens=2, ignore_eos=True, seed=1))
        for index in range(moment):
            if index % 2:
                engine.step()
            else:
                engine.schedule()
        if engine.requests["a"].state is RequestState.FINISHED:
            break
        assert engine.finish("a", FinishReason.ABORT) is not None
        engine.run()
        engine.check_outputs()
        engine.check_all_returned()
        assert engine.outputs["b"].finish_reason is FinishReason.LENGTH
        assert engine.outputs["c"].finish_reason is FinishReason.LENGTH
    assert moment > 8


def test_the_next_leader_keeps_the_place_in_the_queue() -> None:
    engine = Engine(num_blocks=20, block_size=4, max_num_seqs=3, admission="fcfs")
    engine.add_samples(("x1", "x2", "x3"), [5, 6], wishes())
    engine.step()  # all rows are taken
    engine.add_samples(NAMES, [1, 2, 3], wishes(2))
    engine.add("behind", [8], SamplingParams(max_tokens=1))
    engine.finish("a", FinishReason.ABORT)
    engine.finish("b", FinishReason.ABORT)
    started = []
    while engine.scheduler.has_unfinished:
        engine.step()
        started += [
            name
            for name in ("c", "behind")
            if engine.requests[name].has_run and name not in started
        ]
    assert started == ["c", "behind"]
    engine.check_outputs()


def test_followers_may_end_before_they_part() -> None:
    engine = Engine(num_blocks=20, block_size=4, max_num_batched_tokens=2)
    engine.add_samples(NAMES, [1, 2, 3, 4, 5], wishes())
    engine.schedule()
    for name in ("b", "c"):
        output = engine.finish(name, FinishReason.ABORT)
        assert output is not None
        assert output.token_ids == ()
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()


def test_rows_are_kept_for_them() -> None:
    """The group waits until all of its rows are there; nobody takes them meanwhile."""
    engine = Engine(num_blocks=40, block_size=4, max_num_seqs=4, max_num_batched_tokens=3)
    engine.add("other", [9], SamplingParams(max_tokens=20, ignore_eos=True, seed=1))
    engine.add_samples(NAMES, [1] * 9, wishes())
    for index in range(5):
        engine.add(f"late{index}", [7], SamplingParams(max_tokens=3, ignore_eos=True, seed=1))
    while engine.scheduler.num_running < 4:
        engine.step()
        running = {n for n, r in engine.requests.items() if r.state is RequestState.RUNNING}
        assert not any(name.startswith("late") for name in running)
    engine.run()
    engine.check_outputs()


def test_a_group_is_taken_whole_or_not_at_all() -> None:
    engine = Engine(num_blocks=8, block_size=4, max_num_seqs=2)
    scheduler = engine.scheduler
    with pytest.raises(RequestRefusedError, match="3 samples"):
        scheduler.add_samples(NAMES, [1, 2], wishes())
    with pytest.raises(RequestRefusedError, match="'a'"):
        scheduler.add_samples(("a", "a"), [1, 2], wishes(count=2))
    with pytest.raises(ValueError, match="request_ids"):
        scheduler.add_samples((), [1, 2], [])
    with pytest.raises(ValueError, match="zip"):
        scheduler.add_samples(("a", "b"), [1, 2], wishes(count=1))
    assert not scheduler.has_unfinished
    assert scheduler.num_waiting == 0


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("failing", [1, 2, 3, 4])
def test_a_step_that_fails_around_the_parting(overlap: int, failing: int) -> None:
    engine = Engine(
        num_blocks=30,
        block_size=4,
        overlap=overlap,
        max_num_batched_tokens=4,
        fails=lambda plan: plan.step_id == failing,
    )
    engine.add_samples(NAMES, [1, 2, 3, 4, 5, 6], wishes())
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()
    assert all(o.finish_reason is FinishReason.LENGTH for o in engine.outputs.values())


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_small_pool_preempts_samples_too(overlap: int) -> None:
    engine = Engine(num_blocks=7, block_size=3, overlap=overlap, watermark=0.0)
    engine.add_samples(NAMES, [1, 2, 3, 4], wishes(12))
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()
    assert engine.num_preemptions > 0
