"""Who gets in, and who is passed how often."""

from __future__ import annotations

import pytest
from harness import Engine

from pagetide_scheduler import RequestState, SamplingParams


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)


def number(name: str) -> list[int]:
    return [int(part) for part in name[1:].split(".")] if name[0] == "s" else []


def running(engine: Engine) -> set[str]:
    return {n for n, r in engine.requests.items() if r.state is RequestState.RUNNING}


def full_pool(admission: str, **config: int) -> Engine:
    """Eight blocks, six of them held for 8 steps; the head of the queue needs five."""
    engine = Engine(num_blocks=8, block_size=4, admission=admission, **config)
    engine.add("holder", [1] * 20, params(5))
    engine.step()
    engine.add("big", [2] * 20, params(2))
    engine.add("small", [3] * 3, params(2))
    engine.add("tiny", [4], params(2))
    return engine


def test_fcfs_stops_at_the_first_that_does_not_fit() -> None:
    engine = full_pool("fcfs")
    engine.step()
    assert running(engine) == {"holder"}
    engine.run()
    engine.check_outputs()


def test_lookahead_admits_whoever_fits_and_counts_one_skip_a_step() -> None:
    engine = full_pool("lookahead")
    engine.schedule()
    assert running(engine) == {"holder", "small", "tiny"}
    assert engine.requests["big"].num_skips == 1  # passed by two in one step
    engine.run()
    assert engine.requests["big"].num_skips == 0
    engine.check_outputs()


def test_lookahead_is_bounded() -> None:
    engine = Engine(num_blocks=8, block_size=4, lookahead=2)
    engine.add("holder", [1] * 20, params(5))
    engine.step()
    for index in range(3):
        engine.add(f"big{index}", [2] * 20, params(2))
    engine.add("small", [3], params(2))
    engine.schedule()
    assert running(engine) == {"holder"}  # the fourth is not looked at
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("max_skips", [1, 3, 8])
@pytest.mark.parametrize("overlap", [0, 1])
def test_c4_neither_blocking_nor_starvation(max_skips: int, overlap: int) -> None:
    """One request of 8 blocks in an endless stream of requests of one block."""
    engine = Engine(num_blocks=10, block_size=4, lookahead=4, max_skips=max_skips, overlap=overlap)
    big = None
    order: list[str] = []
    most_skips = 0
    steps_blocking = 0
    for step in range(80):
        for copy in range(2):
            engine.add(f"s{step}.{copy}", [1 + step % 50, 2], params(3))
        if step == 5:
            big = engine.add("big", [9] * 30, params(2))
        before = running(engine)
        engine.step()
        order += sorted(running(engine) - before, key=number)
        if big is not None and big.state is RequestState.WAITING:
            most_skips = max(most_skips, big.num_skips)
            steps_blocking += big.num_skips == max_skips
    assert big is not None
    assert "big" in order
    assert 1 <= most_skips <= max_skips
    assert steps_blocking <= 5 + overlap  # the drain: three tokens of whoever was in
    behind = [name for name in order[order.index("big") + 1 :] if name != "big"]
    assert behind == sorted(behind, key=number)
    engine.run()
    engine.check_outputs()


def test_a_long_wait_at_the_head_blocks_too() -> None:
    engine = Engine(num_blocks=10, block_size=4, max_skips=1000, max_wait_steps=5)
    engine.add("holder", [9] * 8, params(30))
    engine.step()
    engine.add("big", [8] * 30, params(1))
    admitted_past = 0
    for step in range(40):
        before = running(engine)
        engine.add(f"s{step}", [1], params(1))
        engine.schedule()
        if engine.requests["big"].state is RequestState.WAITING:
            admitted_past += len(running(engine) - before)
        engine.read()
    assert 1 <= admitted_past <= 6
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("admission", ["lookahead", "reserve"])
def test_preempted_requests_are_never_passed_by_new_ones(admission: str) -> None:
    engine = Engine(num_blocks=8, block_size=4, watermark=0.0, admission=admission)
    engine.add("older", [1] * 12, params(5))
    engine.add("returns", [2] * 15, params(9))
    engine.step()
    engine.step()  # older holds four blocks, returns four
    assert engine.scheduler.preempt("returns")  # it knows 17 tokens now and needs five
    engine.add("taker", [3], params(1))
    engine.schedule()
    assert running(engine) == {"older"}
    engine.run()
    engine.check_outputs()


