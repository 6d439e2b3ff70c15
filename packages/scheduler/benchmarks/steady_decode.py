"""Cost of `schedule` + `update` in steady decode, by number of requests and size of the pool.

    python benchmarks/steady_decode.py [--steps 512] [--repeats 3] [--cpu-time]

One plan ahead, block size 16, prefix cache on, prompts of different lengths so that the requests
meet their block boundaries in different steps. No model: results are random tokens.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable

import numpy as np

from pagetide_kvcache import BlockManager
from pagetide_scheduler import SamplingParams, Scheduler, SchedulerConfig, StepResult

BLOCK_SIZE = 16


def measure(
    num_running: int,
    num_waiting: int,
    num_steps: int,
    total_blocks: int,
    clock: Callable[[], float] = time.perf_counter,
) -> np.ndarray:
    """Microseconds of each of `num_steps` steps."""
    blocks = BlockManager(total_blocks, BLOCK_SIZE)
    config = SchedulerConfig(
        max_model_len=1 << 20, max_num_seqs=num_running, max_num_batched_tokens=1 << 16
    )
    scheduler = Scheduler(config, blocks, eos_token_ids=(2,))
    draw = random.Random(1)
    params = SamplingParams(max_tokens=None, stop_token_ids=(3, 5))
    for index in range(num_running):
        prompt = [draw.randrange(10, 50_000) for _ in range(16 + index % 16)]
        scheduler.add(f"r{index}", prompt, params)
    for index in range(num_waiting):
        scheduler.add(f"w{index}", prompt, params)
    noise = np.random.default_rng(0)
    tokens = noise.integers(10, 50_000, (64, num_running), np.int32)
    results = [StepResult.of(row) for row in tokens]
    plan = scheduler.schedule()
    while scheduler.num_running < num_running:
        scheduler.update(plan, StepResult.of(tokens[0][: plan.num_samples]))
        plan = scheduler.schedule()
    gc.collect()
    gc.freeze()
    times = np.empty(num_steps)
    for step in range(num_steps):
        result = results[step % 64]
        start = clock()
        ahead = scheduler.schedule()
        scheduler.update(plan, result)
        times[step] = clock() - start
        plan = ahead
    gc.unfreeze()
    return times * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=512, help="a multiple of the block size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cpu-time", action="store_true", help="this thread's CPU time: for a machine others share"
    )
    options = parser.parse_args()
    clock = time.thread_time if options.cpu_time else time.perf_counter
    print("running  waiting  blocks      median    mean     p99   us a step (best of repeats)")
    cases = [(n, 0, 1 << 17) for n in (1, 16, 64, 256, 1024)]
    cases += [(256, 1_000, 1 << 17), (256, 100_000, 1 << 17), (256, 0, 1 << 22)]
    for num_running, num_waiting, total_blocks in cases:
        runs = [
            measure(num_running, num_waiting, options.steps, total_blocks, clock)
            for _ in range(options.repeats)
        ]
        best = min(runs, key=np.mean)
        print(
            f"{num_running:7d}  {num_waiting:7d}  {total_blocks:8d}  "
            f"{np.median(best):8.1f} {best.mean():8.1f} {np.percentile(best, 99):8.1f}"
        )


if __name__ == "__main__":
    main()
