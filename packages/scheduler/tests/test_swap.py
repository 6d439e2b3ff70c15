"""Preemption by swapping to a host pool."""

from __future__ import annotations

import pytest
from harness import Engine

from pagetide_kvcache import CopyDirection
from pagetide_scheduler import FinishReason, Preemption, RequestState, SamplingParams


def params(max_tokens: int, seed: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=seed)


def make(num_blocks: int = 20, num_host_blocks: int = 20, **options: object) -> Engine:
    engine = Engine(
        num_blocks=num_blocks,
        block_size=4,
        num_host_blocks=num_host_blocks,
        **{"preemption": "swap", "watermark": 0.0, **options},
    )
    engine.keeps_plans = True
    return engine


def copies(engine: Engine, direction: CopyDirection) -> int:
    return sum(copy.direction is direction for plan in engine.plans for copy in plan.copies)


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("generated", [1, 3, 4, 5, 12])
def test_c7_a_swapped_request_goes_on_exactly_and_computes_nothing_again(
    overlap: int, generated: int
) -> None:
    engine = make(overlap=overlap)
    engine.add("older", [1], params(30))
    engine.add("r", [5, 6, 7, 8, 9], params(20))
    while engine.requests["r"].num_generated_tokens < generated:
        engine.step()
    computed = engine.requests["r"].num_computed_tokens
    assert engine.scheduler.preempt("r", Preemption.SWAP)
    assert engine.requests["r"].state is RequestState.WAITING
    seen = len(engine.plans)
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()
    assert (
        copies(engine, CopyDirection.OUT) == copies(engine, CopyDirection.IN) == -(-computed // 4)
    )
    positions = [
        position
        for plan in engine.plans[seen:]
        if "r" in plan.request_ids
        for index in [plan.request_ids.index("r")]
        for position in plan.positions[slice(*plan.query_start_loc[index : index + 2])].tolist()
    ]
    assert positions == list(range(computed, 24))


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_small_pool_swaps_by_itself(overlap: int) -> None:
    engine = make(num_blocks=10, overlap=overlap)
    for index in range(4):
        engine.add(f"r{index}", [index + 1] * 7, params(16, index))
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()
    assert copies(engine, CopyDirection.OUT) == copies(engine, CopyDirection.IN) > 0
    assert sum(r.num_swaps for r in engine.requests.values()) > 0


def test_shared_leading_blocks_stay_and_the_rest_travels() -> None:
    engine = make()
    prompt = [3] * 8
    engine.add("first", [*prompt, 1], params(20))
    engine.step()
    engine.add("second", [*prompt, 2], params(20))
    engine.step()
    engine.step()
    before = engine.blocks.num_available_blocks
    kept = engine.blocks.sequence_blocks["second"][:2]
    assert kept == engine.blocks.sequence_blocks["first"][:2]
    engine.scheduler.preempt("second")
    assert engine.blocks.sequence_blocks["second"] == kept
    assert engine.blocks.num_available_blocks == before + 1
    assert engine.host is not None
    assert len(engine.host.sequence_blocks["second"]) == 1
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()


def test_an_open_shared_block_travels_too() -> None:
    engine = make()
    engine.add_samples(("a", "b"), [1, 2, 3, 4, 5, 6], [params(9, 1), params(9, 2)])
    engine.schedule()  # the plan in which they part: both hold the open block
    engine.scheduler.preempt("b", Preemption.SWAP)
    assert engine.host is not None
    assert len(engine.host.sequence_blocks["b"]) == 1
    assert len(engine.blocks.sequence_blocks["b"]) == 1
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()


@pytest.mark.parametrize("host_blocks", [1, 2])
def test_without_room_on_the_host_it_recomputes(host_blocks: int) -> None:
    engine = make(num_host_blocks=host_blocks)
    engine.add("older", [1], params(10))
    engine.add("r", [2] * 12, params(10))
    engine.step()
    engine.scheduler.preempt("r", Preemption.SWAP)
    assert engine.requests["r"].swapped is None
    engine.run()
    engine.check_outputs()


def test_where_nothing_would_travel_it_recomputes() -> None:
    """Everything it has computed is shared: swapping would free nothing."""
    engine = make()
    engine.add_samples(("a", "b"), [1, 2, 3, 4], [params(9, 1), params(9, 2)])
    engine.schedule()
    engine.scheduler.preempt("b", Preemption.SWAP)
    assert engine.requests["b"].swapped is None
    engine.run()
    engine.check_outputs()


def test_auto_takes_the_cheaper_way() -> None:
    for swap_cost, is_swapped in ((0.5, True), (100.0, False)):
        engine = make(preemption="auto", swap_cost=swap_cost)
        engine.add("older", [1], params(10))
        engine.add("r", [2] * 12, params(10))
        engine.step()
        engine.scheduler.preempt("r")
        assert (engine.requests["r"].swapped is not None) == is_swapped
        engine.run()
        engine.check_outputs()


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_kept_blocks_are_dropped_when_the_oldest_cannot_grow_otherwise(overlap: int) -> None:
    """A swapped request holds on to shared blocks that its partner has left; it must let go."""
    engine = make(num_blocks=8, overlap=overlap)
    prompt = [3] * 8
    engine.add("oldest", [9] * 3, params(29))  # in the end it needs all eight blocks
    engine.add("a", [*prompt, 1], params(1))
    engine.step()
    engine.add("b", [*prompt, 2], params(12))
    engine.add("c", [*prompt, 3], params(12))
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()
    assert engine.requests["oldest"].num_preemptions == 0


@pytest.mark.parametrize("moment", range(8))
@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_a_swapped_request_may_end_at_any_moment(moment: int, overlap: int) -> None:
    engine = make(overlap=overlap)
    engine.add("older", [1], params(20))
    engine.add("r", [2] * 6, params(20))
    engine.add("s", [2] * 6, params(20))
    engine.step()
    engine.step()
    engine.scheduler.preempt("r", Preemption.SWAP)
    engine.scheduler.preempt("s", Preemption.SWAP)
    for _ in range(moment):
        engine.schedule() if moment % 2 and len(engine.pending) <= overlap else engine.step()
    engine.finish("r", FinishReason.ABORT)
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()


@pytest.mark.parametrize("overlap", [0, 1, 2])
@pytest.mark.parametrize("failing", range(3, 9))
def test_a_copy_made_by_a_void_plan_is_not_trusted(overlap: int, failing: int) -> None:
    engine = make(overlap=overlap, fails=lambda plan: plan.step_id == failing)
    engine.add("older", [1], params(20))
    engine.add("r", [2] * 6, params(20))
    for step in range(12):
        engine.step()
        if step % 2:
            engine.scheduler.preempt("r", Preemption.SWAP)
            engine.scheduler.verify()
    engine.run()
    engine.check_outputs()
    engine.check_all_returned()
