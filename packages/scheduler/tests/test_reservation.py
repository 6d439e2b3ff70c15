"""The policy `reserve`: what it promises, whom it lets past, and that promises are kept."""

from __future__ import annotations

import random

import pytest
from harness import Engine, Load

from pagetide_scheduler import FinishReason, RequestState, SamplingParams
from pagetide_scheduler.reservation import Reservation, Reserve


def params(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)


def policy(engine: Engine) -> Reserve:
    found = engine.scheduler._policy
    assert isinstance(found, Reserve)
    return found


def waiting_giant(overlap: int = 0, **config: int) -> Engine:
    """Ten blocks; `holder` has five and ends after 9 tokens; `giant` needs seven."""
    engine = Engine(
        num_blocks=10,
        block_size=4,
        admission="reserve",
        overlap=overlap,
        max_overlap=overlap,
        **config,
    )
    engine.add("holder", [1] * 16, params(4))
    engine.step()
    engine.add("giant", [2] * 26, params(2))
    return engine


def reservation(engine: Engine) -> Reservation:
    found = policy(engine).reservation
    assert found is not None
    return found


def test_the_promise_is_the_step_at_which_the_blocks_are_certain() -> None:
    engine = waiting_giant()
    engine.schedule()
    promise = reservation(engine)
    # holder has read 1 of 4 tokens after 1 update; the other three are read by update 4.
    assert (promise.request.request_id, promise.due) == ("giant", 4)
    assert promise.num_blocks == 7
    engine.run()
    assert policy(engine).num_reissued == 0
    engine.check_outputs()


@pytest.mark.parametrize(
    ("max_tokens", "gets_past"),
    [(1, True), (2, True), (3, False), (30, False)],
)
def test_who_ends_before_the_promise_may_go_first(max_tokens: int, gets_past: bool) -> None:
    """The certain end counts one step more than it takes alone; two steps are three at most."""
    engine = waiting_giant()
    engine.add("later", [3] * 12, params(max_tokens))  # 3..4 blocks: more than giant leaves over
    engine.schedule()
    assert (engine.requests["later"].state is RequestState.RUNNING) == gets_past
    engine.run()
    engine.check_outputs()


def test_who_needs_only_what_the_head_does_not_may_stay() -> None:
    engine = waiting_giant()
    engine.add("small", [3] * 3, params(9))  # 3 blocks at most: 10 - 7
    engine.add("too many", [4] * 3, params(2))  # 1 block more
    engine.schedule()
    assert engine.requests["small"].state is RequestState.RUNNING
    assert engine.requests["too many"].state is RequestState.RUNNING  # it ends before
    assert reservation(engine).backfills["small"].tokens_a_step is None
    assert reservation(engine).backfills["too many"].tokens_a_step is not None
    engine.run()
    assert policy(engine).num_reissued == 0
    engine.check_outputs()


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_backfill_gets_only_what_running_requests_leave(overlap: int) -> None:
    engine = Engine(
        num_blocks=10,
        block_size=4,
        admission="reserve",
        max_num_batched_tokens=4,
        overlap=overlap,
    )
    engine.keeps_plans = True
    engine.add("a", [1] * 2, params(14))
    engine.add("b", [2] * 2, params(14))
    engine.step()
    engine.step()
    engine.add("giant", [5] * 36, params(2))
    engine.add("later", [6] * 8, params(2))
    engine.run()
    engine.check_outputs()
    admitted = [plan for plan in engine.plans if "later" in plan.request_ids]
    for plan in admitted:
        others = [name for name in ("a", "b") if engine.requests[name].num_tokens]
        assert plan.num_tokens <= 4
        assert len(others) == 2


def test_a_higher_priority_makes_a_new_promise() -> None:
    engine = waiting_giant()
    engine.schedule()
    engine.add("urgent", [7] * 26, params(2), priority=1)
    engine.read()
    engine.schedule()
    assert reservation(engine).request.request_id == "urgent"
    assert policy(engine).num_reissued == 1
    engine.run()
    engine.check_outputs()


def test_a_preemption_makes_a_new_promise() -> None:
    engine = waiting_giant()
    engine.add("small", [3] * 3, params(9))
    engine.schedule()
    first = reservation(engine)
    engine.scheduler.preempt("small")
    engine.read()
    engine.schedule()
    assert policy(engine).reservation is not first
    assert policy(engine).num_reissued == 1
    engine.run()
    engine.check_outputs()


def test_an_abort_of_the_head_ends_the_promise() -> None:
    engine = waiting_giant()
    engine.schedule()
    engine.finish("giant", FinishReason.ABORT)
    assert policy(engine).reservation is None
    engine.run()
    engine.check_all_returned()


@pytest.mark.parametrize("overlap", [0, 1, 2])
def test_without_an_event_the_head_starts_no_later_than_promised(overlap: int) -> None:
    """The engine checks the promise after every step; here it must also have had some to check,
    and requests must have gone past them."""
    num_past = promised = 0
    for seed in range(30):
        draw = random.Random(seed)
        engine = Engine(
            num_blocks=24,
            block_size=4,
            admission="reserve",
            overlap=overlap,
            seed=seed,
            max_num_seqs=draw.choice([4, 12]),
            max_num_batched_tokens=draw.choice([8, 16, 64]),
            max_chunk_tokens=draw.choice([None, 5]),
        )
        load = Load(seed, 60)
        for index in range(30):
            prompt = load.prompt() if index % 4 == 0 else load.prompt()[:4]
            wishes = params(draw.randint(1, 20 if index % 4 == 0 else 5))
            engine.add(f"r{index}", prompt, wishes)
            if draw.random() < 0.6:
                engine.step()
            found = policy(engine).reservation
            num_past += len(found.backfills) if found is not None else 0
        engine.run()
        engine.check_outputs()
        promised += engine.num_promised_steps
    assert promised > 200
    assert num_past > 40
