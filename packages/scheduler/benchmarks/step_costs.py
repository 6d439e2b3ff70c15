"""What a step costs: by requests running, waiting and admitted, and by the size of the pool.

    python benchmarks/step_costs.py [--steps 512] [--repeats 3] [--cpu-time]

`schedule` + `update`, one plan ahead, block size 16, prefix cache on, random tokens for results.
Prompts have different lengths, so that requests meet their block boundaries in different steps.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
from collections.abc import Callable

import numpy as np

from pagetide_kvcache import BlockManager
from pagetide_scheduler import FinishReason, SamplingParams, Scheduler, SchedulerConfig, StepResult

BLOCK_SIZE = 16
FOREVER = SamplingParams(max_tokens=None, stop_token_ids=(3, 5))
Clock = Callable[[], float]


def make(
    num_running: int, total_blocks: int, *, rows: int | None = None, **options: object
) -> tuple[Scheduler, random.Random]:
    """A scheduler with requests to run."""
    config = SchedulerConfig(
        max_model_len=1 << 20,
        max_num_seqs=rows or num_running,
        max_num_batched_tokens=1 << 16,
        **options,
    )
    scheduler = Scheduler(config, BlockManager(total_blocks, BLOCK_SIZE), eos_token_ids=(2,))
    draw = random.Random(1)
    for index in range(num_running):
        scheduler.add(f"r{index}", make_prompt(draw, 16 + index % 16), FOREVER)
    return scheduler, draw


def make_prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(10, 50_000) for _ in range(length)]


def results(num_samples: int) -> list[StepResult]:
    noise = np.random.default_rng(0)
    return [StepResult.of(row) for row in noise.integers(10, 50_000, (64, num_samples), np.int32)]


def steady(scheduler: Scheduler, num_running: int, num_steps: int, clock: Clock) -> np.ndarray:
    """Microseconds of each of `num_steps` steps in steady decode."""
    made_up = results(num_running)
    plan = scheduler.schedule()
    while scheduler.num_running < num_running:
        scheduler.update(plan, StepResult.of(made_up[0].token_ids[: plan.num_samples]))
        plan = scheduler.schedule()
    gc.collect()
    gc.freeze()
    times = np.empty(num_steps)
    for step in range(num_steps):
        start = clock()
        ahead = scheduler.schedule()
        scheduler.update(plan, made_up[step % 64])
        times[step] = clock() - start
        plan = ahead
    gc.unfreeze()
    return times * 1e6


def steady_case(num_running: int, num_waiting: int, total_blocks: int, what: str) -> Scheduler:
    """Waiting requests find no row (`rows`), or a row but no blocks (`blocks`)."""
    rows = num_running + (64 if what == "blocks" else 0)
    scheduler, draw = make(num_running, total_blocks, rows=rows)
    prompt = make_prompt(draw, 100)
    if what == "blocks":
        prompt = make_prompt(draw, (total_blocks - 2 * num_running) * BLOCK_SIZE)
    for index in range(num_waiting):
        scheduler.add(f"w{index}", prompt, SamplingParams(max_tokens=1))
    return scheduler


def admissions(num_running: int, num_admitted: int, clock: Clock) -> float:
    """Microseconds more that a step takes for each request it admits and computes."""
    costs = []
    for _ in range(5):
        scheduler, draw = make(num_running, 1 << 17, rows=num_running + num_admitted)
        steady(scheduler, num_running, 64, clock)
        base = np.median(steady_again(scheduler, 32, clock))
        for index in range(num_admitted):
            scheduler.add(f"n{index}", make_prompt(draw, 128), FOREVER)
        start = clock()
        plan = scheduler.schedule()
        scheduler_time = clock() - start
        first = scheduler._state.plans[0]
        scheduler.update(first, StepResult.of(np.full(first.num_samples, 9)))
        start = clock()
        scheduler.update(plan, StepResult.of(np.full(plan.num_samples, 9)))
        costs.append(((scheduler_time + clock() - start) * 1e6 - base) / num_admitted)
    return float(np.median(costs))


def steady_again(scheduler: Scheduler, num_steps: int, clock: Clock) -> np.ndarray:
    """More steps of a scheduler that has one plan in flight."""
    times = np.empty(num_steps)
    plan = scheduler._state.plans[0]
    for step in range(num_steps):
        start = clock()
        ahead = scheduler.schedule()
        scheduler.update(plan, StepResult.of(np.full(plan.num_samples, 9)))
        times[step] = clock() - start
        plan = ahead
    return times * 1e6


def waiting_ratio(num_waiting: int, clock: Clock) -> float:
    """Cost of a step with requests waiting over that with none: two schedulers take turns.

    Measured one after the other, the two would also differ by what lies in the caches and by what
    else the machine does at the time.
    """
    schedulers = [steady_case(256, count, 1 << 17, "rows") for count in (0, num_waiting)]
    for scheduler in schedulers:
        steady(scheduler, 256, 64, clock)
    ratios = []
    for turn in range(60):
        first = turn % 2
        costs = {i: steady_again(schedulers[i], 64, clock).mean() for i in (first, 1 - first)}
        ratios.append(costs[1] / costs[0])
    return float(np.median(ratios))


def add_and_abort(num_waiting: int, clock: Clock) -> tuple[float, float]:
    """Microseconds to add a request of 100 tokens, and to abort one in the middle."""
    scheduler, draw = make(1, 1 << 14)
    prompt = make_prompt(draw, 100)
    for index in range(num_waiting):
        scheduler.add(f"w{index}", prompt, FOREVER)
    count = 1000
    start = clock()
    for index in range(count):
        scheduler.add(f"x{index}", prompt, FOREVER)
    middle = clock()
    for index in range(count):
        scheduler.finish(f"x{index}", FinishReason.ABORT)
    return (middle - start) / count * 1e6, (clock() - middle) / count * 1e6


def longest_pause(num_running: int) -> float:
    """Milliseconds (CPU time) of the longest garbage collection in 2,000 steps after warm-up."""
    pauses: list[float] = []
    started = 0.0

    def watch(phase: str, info: dict[str, int]) -> None:
        nonlocal started
        if phase == "start":
            started = time.thread_time()
        else:
            pauses.append(time.thread_time() - started)

    scheduler, _ = make(num_running, 1 << 18)
    steady(scheduler, num_running, 64, time.perf_counter)
    gc.collect()
    gc.freeze()
    gc.callbacks.append(watch)
    steady_again(scheduler, 2_000, time.perf_counter)
    gc.callbacks.remove(watch)
    gc.unfreeze()
    return max(pauses, default=0.0) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=512, help="a multiple of the block size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--cpu-time", action="store_true", help="this thread's CPU time: for a machine others share"
    )
    options = parser.parse_args()
    clock = time.thread_time if options.cpu_time else time.perf_counter

    print("schedule + update in steady decode, us a step (best of repeats)")
    print("running  waiting          blocks      median     mean      p99")
    cases = [(n, 0, 1 << 17, "rows") for n in (1, 16, 64, 256, 512, 1024)]
    cases += [(256, n, 1 << 17, "rows") for n in (1_000, 10_000, 100_000)]
    cases += [(256, n, 1 << 12, "blocks") for n in (1, 8, 1_000)]
    cases += [(256, 0, n, "rows") for n in (20_000, 1_000_000, 10_000_000)]
    for num_running, num_waiting, total_blocks, what in cases:
        runs = [
            steady(
                steady_case(num_running, num_waiting, total_blocks, what),
                num_running,
                options.steps if what == "rows" else 96,
                clock,
            )
            for _ in range(options.repeats)
        ]
        best = min(runs, key=np.mean)
        lack = f"no {what}" if num_waiting else ""
        print(
            f"{num_running:7d}  {num_waiting:7d} {lack:9s} {total_blocks:9d}  "
            f"{np.median(best):8.1f} {best.mean():8.1f} {np.percentile(best, 99):8.1f}"
        )
    print("\na step with requests waiting over one with none, 256 running, in turns")
    for num_waiting in (1_000, 100_000):
        print(f"{num_waiting:7d} waiting: {waiting_ratio(num_waiting, clock):8.3f}")
    print("\nus more a step for each request admitted and computed (128 tokens)")
    for num_running, num_admitted in ((0, 64), (256, 1), (256, 16), (256, 64)):
        cost = admissions(max(1, num_running), num_admitted, clock)
        print(f"{num_running:7d} running, {num_admitted:3d} admitted: {cost:8.1f}")
    print("\nus to add, and to abort, a waiting request of 100 tokens")
    for num_waiting in (0, 1_000, 100_000):
        costs = add_and_abort(num_waiting, clock)
        print(f"{num_waiting:7d} waiting: {costs[0]:8.1f} {costs[1]:8.1f}")
    print(f"\nlongest collector pause at 256 running: {longest_pause(256):.2f} ms")


if __name__ == "__main__":
    main()
