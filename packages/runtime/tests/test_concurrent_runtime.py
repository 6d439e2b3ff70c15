"""Concurrent equals alone: requests that come and go while others run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from engine_harness import Harness, demo_causal_lm

from pagetide_runtime import SamplingParams

pytestmark = pytest.mark.model


@pytest.mark.parametrize("seed", [1, 2])
def test_requests_that_arrive_at_any_time_get_what_they_get_alone(
    demo_model: Path, answers: list[dict[str, Any]], seed: int
) -> None:
    rng = random.Random(seed)
    harness = Harness(
        demo_causal_lm(demo_model, 4),
        num_blocks=90,
        max_num_seqs=7,
        max_num_batched_tokens=rng.choice([12, 32]),
        max_plans_in_flight=seed % 2,
    )
    engine = harness.engine
    waiting = list(enumerate(answers[:14]))
    rng.shuffle(waiting)
    lengths = {index: rng.randint(1, 32) for index, _ in waiting}
    ended: dict[int, tuple[int, ...]] = {}
    while waiting or engine.has_unfinished:
        for _ in range(rng.choice([0, 0, 1, 3])):
            if waiting:
                index, answer = waiting.pop()
                params = SamplingParams(temperature=0.0, max_tokens=lengths[index], ignore_eos=True)
                engine.add_request(
                    str(index), answer["prompt"], params, priority=rng.choice([0, 1])
                )
        if engine.has_unfinished:
            for output in engine.step().finished:
                ended[int(output.request_id)] = output.token_ids
        harness.engine.scheduler.verify()
    for index, answer in enumerate(answers[:14]):
        assert ended[index] == tuple(answer["tokens"][: lengths[index]])
    harness.check_idle()
