"""The running set's batch and the head of the queue follow changes: compared with a new look."""

from __future__ import annotations

import random

import pytest

from pagetide_kvcache import BlockManager
from pagetide_scheduler import Request, SamplingParams, Scheduler, SchedulerConfig
from pagetide_scheduler.plan import Batch
from pagetide_scheduler.running import RunningSet
from pagetide_scheduler.waiting import WaitingQueue


def make_requests(count: int, draw: random.Random) -> list[Request]:
    """In order of arrival, with three priorities."""
    config = SchedulerConfig(max_model_len=64, priority_steps=1)
    scheduler = Scheduler(config, BlockManager(64, 4))
    wish = SamplingParams()
    return [
        scheduler.add(f"r{index}", [1], wish, priority=draw.choice([0, 0, 0, 5, -5]))
        for index in range(count)
    ]


@pytest.mark.parametrize("seed", range(20))
def test_the_batch_is_that_of_the_requests_that_run(seed: int) -> None:
    draw = random.Random(seed)
    outside = make_requests(60, draw)
    running, expected = RunningSet(), []
    for _ in range(600):
        kind = draw.random()
        if kind < 0.45 and outside:
            # Mostly the youngest comes, sometimes one that is older than others.
            request = outside.pop(0 if draw.random() < 0.8 else draw.randrange(len(outside)))
            request.row = draw.randrange(1000)
            running.add(request)
            expected.append(request)
        elif kind < 0.75 and expected:
            for _ in range(draw.choice([1, 1, 2, 12])):
                if expected:
                    request = expected.pop(draw.randrange(len(expected)))
                    running.remove(request)
                    outside.append(request)
        else:
            expected.sort(key=lambda request: request.order)
            batch = running.batch
            assert list(batch.requests) == list(running) == expected
            assert list(batch.request_ids) == [request.request_id for request in expected]
            assert batch.rows.tolist() == [request.row for request in expected]
            assert running.batch is batch


def test_a_batch_made_elsewhere_is_taken_only_if_it_is_all_of_them() -> None:
    config = SchedulerConfig(max_model_len=64)
    scheduler = Scheduler(config, BlockManager(64, 4))
    requests = [scheduler.add(f"r{index}", [1], SamplingParams()) for index in range(4)]
    running = RunningSet()
    for row, request in enumerate(requests):
        request.row = row
    running.add(requests[0])
    before = running.batch
    running.add(requests[1])
    running.add(requests[2])
    running.adopt(before, before + Batch.of((requests[1],)))  # one is missing
    running.adopt(Batch.of((requests[3],)), Batch.of(tuple(requests[1:3])))  # not what it held
    assert running.batch.requests == tuple(requests[:3])
    before = running.batch
    running.add(requests[3])
    after = before + Batch.of((requests[3],))
    running.adopt(before, after)
    assert running.batch is after
    running.remove(requests[1])
    assert running.batch.requests == (requests[0], *requests[2:])


def test_the_next_step_has_the_batch_of_the_step_that_admitted() -> None:
    scheduler = Scheduler(SchedulerConfig(max_model_len=64), BlockManager(64, 4))
    for name in ("a", "b", "c"):
        scheduler.add(name, [1, 2, 3], SamplingParams())
        plan = scheduler.schedule()
        assert scheduler._state.running.batch is plan.sequences


@pytest.mark.parametrize("seed", range(20))
def test_the_head_is_the_first_of_the_queue(seed: int) -> None:
    draw = random.Random(seed)
    new = make_requests(80, draw)
    waiting, inside, returning = WaitingQueue(), [], []
    while new or inside:
        kind = draw.random()
        if kind < 0.4 and new:
            inside.append(new.pop(0))
            waiting.add(inside[-1])
        elif kind < 0.7 and inside:
            request = draw.choice([inside[0], draw.choice(inside), waiting.head])
            inside.remove(request)
            waiting.remove(request)
            if request in returning:
                returning.remove(request)
            elif draw.random() < 0.3:
                waiting.add_returning(request)
                inside.append(request)
                returning.append(request)
        elif inside:
            first = min(returning or inside, key=lambda request: request.order)
            assert waiting.head is first is waiting.at(0) is next(iter(waiting))
            assert len(waiting) == len(inside)
    assert waiting.head is None
