"""The real scheduler on a trace, with a formula in the place of the model and its clock."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from pagetide_kvcache import BlockManager
from pagetide_scheduler.config import SchedulerConfig
from pagetide_scheduler.errors import RequestTooLargeError
from pagetide_scheduler.params import SamplingParams
from pagetide_scheduler.plan import RequestOutput, StepPlan
from pagetide_scheduler.scheduler import Scheduler
from pagetide_scheduler.step_result import StepResult
from pagetide_scheduler.trace import TraceRequest

EOS = 0


@dataclass(frozen=True, slots=True)
class StepTime:
    """Seconds a step takes: a sum over what it does.

    Attributes:
        fixed: Whatever the step does; reading the weights, mostly.
        token: A token computed.
        key: A key that some token of the step attends to.
        copy: A block copied.
    """

    fixed: float = 5e-3
    token: float = 2e-5
    key: float = 2e-8
    copy: float = 2e-4

    def of(self, plan: StepPlan) -> float:
        """Seconds for `plan`."""
        return (
            self.fixed
            + self.token * plan.num_tokens
            + self.key * float(plan.seq_lens.sum())
            + self.copy * len(plan.copies)
        )


@dataclass(slots=True)
class Simulation:
    """What a run over a trace measured.

    Attributes:
        policy: Name of the run.
        seconds: Virtual time from the first arrival to the last end.
        num_requests: Requests that ran.
        num_refused: Requests that can never fit.
        num_steps: Steps.
        num_output_tokens: Tokens generated.
        num_prompt_tokens: Tokens of all prompts.
        num_cached_tokens: Those that were found in the prefix cache.
        num_computed_tokens: Tokens computed, again and again included.
        num_preemptions: Times a request gave up its blocks.
        queue_seconds: A request each, in order of ending. The same for the next two.
        first_token_seconds: From arrival to first token.
        between_tokens_seconds: From token to token, all of them.
        times: End of each step, for the next two.
        used_blocks: Share of the pool that is held, a step.
        waiting: Requests that wait, a step.
        empty_slots: Mean share of the held blocks' slots that hold nothing.
    """

    policy: str
    seconds: float = 0.0
    num_requests: int = 0
    num_refused: int = 0
    num_steps: int = 0
    num_output_tokens: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_computed_tokens: int = 0
    num_preemptions: int = 0
    queue_seconds: list[float] = field(default_factory=list)
    first_token_seconds: list[float] = field(default_factory=list)
    between_tokens_seconds: list[float] = field(default_factory=list)
    times: list[float] = field(default_factory=list)
    used_blocks: list[float] = field(default_factory=list)
    waiting: list[int] = field(default_factory=list)
    empty_slots: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_output_tokens / self.seconds if self.seconds else 0.0

    @property
    def cache_hits(self) -> float:
        """Share of the prompts' tokens that came from the prefix cache."""
        return self.num_cached_tokens / max(1, self.num_prompt_tokens)

    @property
    def recomputed(self) -> float:
        """Share of the computed tokens that had been computed before and were lost."""
        # A request computes its prompt and all but its last output token, less what was cached.
        needed = self.num_prompt_tokens - self.num_cached_tokens
        needed += self.num_output_tokens - self.num_requests
        return max(0.0, 1 - needed / max(1, self.num_computed_tokens))


def simulate(
    trace: Sequence[TraceRequest],
    config: SchedulerConfig,
    *,
    total_blocks: int,
    block_size: int = 16,
    host_blocks: int = 0,
    step_time: StepTime | None = None,
    overlap: int = 1,
    name: str = "",
) -> Simulation:
    """Drives a `Scheduler` over `trace` in virtual time.

    Args:
        trace: Requests by arrival.
        config: The scheduler's.
        total_blocks: Blocks of the pool.
        block_size: Tokens a block.
        host_blocks: Blocks of the host pool, 0 for none.
        step_time: The device's clock.
        overlap: Plans in flight while another is made.
        name: Of the run; its policy if empty.
    """
    clock = step_time if step_time is not None else StepTime()
    return _Run(
        trace,
        config,
        BlockManager(total_blocks, block_size),
        BlockManager(host_blocks, block_size) if host_blocks else None,
        clock,
        overlap,
        Simulation(name or config.admission),
    ).run()