def test_no_admission_in_a_step_that_preempted() -> None:
    engine = Engine(num_blocks=6, block_size=2, watermark=0.0)
    engine.add("a", [1] * 4, params(8))
    engine.add("b", [2] * 4, params(8))
    engine.step()
    engine.add("c", [3], params(1))
    while engine.requests["b"].num_preemptions == 0:
        before = running(engine)
        engine.schedule()
        if engine.requests["b"].num_preemptions:
            assert running(engine) <= before
        engine.read()
    engine.run()
    engine.check_outputs()


def test_the_watermark_leaves_room_to_grow_unless_nothing_runs() -> None:
    engine = Engine(num_blocks=200, block_size=2, watermark=0.01)
    engine.add("a", [1] * 10, params(2))
    engine.add("b", [2] * 388, params(2))  # 194 + 5 = 199 blocks: it would leave one, not two
    engine.schedule()
    assert running(engine) == {"a"}
    engine.run()
    engine.add("alone", [3] * 399, params(1))
    engine.schedule()
    assert running(engine) == {"alone"}
    engine.run()
    engine.check_outputs()


@pytest.mark.parametrize("admission", ["fcfs", "lookahead"])
def test_priority_goes_first_and_age_catches_up(admission: str) -> None:
    """An endless stream of priority 1 delays priority 0 by no more than `priority_steps`."""
    engine = Engine(
        num_blocks=20, block_size=4, max_num_seqs=1, admission=admission, priority_steps=10
    )
    engine.add("first", [1], params(1))
    engine.add("plain", [2], params(1))
    started = None
    for step in range(60):
        engine.add(f"u{step}", [3], params(1), priority=1)
        engine.step()
        if started is None and engine.requests["plain"].has_run:
            started = step
    assert started is not None
    assert 8 <= started <= 14
    engine.run()
    engine.check_outputs()


def test_priority_decides_who_is_preempted() -> None:
    engine = Engine(num_blocks=8, block_size=2, watermark=0.0)
    engine.add("low", [1] * 6, params(8), priority=0)
    engine.add("high", [2] * 6, params(8), priority=3)
    engine.run()
    assert engine.outputs["high"].num_preemptions == 0
    assert engine.outputs["low"].num_preemptions > 0
    engine.check_outputs()


def test_the_victim_is_whoever_loses_least_a_freed_block() -> None:
    """The youngest has computed most of its blocks' tokens; the middle one almost nothing."""
    engine = Engine(num_blocks=12, block_size=4, watermark=0.0, prefix_cache=False)
    engine.add("oldest", [1] * 16, params(8))
    engine.add("cheap", [2] * 13, params(8))
    engine.add("dear", [3] * 15, params(8))
    engine.step()
    while engine.num_preempted() == 0:
        engine.step()
    assert engine.requests["cheap"].num_preemptions == 1
    assert engine.requests["dear"].num_preemptions == 0
    engine.run()
    engine.check_outputs()


def test_a_hundred_thousand_waiting_cost_nothing() -> None:
    """Counted, not timed: a step looks at a bounded number of those that wait."""
    engine = full_pool("lookahead")
    looked_at = 0

    waiting = engine.scheduler._state.waiting
    original = type(waiting).__iter__
    for index in range(2000):
        engine.scheduler.add(f"x{index}", [5] * 20, params(1))

    def counting(self: object) -> object:
        nonlocal looked_at
        for request in original(self):
            looked_at += 1
            yield request

    type(waiting).__iter__ = counting
    try:
        plan = engine.scheduler.schedule()
    finally:
        type(waiting).__iter__ = original
    assert plan.num_seqs >= 1
    assert looked_at < 100
