"""The scheduler: who computes what in the next step."""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import numpy as np

from pagetide_kvcache import BlockManager
from pagetide_scheduler.admission import Outcome
from pagetide_scheduler.arrival import (
    check_names,
    make_key,
    read_prompt,
    set_limit,
    stop_token_ids,
)
from pagetide_scheduler.assembly import EMPTY, Chunk, PlanDraft
from pagetide_scheduler.blocks import take_blocks
from pagetide_scheduler.budget import share_backfill, share_budget
from pagetide_scheduler.columns import RunningColumns
from pagetide_scheduler.config import SchedulerConfig
from pagetide_scheduler.ending import make_output
from pagetide_scheduler.errors import PlanOrderError
from pagetide_scheduler.params import SamplingParams
from pagetide_scheduler.plan import (
    Batch,
    Int32Column,
    Mask,
    RequestOutput,
    StepOutput,
    StepPlan,
    StepResult,
)
from pagetide_scheduler.policies import make_policy
from pagetide_scheduler.preemption import grow_tables
from pagetide_scheduler.recovery import Recovery
from pagetide_scheduler.request import FinishReason, Request
from pagetide_scheduler.running import RunningSet
from pagetide_scheduler.samples import follow, fork_samples, hand_over, unfollow
from pagetide_scheduler.state import Progress, SchedulerState
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
        eos_token_ids: The model's end-of-sequence ids.
        clock: Seconds, for the times in `RequestOutput`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        block_manager: BlockManager,
        *,
        eos_token_ids: Iterable[int] = (),
        clock: Callable[[], float] = time.monotonic,
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
        )
        self._clock = clock
        self._eos_token_ids = frozenset(eos_token_ids)
        self._stop_tokens = StopTokens()
        self._recovery = Recovery(self._state)
        self._policy = make_policy(self._state)
        self._random = random.Random()  # seeded by the operating system
        self._num_added = 0

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
        state, now = self._state, self._clock()
        check_names(request_ids, state)
        tokens = read_prompt(request_ids[0], prompt_token_ids, state.config.vocab_size)
        samples: list[Request] = []
        for request_id, wishes in zip(request_ids, params, strict=True):
            number = self._num_added + len(samples)
            request = Request(
                request_id=request_id,
                num_prompt_tokens=len(tokens),
                params=wishes,
                key=make_key(wishes.seed, self._random),
                limit=set_limit(request_id, len(tokens), wishes, state),
                priority=priority,
                order=(
                    state.progress.next_step_id - priority * state.config.priority_steps,
                    number,
                ),
                arrival_time=now,
                tokens=tokens[:],
                stop_token_ids=stop_token_ids(wishes, self._eos_token_ids),
                columns=state.columns,
                queue_key=number,
            )
            samples.append(request)
        self._num_added += len(samples)
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
        return self._end(request, reason, error=error, keep_tokens=keep_tokens)

    def preempt(self, request_id: str) -> bool:
        """Takes row and blocks from a running request; it starts over ahead of new ones.

        For tests and experiments: whoever forces the oldest request out again and again stops all
        progress.

        Returns:
            Whether it was running.
        """
        request = self._state.requests.get(request_id)
        if request is None or request.row is None:
            return False
        self._state.send_back(request)
        self._policy.void()
        return True

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
        suspect = self._recovery.suspect
        if suspect is not None:
            self._plan_suspect(draft, suspect)
        elif not self._serve(draft, state.running.batch):
            self._policy.admit(state.waiting, draft.step_id, partial(self._try_admit, draft))
        if state.leaders:
            fork_samples(state, draft, self._clock())
        plan = draft.assemble(state.columns)
        if not plan.is_empty:
            state.progress.next_step_id += 1
            state.plans.append(plan)
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
        self._take_in_order(plan, result)
        are_held = self._state.columns.are_held(plan.sequences.rows, plan.step_id)
        self._commit_full_blocks(plan, are_held)
        self._recovery.clear(plan.samples)
        if plan.samples is not plan.sequences:
            are_held = self._state.columns.are_held(plan.samples.rows, plan.step_id)
        token_ids = result.token_ids[:, 0]
        if are_held.all() and not result.errors:
            finished = self._append_running(plan.samples, token_ids)
            return StepOutput(plan.samples.request_ids, token_ids, finished)
        return self._append_mixed(plan.samples, result, are_held)

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
        return StepOutput((), EMPTY, (self._end(culprit, FinishReason.ERROR, error=error),))

    def verify(self) -> None:
        """Recounts everything, in time proportional to the pool; for tests.

        Raises:
            InvariantError: Two books disagree.
        """
        verify_scheduler(self._state)

    # ---- parts of schedule ----------------------------------------------------------------------

    def _serve(self, draft: PlanDraft, batch: Batch) -> bool:
        """Plans the running requests of `batch`; returns whether anybody had to leave."""
        state = self._state
        backfills = self._policy.backfills
        if backfills:
            batch = batch.without(backfills)
        draft.take(share_budget(state.columns, batch, draft.budget, state.config.chunk_limit))
        if backfills:
            draft.take(share_backfill(state.columns, backfills.values(), draft.budget))
        has_preempted = grow_tables(state, draft, draft.decode)
        if has_preempted:
            self._policy.void()
            draft.drop_preempted()
        return has_preempted

    def _try_admit(self, draft: PlanDraft, request: Request) -> Outcome:
        """Gives `request` a row, blocks for all it knows and a part of the plan, if it can."""
        state = self._state
        num_rows = len(state.columns.free_rows) - state.num_followers
        if not draft.budget or num_rows < 1:
            return Outcome.FULL
        if num_rows < 1 + len(request.followers):
            return Outcome.NO_ROOM
        if state.is_in_flight(request):
            return Outcome.IN_FLIGHT
        admission = take_blocks(state, request)
        if admission is None:
            return Outcome.NO_ROOM
        state.waiting.remove(request)
        request.num_skips = 0
        block_ids, num_cached = admission.block_ids, admission.num_cached_tokens
        row = state.columns.enter(request, draft.step_id, num_cached, len(block_ids))
        state.running.add(request)
        if request.followers:
            state.leaders[request.request_id] = request
        if request.admitted_time is None:
            request.admitted_time = self._clock()
            request.num_cached_tokens = num_cached
        num_tokens = min(len(request.tokens) - num_cached, draft.budget, state.config.chunk_limit)
        draft.new.append(request)
        draft.chunks.append(Chunk(request, num_cached, num_tokens))
        draft.change_tables([row] * len(block_ids), list(range(len(block_ids))), block_ids)
        draft.budget -= num_tokens
        return Outcome.ADMITTED

    def _plan_suspect(self, draft: PlanDraft, suspect: Request) -> None:
        """Plans a request of a failed step alone, or the others until it can be."""
        if suspect.row is not None:
            self._serve(draft, Batch.of((suspect,)))
        elif self._try_admit(draft, suspect) is not Outcome.ADMITTED:
            self._serve(draft, self._state.running.batch)

    # ---- parts of update ------------------------------------------------------------------------

    def _take_in_order(self, plan: StepPlan, result: StepResult) -> None:
        plans = self._state.plans
        if not plans or plans[0] is not plan:
            oldest = f"plan {plans[0].step_id} is the oldest" if plans else "no plan is"
            raise PlanOrderError(f"plan {plan.step_id} cannot be read now: {oldest} in flight")
        if len(result.num_tokens) != plan.num_samples:
            raise ValueError(
                f"plan {plan.step_id} has {plan.num_samples} samples, the result "
                f"{len(result.num_tokens)}"
            )
        odd = np.flatnonzero(result.num_tokens != 1)
        if len(odd) and not {error.sample for error in result.errors}.issuperset(odd.tolist()):
            raise ValueError("num_tokens must be 1 for every sample: no drafts were planned")
        plans.popleft()
        self._state.progress.num_updates += 1

    def _commit_full_blocks(self, plan: StepPlan, are_held: Mask) -> None:
        """Makes blocks findable that this plan filled, for requests that still hold their rows."""
        state, sequences = self._state, plan.sequences
        columns = state.columns
        size = columns.block_size
        is_full = (columns.commit_at[sequences.rows] <= plan.seq_lens) & are_held
        full = is_full.nonzero()[0]
        if not len(full):
            return
        requests = [sequences.requests[index] for index in full.tolist()]
        rows, ends = sequences.rows[full], plan.seq_lens[full]
        columns.flush_all(requests, rows)
        columns.commit_at[rows] = (ends // size + 1) * size
        commit = state.blocks.commit
        for request, end in zip(requests, ends.tolist(), strict=True):
            commit(request.request_id, request.tokens, end)

    def _append_running(self, samples: Batch, token_ids: Int32Column) -> tuple[RequestOutput, ...]:
        """Appends a token to each of these running requests; returns who ended."""
        columns = self._state.columns
        lengths = columns.append(samples.rows, token_ids)
        has_event = lengths >= columns.event_at[samples.rows]
        candidates = self._stop_tokens.candidates(token_ids)
        if candidates is not None:
            has_event |= candidates
        finished = []
        for index in has_event.nonzero()[0].tolist():
            request = samples.requests[index]
            output = self._look_at(request, int(token_ids[index]), int(lengths[index]))
            if output is not None:
                finished.append(output)
        return tuple(finished)

    def _append_mixed(self, samples: Batch, result: StepResult, are_held: Mask) -> StepOutput:
        """`update` where some requests have lost their rows, have ended, or failed."""
        token_ids = result.token_ids[:, 0]
        errors = {error.sample: error.message for error in result.errors}
        kept, finished = [], []
        is_plain = are_held.copy()
        is_plain[list(errors)] = False
        for index in (~is_plain).nonzero()[0].tolist():
            request = samples.requests[index]
            if request.finish_reason is not None:
                continue  # it ended while this step was in flight; the extra token is dropped
            if index in errors:
                finished.append(self._end(request, FinishReason.ERROR, error=errors[index]))
                continue
            kept.append(index)
            request.tokens.append(int(token_ids[index]))
            output = self._look_at(request, int(token_ids[index]), len(request.tokens))
            if output is not None:
                finished.append(output)
        plain = is_plain.nonzero()[0]
        finished += self._append_running(samples.take(plain), token_ids[plain])
        order = np.concatenate((plain, np.array(kept, np.int64)))
        ids = tuple([samples.request_ids[i] for i in order.tolist()])
        return StepOutput(ids, token_ids[order], tuple(finished))

    def _look_at(self, request: Request, token_id: int, num_tokens: int) -> RequestOutput | None:
        """Handles a token that may be a request's first or last."""
        if request.first_token_time is None:
            request.first_token_time = self._clock()
            if request.row is not None:
                self._state.columns.event_at[request.row] = request.limit.num_tokens
        reason = request.stops_at(token_id, num_tokens)
        return None if reason is None else self._end(request, reason)

    def _end(
        self,
        request: Request,
        reason: FinishReason,
        *,
        error: str | None = None,
        keep_tokens: int | None = None,
    ) -> RequestOutput:
        state = self._state
        if request.followers:
            hand_over(state, request)
        elif request.leader is not None:
            unfollow(state, request, request.leader)
        elif request.row is not None:
            state.release(request)
        else:
            state.waiting.remove(request)
        del state.requests[request.request_id]
        self._policy.forget(request)
        self._recovery.forget(request)
        request.finish_reason = reason
        return make_output(request, self._clock(), error=error, keep_tokens=keep_tokens)