class _Run:
    def __init__(
        self,
        trace: Sequence[TraceRequest],
        config: SchedulerConfig,
        blocks: BlockManager,
        host: BlockManager | None,
        clock: StepTime,
        overlap: int,
        result: Simulation,
    ) -> None:
        self._arrivals = deque(enumerate(trace))
        self._trace = trace
        self._blocks = blocks
        self._clock = clock
        self._overlap = overlap
        self._result = result
        self._now = 0.0
        self._device_free = 0.0
        self._pending: deque[tuple[StepPlan, float]] = deque()
        self._ends: dict[str, int] = {}
        self._last_token: dict[str, float] = {}
        self._empty_shares: list[float] = []
        self._scheduler = Scheduler(
            config,
            blocks,
            host_block_manager=host,
            eos_token_ids=(EOS,),
            clock=lambda: self._now,
            seed=0,
        )

    def run(self) -> Simulation:
        result = self._result
        while self._arrivals or self._pending or self._scheduler.has_unfinished:
            self._let_arrive()
            while len(self._pending) <= self._overlap and self._submit():
                pass
            if self._pending:
                self._read()
            elif self._arrivals:
                self._now = max(self._now, self._arrivals[0][1].arrival)
        result.seconds = self._now - self._trace[0].arrival
        result.empty_slots = float(np.mean(self._empty_shares)) if self._empty_shares else 0.0
        return result

    def _let_arrive(self) -> None:
        while self._arrivals and self._arrivals[0][1].arrival <= self._now:
            index, request = self._arrivals.popleft()
            name = f"r{index}"
            prompt = request.prompt(index)
            params = SamplingParams(max_tokens=request.max_tokens)
            try:
                self._scheduler.add(name, prompt, params, priority=request.priority)
            except RequestTooLargeError:
                self._result.num_refused += 1
                continue
            self._ends[name] = request.prompt_tokens + request.output_tokens

    def _submit(self) -> bool:
        plan = self._scheduler.schedule()
        if plan.is_empty:
            return False
        start = max(self._now, self._device_free)
        self._device_free = start + self._clock.of(plan)
        self._pending.append((plan, self._device_free))
        self._result.num_steps += 1
        self._result.num_computed_tokens += plan.num_tokens
        return True

    def _read(self) -> None:
        plan, end = self._pending.popleft()
        result = self._result
        self._now = max(self._now, end)
        ends = [self._ends[name] for name in plan.samples.request_ids]
        tokens = np.where(plan.sample_positions + 1 >= np.array(ends, np.int32), EOS, 1)
        output = self._scheduler.update(plan, StepResult.of(tokens))
        for name in output.request_ids:
            if name in self._last_token:
                result.between_tokens_seconds.append(self._now - self._last_token[name])
            self._last_token[name] = self._now
        for ended in output.finished:
            self._note_end(ended)
        blocks = self._blocks
        held = blocks.total_blocks - blocks.num_available_blocks
        result.times.append(self._now)
        result.used_blocks.append(held / blocks.total_blocks)
        result.waiting.append(self._scheduler.num_waiting)
        if plan.num_seqs:
            last = plan.seq_lens % blocks.block_size
            empty = int(np.where(last, blocks.block_size - last, 0).sum())
            slots = int((-(-plan.seq_lens // blocks.block_size)).sum()) * blocks.block_size
            self._empty_shares.append(empty / slots)

    def _note_end(self, ended: RequestOutput) -> None:
        result = self._result
        first = ended.queue_seconds + ended.prefill_seconds
        result.num_requests += 1
        result.num_output_tokens += ended.num_generated_tokens
        result.num_prompt_tokens += ended.num_prompt_tokens
        result.num_cached_tokens += ended.num_cached_tokens
        result.num_preemptions += ended.num_preemptions
        result.queue_seconds.append(ended.queue_seconds)
        result.first_token_seconds.append(first)
