"""Problems with random content, their exact answers, and times of calls by replays of a graph."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable

import torch
from attention_peers import BLOCK_SIZE, Call, Case, Problem
from torch import Tensor

L2_BYTES = 64 << 20
DEVICE = "cuda"


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def release() -> None:
    if DEVICE == "cuda":
        torch.cuda.empty_cache()


def timed(calls: list[Call], repeats: int = 15) -> float:
    """Median microseconds of a call; the calls take turns.

    A replay holds every call at least once and lasts some 2 ms, so that its launch does not count.
    """
    for call in calls:
        call()
    synchronize()
    began = time.perf_counter()
    for call in calls:
        call()
    synchronize()
    seconds = (time.perf_counter() - began) / len(calls)
    rounds = max(1, min(math.ceil(20 / len(calls)), math.ceil(2e-3 / seconds / len(calls))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for call in calls:
                call()
    for _ in range(2):
        graph.replay()
    return _median(graph.replay, repeats) * 1e3 / (rounds * len(calls))


def _median(call: Callable[[], object], repeats: int) -> float:
    """Median milliseconds between two events around the call."""
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def measure_ceilings() -> dict[str, float]:
    """This card's copy bandwidth (TB/s, read and write counted) and float16 matmul TFLOP/s."""
    source, target = torch.empty(2, 4 << 30, dtype=torch.uint8, device=DEVICE)
    copy_ms = _median(lambda: target.copy_(source), 12)
    a, b = torch.randn(2, 8192, 8192, device=DEVICE, dtype=torch.float16)
    matmul_ms = _median(lambda: a @ b, 12)
    return {
        "copy_tb_s": 2 * source.numel() / copy_ms / 1e9,
        "matmul_tflop_s": 2 * 8192**3 / matmul_ms / 1e9,
    }


def make_problems(case: Case) -> list[Problem]:
    """As many caches as it takes to exceed L2 three times, at most 16; a warm case has one."""
    torch.manual_seed(0)
    blocks = math.ceil(case.context / BLOCK_SIZE)
    size = 2 * case.batch * blocks * BLOCK_SIZE * case.num_kv_heads * case.head_dim * 2
    lens = torch.full((case.batch,), case.context, dtype=torch.int32, device=DEVICE)
    if case.is_ragged:
        lens = torch.randint(
            case.context // 8, case.context + 1, (case.batch,), dtype=torch.int32, device=DEVICE
        )
        lens[0] = case.context
    starts = torch.arange(case.batch + 1, dtype=torch.int32, device=DEVICE) * case.query_len
    half = {"dtype": torch.float16, "device": DEVICE}
    cache = (case.batch * blocks, case.num_kv_heads, BLOCK_SIZE, case.head_dim)
    count = 1 if case.is_warm else max(1, min(16, math.ceil(3 * L2_BYTES / size)))
    return [
        Problem(
            q=torch.randn(case.batch * case.query_len, case.num_heads, case.head_dim, **half),
            k=torch.randn(cache, **half),
            v=torch.randn(cache, **half),
            table=torch.randperm(case.batch * blocks, device=DEVICE).int().view(case.batch, blocks),
            lens=lens,
            starts=starts,
        )
        for _ in range(count)
    ]


def exact(case: Case, problem: Problem, k: Tensor, v: Tensor) -> Tensor:
    """float32 [tokens of the first one or two sequences, num_heads, head_dim], by dense products.

    Args:
        case: sizes.
        problem: queries, tables and lengths.
        k: float32 or float16 [num_blocks, num_kv_heads, BLOCK_SIZE, head_dim].
        v: the same.
    """
    answers = []
    group = case.num_heads // case.num_kv_heads
    for i in range(min(case.batch, 1 if case.query_len > 2048 else 2)):
        length = int(problem.lens[i])
        keys, values = (
            x[problem.table[i].long()].transpose(0, 1).flatten(1, 2)[:, :length].float()
            for x in (k, v)
        )
        keys, values = (x.repeat_interleave(group, 0) for x in (keys, values))
        q = problem.q[i * case.query_len : (i + 1) * case.query_len].float().transpose(0, 1)
        positions = torch.arange(length - case.query_len, length, device=DEVICE)
        for first in range(0, case.query_len, 1024):
            rows = slice(first, first + 1024)
            scores = q[:, rows] @ keys.transpose(1, 2) * case.scale
            is_hidden = torch.arange(length, device=DEVICE)[None] > positions[rows, None]
            weights = scores.masked_fill(is_hidden, -torch.inf).softmax(-1)
            answers.append((weights @ values).transpose(0, 1))
    return torch.cat(answers)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """int8 cache and float32 scales [num_blocks, num_kv_heads, BLOCK_SIZE] of a float16 cache."""
    scales = x.abs().amax(-1).float() / 127
    return (x / scales.unsqueeze(-1)).round().clamp(-127, 127).to(torch.int8), scales
