"""Hypothesis drives the scheduler into corners and shrinks what it finds."""

from __future__ import annotations

from harness import VOCAB_SIZE, Engine
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from pagetide_scheduler import (
    FinishReason,
    Preemption,
    RequestRefusedError,
    RequestState,
    SamplingParams,
    StepPlan,
)

token_ids = st.integers(1, 3)  # few, so that prompts share prefixes


class SchedulerMachine(RuleBasedStateMachine):
    """Requests come, steps are planned ahead and read, requests are aborted, preempted, failed."""

    @initialize(
        num_blocks=st.integers(2, 10),
        block_size=st.sampled_from([1, 2, 3, 4]),
        max_num_seqs=st.integers(1, 4),
        budget=st.integers(1, 9),
        chunk=st.one_of(st.none(), st.integers(1, 4)),
        overlap=st.integers(0, 2),
        prefix_cache=st.booleans(),
        seed=st.integers(0, 1000),
        admission=st.sampled_from(["fcfs", "lookahead", "reserve"]),
        host_blocks=st.sampled_from([0, 2, 20]),
        preemption=st.sampled_from(["auto", "recompute", "swap"]),
    )
    def start(
        self,
        num_blocks: int,
        block_size: int,
        max_num_seqs: int,
        budget: int,
        chunk: int | None,
        overlap: int,
        prefix_cache: bool,
        seed: int,
        admission: str,
        host_blocks: int,
        preemption: str,
    ) -> None:
        self.fails_next = False
        self.engine = Engine(
            num_blocks=num_blocks,
            block_size=block_size,
            overlap=overlap,
            seed=seed,
            prefix_cache=prefix_cache,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            max_chunk_tokens=chunk,
            admission=admission,
            num_host_blocks=host_blocks,
            preemption=preemption,
            max_skips=2,
            lookahead=2,
            fails=self.fails,
        )
        self.count = 0

    def fails(self, plan: StepPlan) -> bool:
        fails, self.fails_next = self.fails_next, False
        return fails

    @rule(
        prompt=st.lists(token_ids, min_size=1, max_size=14),
        max_tokens=st.integers(1, 9),
        min_tokens=st.integers(0, 2),
        stop=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=8),
        priority=st.integers(-1, 1),
        prompt_logprobs=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        max_tokens: int,
        min_tokens: int,
        stop: list[int],
        priority: int,
        prompt_logprobs: bool,
    ) -> None:
        self.count += 1
        params = SamplingParams(
            max_tokens=max_tokens,
            min_tokens=min(min_tokens, max_tokens),
            stop_token_ids=tuple(stop),
            seed=self.count,
            prompt_logprobs=prompt_logprobs,
        )
        try:
            self.engine.add(f"r{self.count}", prompt, params, priority=priority)
        except RequestRefusedError:
            pool = self.engine.blocks.total_blocks * self.engine.blocks.block_size
            assert len(prompt) + 1 > pool

    @rule(prompt=st.lists(token_ids, min_size=1, max_size=9), count=st.integers(2, 3))
    def add_samples(self, prompt: list[int], count: int) -> None:
        self.count += 1
        names = [f"r{self.count}.{index}" for index in range(count)]
        wishes = [SamplingParams(max_tokens=4 + index, seed=index) for index in range(count)]
        try:
            self.engine.add_samples(names, prompt, wishes)
        except RequestRefusedError:
            assert not set(names) & set(self.engine.requests)

    @precondition(lambda self: len(self.engine.pending) <= self.engine.overlap)
    @rule()
    def plan(self) -> None:
        self.engine.schedule()

    @precondition(lambda self: self.engine.pending)
    @rule()
    def read(self) -> None:
        self.engine.read()

    @rule()
    def step(self) -> None:
        self.engine.step()

    @rule()
    def fail_the_next_step(self) -> None:
        self.fails_next = True

    @precondition(lambda self: self.engine.requests)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.engine.requests)))
        was_there = self.engine.requests[name].state is not RequestState.FINISHED
        output = self.engine.finish(name, FinishReason.ABORT)
        assert (output is not None) == was_there

    @rule(data=st.data(), way=st.sampled_from([None, *Preemption]))
    def preempt(self, data: st.DataObject, way: Preemption | None) -> None:
        running = [r for r in self.engine.requests.values() if r.state is RequestState.RUNNING]
        younger = sorted(running, key=lambda r: r.order)[1:]
        if younger:
            name = data.draw(st.sampled_from(younger)).request_id
            self.engine.scheduler.preempt(name, way)
            self.engine.scheduler.verify()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.fails_next = False
            self.engine.run(2000)
            self.engine.check_outputs()
            self.engine.check_all_returned()


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=250,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
