"""Plans in flight on a real thread that delays its results at random."""

from __future__ import annotations

import queue
import random
import threading
import time
from collections import deque
from concurrent.futures import Future

import pytest
from harness import EOS, VOCAB_SIZE, Load
from toy_model import ToyModel, generate_alone

from pagetide_kvcache import BlockManager
from pagetide_scheduler import (
    FinishReason,
    RequestOutput,
    Scheduler,
    SchedulerConfig,
    StepPlan,
    StepResult,
)


class ThreadedRunner:
    """`submit` returns at once; a thread runs the plans in order, slowly now and then."""

    def __init__(self, model: ToyModel, seed: int) -> None:
        self._model = model
        self._random = random.Random(seed)
        self._queue: queue.Queue[tuple[StepPlan, list[int], Future[StepResult]] | None] = (
            queue.Queue()
        )
        self._thread = threading.Thread(target=self._work)
        self._thread.start()

    def submit(self, plan: StepPlan, free_blocks: list[int]) -> Future[StepResult]:
        handle: Future[StepResult] = Future()
        self._queue.put((plan, free_blocks, handle))
        return handle

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        for plan, free_blocks, handle in iter(self._queue.get, None):
            if self._random.random() < 0.3:
                time.sleep(self._random.random() * 0.002)
            try:
                handle.set_result(self._model.run(plan, free_blocks=free_blocks))
            except BaseException as error:  # the reader gets it, and the test with it
                handle.set_exception(error)


def generate(
    overlap: int, seed: int, num_blocks: int = 24, num_host_blocks: int = 0
) -> dict[str, RequestOutput]:
    """The outputs of 40 requests in a small pool, with a few aborted on the way."""
    blocks = BlockManager(num_blocks, 4)
    config = SchedulerConfig(
        max_model_len=200, max_num_seqs=8, max_num_batched_tokens=24, swap_cost=1.0
    )
    host = BlockManager(num_host_blocks, 4) if num_host_blocks else None
    scheduler = Scheduler(config, blocks, host_block_manager=host, eos_token_ids=EOS)
    runner = ThreadedRunner(
        ToyModel(
            num_blocks=num_blocks,
            block_size=4,
            num_rows=8,
            vocab_size=VOCAB_SIZE,
            max_blocks=num_blocks + 1,
            num_host_blocks=num_host_blocks,
            eos_token_ids=EOS,
        ),
        seed,
    )
    load = Load(seed, 30)
    requests = {}
    for index in range(40):
        params = load.params(20)
        while params.seed is None:
            params = load.params(20)
        requests[f"r{index}"] = scheduler.add(f"r{index}", load.prompt(), params)
    outputs: dict[str, RequestOutput] = {}
    pending: deque[tuple[StepPlan, Future[StepResult]]] = deque()
    try:
        while scheduler.has_unfinished:
            while len(pending) <= overlap and not (plan := scheduler.schedule()).is_empty:
                pending.append((plan, runner.submit(plan, list(blocks.free_blocks))))
            plan, handle = pending.popleft()
            output = scheduler.update(plan, handle.result(timeout=30))
            scheduler.verify()
            outputs.update({o.request_id: o for o in output.finished})
            if plan.step_id % 17 == 0:
                name = f"r{plan.step_id % 40}"
                aborted = scheduler.finish(name, FinishReason.ABORT)
                if aborted is not None:
                    outputs[name] = aborted
    finally:
        runner.close()
    for name, request in requests.items():
        expected = generate_alone(
            request.tokens[: request.num_prompt_tokens],
            request.params,
            request.key,
            vocab_size=VOCAB_SIZE,
            max_new_tokens=request.limit.num_tokens - request.num_prompt_tokens,
            eos_token_ids=EOS,
        )
        output = outputs[name]
        if output.finish_reason is FinishReason.ABORT:
            assert output.token_ids == expected[: len(output.token_ids)]
        else:
            assert output.token_ids == expected
    assert blocks.num_available_blocks == num_blocks
    return outputs


@pytest.mark.parametrize("host", [0, 40])
@pytest.mark.parametrize("seed", range(4))
def test_every_output_equals_the_run_without_overlap(seed: int, host: int) -> None:
    runs = [generate(overlap, seed, num_host_blocks=host) for overlap in (0, 1, 2)]
    assert any(output.num_preemptions for output in runs[2].values())
    for name, output in runs[0].items():
        for other in runs[1:]:
            if FinishReason.ABORT not in (output.finish_reason, other[name].finish_reason):
                assert other[name].token_ids == output.token_ids
                assert other[name].finish_reason is output.finish_reason
