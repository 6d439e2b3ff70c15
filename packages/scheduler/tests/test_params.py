"""Wishes and limits are validated when made, and the message names what is wrong."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from pagetide_kvcache import BlockManager
from pagetide_scheduler import (
    FinishReason,
    RequestRefusedError,
    RequestTooLargeError,
    SampleError,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    SchedulerError,
    StepResult,
)
from pagetide_scheduler.arrival import make_key


@pytest.mark.parametrize(
    "temperature", [-1, -1e-9, math.nan, math.inf, -math.inf, 1e39, "hot", None, True]
)
def test_d1_bad_temperature(temperature: object) -> None:
    with pytest.raises(ValueError, match="temperature"):
        SamplingParams(temperature=temperature)


@pytest.mark.parametrize("temperature", [0, 1e-12, 1e-6, 1e-5, 1e-4, 1e-3, np.float32(0.5)])
def test_d1_good_temperature(temperature: float) -> None:
    assert SamplingParams(temperature=temperature).temperature == float(temperature)


@pytest.mark.parametrize("top_k", [0.4, 1.0, -2, 2**31, "3", None, True])
def test_d3_bad_top_k(top_k: object) -> None:
    with pytest.raises(ValueError, match="top_k"):
        SamplingParams(top_k=top_k)


@pytest.mark.parametrize(
    ("top_k", "kept"), [(-1, 0), (0, 0), (7, 7), (10**9, 10**9), (np.int64(3), 3)]
)
def test_d3_good_top_k(top_k: int, kept: int) -> None:
    assert SamplingParams(top_k=top_k).top_k == kept


@pytest.mark.parametrize("top_p", [0, -0.1, 1.0001, math.nan, math.inf])
def test_bad_top_p(top_p: float) -> None:
    with pytest.raises(ValueError, match="top_p"):
        SamplingParams(top_p=top_p)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", 1.5),
        ("min_tokens", -1),
        ("seed", 0.5),
        ("stop", ("",)),
        ("stop", (3,)),
        ("stop_token_ids", (-1,)),
        ("stop_token_ids", (0.5,)),
        ("stop_token_ids", (2**31,)),
    ],
)
def test_other_bad_wishes(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{name: value})


def test_wishes_are_normalised() -> None:
    params = SamplingParams(stop="\n", stop_token_ids=[3, 4], max_tokens=None, top_p=1e-4)
    assert params.stop == ("\n",)
    assert params.stop_token_ids == (3, 4)
    with pytest.raises(ValueError, match="min_tokens"):
        SamplingParams(min_tokens=3, max_tokens=2)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_model_len", 1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 2.5),
        ("max_chunk_tokens", 0),
        ("vocab_size", -1),
        ("watermark", 0.02),
        ("watermark", math.nan),
        ("priority_steps", 0),
    ],
)
def test_bad_config(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        SchedulerConfig(**{"max_model_len": 100, name: value})


def make_scheduler(num_blocks: int = 10, max_model_len: int = 100, **config: int) -> Scheduler:
    return Scheduler(
        SchedulerConfig(max_model_len=max_model_len, **config), BlockManager(num_blocks, 4)
    )


@pytest.mark.parametrize(
    ("prompt", "message"),
    [([], "empty"), ([1, 50], "50"), ([-1], "-1"), ([1, 2.5], "whole"), ([2**31], "2147483648")],
)
def test_prompts_that_are_refused(prompt: list[int], message: str) -> None:
    scheduler = make_scheduler(vocab_size=50)
    with pytest.raises(RequestRefusedError, match=message):
        scheduler.add("r", prompt, SamplingParams())
    assert not scheduler.has_unfinished


def test_prompts_of_any_container() -> None:
    scheduler = make_scheduler()
    for index, prompt in enumerate([[1, 2], (1, 2), np.array([1, 2]), range(1, 3)]):
        request = scheduler.add(f"r{index}", prompt, SamplingParams())
        assert list(request.token_ids) == [1, 2]


def test_priority_is_a_whole_number() -> None:
    scheduler = make_scheduler()
    with pytest.raises(ValueError, match="priority"):
        scheduler.add("r", [1], SamplingParams(), priority=0.5)
    assert not scheduler.has_unfinished


def test_an_id_is_free_again_when_its_request_ends() -> None:
    scheduler = make_scheduler()
    scheduler.add("r", [1], SamplingParams())
    with pytest.raises(RequestRefusedError, match="'r'"):
        scheduler.add("r", [1], SamplingParams())
    scheduler.finish("r", FinishReason.ABORT)
    scheduler.add("r", [1], SamplingParams())


@pytest.mark.parametrize(
    ("num_blocks", "max_model_len", "longest", "resource"),
    [(10, 100, 39, "pool"), (100, 30, 29, "context"), (1, 4, 3, "context"), (1, 9, 3, "pool")],
)
def test_c1_what_can_never_fit_is_refused_with_the_numbers(
    num_blocks: int, max_model_len: int, longest: int, resource: str
) -> None:
    scheduler = make_scheduler(num_blocks, max_model_len)
    scheduler.add("fits", [1] * longest, SamplingParams())
    with pytest.raises(RequestTooLargeError) as caught:
        scheduler.add("giant", [1] * (longest + 1), SamplingParams())
    error = caught.value
    assert isinstance(error, (SchedulerError, ValueError))
    assert error.request_id == "giant"
    assert error.resource == resource
    assert error.num_tokens == longest + 2
    assert error.max_tokens == longest + 1
    assert str(error.num_tokens) in str(error)
    assert str(error.max_tokens) in str(error)


@pytest.mark.parametrize(
    ("max_tokens", "max_model_len", "num_tokens", "reason"),
    [
        (5, 100, 13, FinishReason.LENGTH),
        (None, 20, 20, FinishReason.CONTEXT),
        (None, 100, 41, FinishReason.POOL),
        (12, 20, 20, FinishReason.LENGTH),  # of equal limits the user's own names the reason
        (500, 41, 41, FinishReason.CONTEXT),
    ],
)
def test_the_limit_is_the_least_of_three(
    max_tokens: int | None, max_model_len: int, num_tokens: int, reason: FinishReason
) -> None:
    scheduler = make_scheduler(10, max_model_len)
    request = scheduler.add("r", [1] * 8, SamplingParams(max_tokens=max_tokens))
    assert (request.limit.num_tokens, request.limit.reason) == (num_tokens, reason)


def test_a_seed_gives_the_key_and_nearby_seeds_do_not_look_alike() -> None:
    scheduler = make_scheduler()
    keys = [
        scheduler.add(f"r{i}", [1], SamplingParams(seed=seed)).key
        for i, seed in enumerate([7, 7, 8, None, None, -3, 2**70])
    ]
    assert keys[0] == keys[1]
    assert len(set(keys)) == 6
    assert all(0 <= key < 2**64 for key in keys)
    assert bin(keys[0] ^ keys[2]).count("1") > 16
    # The generator's published first output for state 0.
    assert make_key(0, random.Random()) == 0xE220A8397B1DCDAF


def test_result_columns_must_agree() -> None:
    with pytest.raises(ValueError, match="token_ids"):
        StepResult(np.zeros((2, 1), np.int32), np.ones(3, np.int32))
    with pytest.raises(ValueError, match="logprobs"):
        StepResult(np.zeros((2, 1), np.int32), np.ones(2, np.int32), np.zeros((3, 1), np.float32))
    with pytest.raises(ValueError, match="sample 2"):
        StepResult.of([1, 2], errors=(SampleError(2, "no such sample"),))
