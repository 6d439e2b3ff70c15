"""Driving a scheduler and the toy model as an engine would, with every check on every step."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TextIO

import numpy as np
from toy_model import StepFailedError, ToyModel, generate_alone

from pagetide_kvcache import BlockManager, CopyDirection
from pagetide_scheduler import (
    FinishReason,
    Request,
    RequestOutput,
    RequestState,
    SamplingParams,
    Scheduler,
    SchedulerConfig,
    StepOutput,
    StepPlan,
    StepResult,
)
from pagetide_scheduler.journal import Recorder

VOCAB_SIZE = 61
EOS = (0,)


class Recorded:
    """A recorder that can also be looked into as the scheduler it records."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def __getattr__(self, name: str) -> object:
        owner = self._recorder if hasattr(Recorder, name) else self._recorder.scheduler
        return getattr(owner, name)


@dataclass
class Pending:
    """A submitted plan; the toy device runs it some time before its result is read."""

    plan: StepPlan
    free_blocks: list[int]
    free_host_blocks: list[int]
    fails: bool
    result: StepResult | None = None
    error: Exception | None = None


class Engine:
    """A scheduler, the toy model and a queue of plans between them.

    `overlap` plans may be in flight when the next is made. Plans run in order, each at a random
    moment between its submission and the reading of its result.
    """

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        overlap: int = 0,
        seed: int = 0,
        prefix_cache: bool = True,
        num_host_blocks: int = 0,
        eos: Sequence[int] = EOS,
        max_model_len: int = 10_000,
        fails: Callable[[StepPlan], bool] = lambda plan: False,
        journal: TextIO | None = None,
        **config: object,
    ) -> None:
        self.config = SchedulerConfig(max_model_len=max_model_len, vocab_size=VOCAB_SIZE, **config)
        self.now = 0.0
        common = {"eos_token_ids": eos, "clock": lambda: self.now, "seed": seed}
        if journal is None:
            self.blocks = BlockManager(num_blocks, block_size, enable_prefix_cache=prefix_cache)
            self.host = BlockManager(num_host_blocks, block_size) if num_host_blocks else None
            self.scheduler = Scheduler(
                self.config, self.blocks, host_block_manager=self.host, **common
            )
        else:
            recorder = Recorder(
                self.config,
                num_blocks,
                block_size,
                journal,
                host_blocks=num_host_blocks,
                enable_prefix_cache=prefix_cache,
                **common,
            )
            self.blocks = recorder.scheduler._state.blocks
            self.host = recorder.scheduler._state.host_blocks
            self.scheduler = Recorded(recorder)
        self.model = ToyModel(
            num_blocks=num_blocks,
            block_size=block_size,
            num_rows=self.config.max_num_seqs,
            vocab_size=VOCAB_SIZE,
            max_blocks=num_blocks + 2,
            num_host_blocks=num_host_blocks,
            eos_token_ids=eos,
        )
        self.eos = tuple(eos)
        self.overlap = overlap
        self.random = random.Random(seed)
        self.fails = fails
        self.pending: deque[Pending] = deque()
        self.requests: dict[str, Request] = {}
        self.outputs: dict[str, RequestOutput] = {}
        self.streams: dict[str, list[int]] = {}
        self.num_steps = 0
        self.num_preemptions = 0
        self.was_exhausted = False
        self.num_copied = 0
        self.num_promised_steps = 0
        self.plans: list[StepPlan] = []
        self.keeps_plans = False

    # ---- what a caller does ---------------------------------------------------------------------

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, **options: int
    ) -> Request:
        request = self.scheduler.add(request_id, prompt, params, **options)
        self.requests[request_id] = request
        self.streams[request_id] = []
        return request

    def add_samples(
        self, names: Sequence[str], prompt: Sequence[int], params: Sequence[SamplingParams]
    ) -> tuple[Request, ...]:
        requests = self.scheduler.add_samples(names, prompt, params)
        self.requests.update(zip(names, requests, strict=True))
        self.streams.update({name: [] for name in names})
        return requests

    def finish(
        self, request_id: str, reason: FinishReason, keep_tokens: int | None = None
    ) -> RequestOutput | None:
        output = self.scheduler.finish(request_id, reason, keep_tokens)
        if output is not None:
            self._take_outputs((output,))
        self.scheduler.verify()
        return output

    def step(self) -> StepOutput | None:
        """Plans ahead as far as `overlap` allows, then reads the oldest result, if there is one."""
        while len(self.pending) <= self.overlap and self.schedule():
            pass
        return self.read() if self.pending else None

    def run(self, max_steps: int = 100_000) -> None:
        """Until nobody is left."""
        for _ in range(max_steps):
            if not self.scheduler.has_unfinished and not self.pending:
                return
            if self.step() is None:
                raise AssertionError("a step without progress")
        raise AssertionError(f"not done within {max_steps} steps")

    # ---- the parts of a step --------------------------------------------------------------------

    def schedule(self) -> bool:
        """Makes and submits a plan; returns whether there was anything to do."""
        plan = self.scheduler.schedule()
        self.scheduler.verify()
        self._note_exhaustion()
        self._check_promise()
        if self.config.admission != "reserve":  # there a promised step bounds the wait
            assert all(r.num_skips <= self.config.max_skips for r in self.requests.values())
        if plan.is_empty:
            assert self.pending or not self.scheduler.has_unfinished, "a step without progress"
            return False
        self.check(plan)
        if self.keeps_plans:
            self.plans.append(plan)
        self.num_steps += 1
        self.pending.append(
            Pending(
                plan,
                list(self.blocks.free_blocks),
                list(self.host.free_blocks) if self.host is not None else [],
                self.fails(plan),
            )
        )
        self._run_some(self.random.randint(0, len(self.pending)))
        return True

    def read(self) -> StepOutput:
        """Reads the oldest result and hands it to the scheduler."""
        self.now += 1.0
        self._run_some(1)
        first = self.pending[0]
        if first.error is not None:
            self._run_some(len(self.pending))  # the runner drains: everything queued still runs
            self.pending.clear()
            output = self.scheduler.rollback(first.plan, str(first.error))
        else:
            assert first.result is not None
            self.pending.popleft()
            output = self.scheduler.update(first.plan, first.result)
        self.scheduler.verify()
        for request_id, token in zip(output.request_ids, output.token_ids.tolist(), strict=True):
            self.streams[request_id].append(token)
        self._take_outputs(output.finished)
        return output

    def _run_some(self, count: int) -> None:
        """Runs the first `count` submitted plans that have not run yet, in order."""
        for pending in list(self.pending)[:count]:
            if pending.result is None and pending.error is None:
                try:
                    pending.result = self.model.run(
                        pending.plan,
                        free_blocks=pending.free_blocks,
                        free_host_blocks=pending.free_host_blocks,
                        fails=pending.fails,
                    )
                except StepFailedError as error:
                    pending.error = error
                except AssertionError:
                    # Behind a failed step anything may be read: its result is void anyway.
                    if not any(other.error for other in self.pending):
                        raise
                    pending.error = StepFailedError("after a failed step")

    def _take_outputs(self, outputs: Sequence[RequestOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.outputs
            self.outputs[output.request_id] = output
            self.num_preemptions += output.num_preemptions

    def _check_promise(self) -> None:
        """The head starts no later than its reservation, unless that was made void."""
        policy = self.scheduler._policy
        reservation = getattr(policy, "reservation", None)
        if reservation is None or policy._is_void:
            return
        if reservation.request.state is RequestState.WAITING:
            self.num_promised_steps += 1
            assert self.scheduler._state.progress.num_updates < reservation.due

    def _note_exhaustion(self) -> None:
        available = self.blocks.num_available_blocks
        waiting = [r for r in self.requests.values() if r.state is RequestState.WAITING]
        self.was_exhausted |= any(
            len(r.tokens) > available * self.blocks.block_size for r in waiting
        )

    def num_preempted(self) -> int:
        """How often anybody gave up its blocks so far."""
        return sum(request.num_preemptions for request in self.requests.values())

    # ---- checks ---------------------------------------------------------------------------------

    def check(self, plan: StepPlan) -> None:
        """What must hold for every plan, whatever the requests."""
        assert plan.num_tokens <= self.config.max_num_batched_tokens
        assert plan.num_seqs <= self.config.max_num_seqs
        lens = np.diff(plan.query_start_loc)
        assert plan.query_start_loc[0] == 0
        assert plan.query_start_loc[-1] == plan.num_tokens == len(plan.positions)
        assert (lens > 0).all()
        assert plan.max_query_len == max(lens, default=0)
        assert plan.max_seq_len == max(plan.seq_lens, default=0)
        assert len(set(plan.rows.tolist())) == plan.num_seqs
        assert len(set(plan.sample_rows.tolist())) == plan.num_samples
        ends = plan.positions[plan.query_start_loc[1:] - 1] + 1
        assert (ends == plan.seq_lens).all()
        columns = [
            "rows query_start_loc seq_lens token_ids positions inflight_tokens inflight_rows",
            "sample_tokens sample_rows sample_positions new_rows new_min_positions",
            "table_rows table_indices table_blocks",
        ]
        for name in " ".join(columns).split():
            assert getattr(plan, name).dtype == np.int32, name
        assert plan.new_keys.dtype == np.uint64
        written = [
            self.blocks.sequence_blocks[request.request_id][position // self.blocks.block_size]
            for request, start, end in zip(plan.sequences.requests, ends - lens, ends, strict=True)
            for position in range(start, end)
        ]
        # A block may be shared only with samples that part in this very plan, from its last token.
        partings = set(plan.samples.requests) - set(plan.sequences.requests)
        shared = [self.blocks.sequence_blocks[request.request_id] for request in partings]
        for block in written:
            assert self.blocks.ref_count[block] == 1 + sum(block in table for table in shared)
        within = [c for c in plan.copies if c.direction is CopyDirection.WITHIN]
        out = [c for c in plan.copies if c.direction is CopyDirection.OUT]
        inward = [c for c in plan.copies if c.direction is CopyDirection.IN]
        assert list(plan.copies) == out + inward + within
        assert len({c.destination for c in out}) == len(out)
        self.num_copied += len(out)
        destinations = [c.destination for c in inward + within]
        assert not set(destinations) & {c.source for c in out + within}
        assert not {c.destination for c in out} & {c.source for c in inward}
        assert len(set(destinations)) == len(destinations)
        assert not set(destinations) & {c.source for c in within}

    def max_new_tokens(self, request: Request) -> int:
        """The length limit, computed independently of the scheduler."""
        pool = self.blocks.total_blocks * self.blocks.block_size
        most = min(self.config.max_model_len, pool + 1) - request.num_prompt_tokens
        wanted = request.params.max_tokens
        return most if wanted is None else min(most, wanted)

    def expected(self, request_id: str) -> tuple[int, ...]:
        """What the request generates alone."""
        request = self.requests[request_id]
        return generate_alone(
            request.tokens[: request.num_prompt_tokens],
            request.params,
            request.key,
            vocab_size=VOCAB_SIZE,
            max_new_tokens=self.max_new_tokens(request),
            eos_token_ids=self.eos,
        )

    def check_outputs(self) -> None:
        """Every output is token-exact; those cut short are exact as far as they go."""
        assert self.outputs.keys() == self.requests.keys()
        for request_id, output in self.outputs.items():
            expected = self.expected(request_id)
            if output.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
                assert output.token_ids == expected[: len(output.token_ids)], request_id
            else:
                assert output.token_ids == expected, request_id
            stream = tuple(self.streams[request_id])
            assert stream[: len(output.token_ids)] == output.token_ids, request_id

    def check_all_returned(self) -> None:
        """Every block is back."""
        assert not self.scheduler.has_unfinished
        assert self.scheduler.schedule().is_empty  # lets go of the last plan's copy sources
        assert self.blocks.num_available_blocks == self.blocks.total_blocks
        assert not self.blocks.sequence_blocks
        if self.host is not None:
            assert len(self.host.free_blocks) == self.host.total_blocks


@dataclass
class Load:
    """Made-up requests: prompts that share prefixes, of random lengths."""

    seed: int
    max_prompt: int
    shared: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.shared = [self._tokens(self.max_prompt) for _ in range(3)]

    def _tokens(self, count: int) -> list[int]:
        return [self.random.randrange(1, VOCAB_SIZE) for _ in range(count)]

    def prompt(self) -> list[int]:
        length = self.random.randint(1, self.max_prompt)
        if self.random.random() < 0.5:
            prefix = self.random.choice(self.shared)[: self.random.randint(0, length)]
            return prefix + self._tokens(length - len(prefix))
        return self._tokens(length)

    def params(self, max_tokens: int) -> SamplingParams:
        draw = self.random
        return SamplingParams(
            max_tokens=None if draw.random() < 0.02 else draw.randint(1, max_tokens),
            min_tokens=0,
            ignore_eos=draw.random() < 0.5,
            stop_token_ids=(draw.randrange(VOCAB_SIZE),) if draw.random() < 0.2 else (),
            seed=draw.getrandbits(30) if draw.random() < 0.5 else None,
            prompt_logprobs=draw.random() < 0.05,
        )
