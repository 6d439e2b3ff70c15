"""Thousands of random requests, each token-exact against the request alone."""

from __future__ import annotations

import pytest
from fuzzing import run_once

REQUESTS_A_RUN = 25
RUNS_A_TEST = 20


def run_many(first: int, count: int) -> None:
    exhausted = 0
    for seed in range(first, first + count):
        try:
            engine = run_once(seed, REQUESTS_A_RUN)
        except Exception as error:
            raise AssertionError(f"run_once({seed}) fails") from error
        exhausted += engine.was_exhausted
    assert 2 * exhausted >= count, "the pool ran out in fewer than half of the runs"


@pytest.mark.parametrize("chunk", range(20))
def test_10_000_random_requests(chunk: int) -> None:
    run_many(chunk * RUNS_A_TEST, RUNS_A_TEST)


@pytest.mark.long
@pytest.mark.parametrize("chunk", range(200))
def test_100_000_random_requests(chunk: int) -> None:
    run_many(100_000 + chunk * RUNS_A_TEST, RUNS_A_TEST)
