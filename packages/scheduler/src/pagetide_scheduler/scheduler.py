"""The scheduler: who computes what in the next step."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from pagetide_kvcache import BlockManager
from pagetide_scheduler.arrival import Arrivals
from pagetide_scheduler.assembly import EMPTY, PlanDraft
from pagetide_scheduler.columns import RunningColumns
from pagetide_scheduler.config import SchedulerConfig
from pagetide_scheduler.ending import make_output
from pagetide_scheduler.leaving import Preemption, forget_blocks, give_up, release, weigh
from pagetide_scheduler.params import SamplingParams
from pagetide_scheduler.plan import RequestOutput, StepOutput, StepPlan
from pagetide_scheduler.policies import make_policy
from pagetide_scheduler.records import StepRecord, explain
from pagetide_scheduler.recovery import Recovery
from pagetide_scheduler.request import FinishReason, Request
from pagetide_scheduler.results import (
    ResultReader,
    commit_full_blocks,
    note_prompt_logprobs,
    take_in_order,
)
from pagetide_scheduler.running import RunningSet
from pagetide_scheduler.samples import follow, fork_samples, hand_over, unfollow
from pagetide_scheduler.serving import fill
from pagetide_scheduler.state import Progress, SchedulerState
from pagetide_scheduler.step_result import StepResult
from pagetide_scheduler.stop_tokens import StopTokens
from pagetide_scheduler.verification import verify_scheduler
from pagetide_scheduler.waiting import WaitingQueue


class Scheduler:
    """Continuous batching over the blocks of a `BlockManager`.

        plan   = scheduler.schedule()
        handle = runner.submit(plan)              # not for an empty plan
        scheduler.update(plan, handle.result())   # in plan order

    `schedule` may be called again before `update`: a token whose result is not read yet is read on
    the device. Plans must run in order, one after the other; then a block or a row given back may
    be given away by the next plan, whatever is in flight.

    Args:
        config: Limits and policies.
        block_manager: The blocks; this scheduler must be the only one that changes it.
        host_block_manager: Blocks of a pool in host memory to swap to; also this scheduler's alone.
        eos_token_ids: The model's end-of-sequence ids.
        clock: Seconds, for the times in `RequestOutput`.
        seed: Makes the random keys of requests without a seed of their own repeatable.

    Attributes:
        records: A record of each of the last steps, oldest first.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        *,
        host_block_manager: BlockManager | None = None,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
        seed: int | None = None,
    ) -> None:
        self._state = SchedulerState(
            config=config,
            blocks=block_manager,
            columns=RunningColumns(config.max_num_seqs, block_manager.block_size),
            requests={},
            running=RunningSet(),
            waiting=WaitingQueue(),
            leaders={},
            plans=deque(),
            progress=Progress(),
            host_blocks=host_block_manager,
            swap_copies=[],
            num_watermark_blocks=int(config.watermark * block_manager.total_blocks),
        )
        self._clock = clock
        self._arrivals = Arrivals(self._state, frozenset(eos_token_ids), random.Random(seed))
        self._stop_tokens = StopTokens()
        self._recovery = Recovery(self._state)
        self._policy = make_policy(self._state)
        self._reader = ResultReader(self._state, self._stop_tokens, clock, self._end)
        self.records: deque[StepRecord] = deque(maxlen=config.num_records)

    # ---- requests come and go -------------------------------------------------------------------

    def add(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
    ) -> Request:
        """Takes a request into the queue.

        Args:
            request_id: A name that no unfinished request has.
            prompt_token_ids: The prompt, at least one token.
            params: How to sample and when to stop.
            priority: Higher goes first; one level is worth `config.priority_steps` steps.

        Raises:
            RequestTooLargeError: The prompt and one more token exceed the pool or the context.
            RequestRefusedError: The prompt is empty, a token id is outside the vocabulary, or the
                id is taken.
        """
        (request,) = self.add_samples((request_id,), prompt_token_ids, (params,), priority=priority)
        return request

    def add_samples(
        self,
        request_ids: Sequence[str],
        prompt_token_ids: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
    ) -> tuple[Request, ...]:
        """Takes several samples of one prompt, each a request of its own.

        The prompt is computed once; the samples share its blocks and copy the open one only when
        they part. Give them different seeds, or none.

        Args:
            request_ids: A name a sample, that no unfinished request has.
            prompt_token_ids: The prompt, at least one token.
            params: How each is sampled and when it stops.
            priority: As for `add`.

        Raises:
            RequestTooLargeError: The prompt and one more token exceed the pool or the context.
            RequestRefusedError: The prompt is empty, a token id is outside the vocabulary, an id
                is taken, or there are more samples than may run at once. No sample was added.
        """
        state = self._state
        samples = self._arrivals.make_requests(
            request_ids, prompt_token_ids, params, priority=priority, now=self._clock()
        )
        for request in samples:
            self._stop_tokens.include(request.stop_token_ids)
            state.requests[request.request_id] = request
        follow(samples[0], samples[1:])
        state.waiting.add(samples[0])
        return tuple(samples)

    def finish(
        self,
        request_id: str,
        reason: FinishReason,
        keep_tokens: int | None = None,
        *,
        error: str | None = None,
    ) -> RequestOutput | None:
        """Ends a request in whatever state it is: aborted, stopped by its text, or failed.

        Results in flight for it are dropped when they arrive.

        Args:
            request_id: The request; unknown or finished ones are no error.
            reason: Why it ends.
            keep_tokens: Generated tokens that count; the ones behind them are dropped.
            error: What went wrong, if something did.

        Returns:
            Its output, or None if there is no unfinished request of that id.

        Raises:
            ValueError: `keep_tokens` is negative or more than were generated.
        """
        request = self._state.requests.get(request_id)
        if request is None:
            return None
        if keep_tokens is not None and not 0 <= keep_tokens <= request.num_generated_tokens:
            raise ValueError(
                f"keep_tokens must lie in 0..{request.num_generated_tokens} (the tokens that "
                f"request {request_id!r} has generated), got {keep_tokens}"
            )
        return self._end(request, reason, error, keep_tokens)

    def preempt(self, request_id: str, way: Preemption | None = None) -> bool:
        """Takes row and blocks from a running request; it goes on later, ahead of new ones.

        For tests and experiments: whoever forces the oldest request out again and again stops all
        progress.

        Args:
            request_id: The request.
            way: Recompute or swap; where a swap is not possible it recomputes. None: as when
                blocks run out.

        Returns:
            Whether it was running.
        """
        request = self._state.requests.get(request_id)
        if request is None or request.row is None:
            return False
        give_up(self._state, request, weigh(self._state, request, way))
        self._policy.void()
        return True

    def why(self, request_id: str) -> str:
        """Why a request waits, or what it does, in a sentence with numbers."""
        request = self._state.requests.get(request_id)
        if request is None:
            return "unknown, or it has ended"
        return explain(self._state, request, self._policy.promise)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended."""
        return bool(self._state.requests)

    @property
    def unfinished_ids(self) -> tuple[str, ...]:
        """Ids of the requests that have not ended, oldest first."""
        return tuple(self._state.requests)

    @property
    def num_running(self) -> int:
        return len(self._state.running)

    @property
    def num_waiting(self) -> int:
        return len(self._state.waiting)

    @property
    def num_plans_in_flight(self) -> int:
        """Plans scheduled and neither read nor void."""
        return len(self._state.plans)

    # ---- a step ---------------------------------------------------------------------------------

    def schedule(self) -> StepPlan:
        """Plans the next step: the running requests first, then whoever waits and fits."""
        state = self._state
        state.blocks.start_plan()
        draft = PlanDraft(state.progress.next_step_id, state.config.max_num_batched_tokens)
        passed = fill(draft, state, self._policy, self._recovery.suspect, self._clock)
        if state.leaders:
            fork_samples(state, draft, self._clock())
        plan = draft.assemble(state.columns, state.swap_copies)
        if not plan.is_empty:
            self._submitted(plan, draft, passed)
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Reads what a step produced: tokens are appended, full blocks made findable, ends found.

        Args:
            plan: The oldest plan in flight.
            result: One row for each of the plan's samples.

        Raises:
            PlanOrderError: The plan is not the oldest in flight.
            ValueError: The result does not belong to this plan; nothing has changed.
        """
        if plan.is_empty:
            return StepOutput((), plan.token_ids, ())
        state = self._state
        take_in_order(state, plan, result)
        are_held = state.columns.are_held(plan.sequences.rows, plan.step_id)
        commit_full_blocks(state, plan, are_held)
        note_prompt_logprobs(plan, result)
        self._recovery.clear(plan.samples)
        if plan.samples is not plan.sequences:
            are_held = state.columns.are_held(plan.samples.rows, plan.step_id)
        return self._reader.append(plan.samples, result, are_held)

    def rollback(self, plan: StepPlan, error: str = "the step failed") -> StepOutput:
        """Makes a failed plan and every later one in flight void.

        Their requests start over from what the host knows, each alone until its next token; one
        that has failed alone before ends with `FinishReason.ERROR`. The device must have stopped
        working on all of these plans.

        Args:
            plan: A plan in flight.
            error: What went wrong, for the output of a request that ends.

        Raises:
            PlanOrderError: The plan is not in flight.
        """
        culprit = self._recovery.restart(plan)
        self._policy.void()
        if culprit is None:
            return StepOutput((), EMPTY, ())
        return StepOutput((), EMPTY, (self._end(culprit, FinishReason.ERROR, error),))

    def verify(self) -> None:
        """Recounts everything, in time proportional to the pool; for tests.

        Raises:
            InvariantError: Two books disagree.
        """
        verify_scheduler(self._state)

    # ---- parts of these -------------------------------------------------------------------------

    def _submitted(self, plan: StepPlan, draft: PlanDraft, passed: list[Request]) -> None:
        """Counts a plan as in flight and writes its record."""
        state = self._state
        state.plans.append(plan)
        state.swap_copies.clear()
        if draft.new:  # most often the next step's batch is already made
            state.running.adopt(draft.decode, plan.sequences)
        self.records.append(StepRecord.of(state, plan, draft.new, passed))
        state.progress.preempted.clear()
        state.progress.next_step_id += 1

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        error: str | None = None,
        keep_tokens: int | None = None,
    ) -> RequestOutput:
        state = self._state
        if reason is FinishReason.ERROR and request.request_id in state.blocks.sequence_blocks:
            # What it computed, or found, may be what failed: nobody else is to find it.
            state.blocks.uncache(request.request_id)
        if request.followers:
            hand_over(state, request)
        elif request.leader is not None:
            unfollow(state, request, request.leader)
        elif request.row is not None:
            release(state, request)
        else:
            forget_blocks(state, request)
            state.waiting.remove(request)
        del state.requests[request.request_id]
        self._policy.forget(request)
        self._recovery.forget(request)
        request.finish_reason = reason
        return make_output(request, self._clock(), error=error, keep_tokens=keep_tokens)
