"""Reading what a step produced into the requests."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import numpy as np

from pagetide_scheduler.errors import PlanOrderError
from pagetide_scheduler.plan import (
    Batch,
    Int32Column,
    Mask,
    RequestOutput,
    StepOutput,
    StepPlan,
)
from pagetide_scheduler.request import FinishReason, Request
from pagetide_scheduler.state import SchedulerState
from pagetide_scheduler.step_result import StepResult
from pagetide_scheduler.stop_tokens import StopTokens

TOKEN_BYTES = 4  # int32
End = Callable[[Request, FinishReason, str | None], RequestOutput]


def take_in_order(state: SchedulerState, plan: StepPlan, result: StepResult) -> None:
    """Takes the oldest plan out of flight.

    Raises:
        PlanOrderError: `plan` is another.
        ValueError: `result` is not one of this plan.
    """
    plans = state.plans
    if not plans or plans[0] is not plan:
        oldest = f"plan {plans[0].step_id} is the oldest" if plans else "no plan is"
        raise PlanOrderError(f"plan {plan.step_id} cannot be read now: {oldest} in flight")
    if len(result.num_tokens) != plan.num_samples:
        raise ValueError(
            f"plan {plan.step_id} has {plan.num_samples} samples, the result "
            f"{len(result.num_tokens)}"
        )
    for part in result.prompt_logprobs:
        if not 0 <= part.sequence < plan.num_seqs or part.start < 1:
            raise ValueError(
                f"prompt_logprobs of sequence {part.sequence} from position {part.start}: plan "
                f"{plan.step_id} has {plan.num_seqs} sequences, and positions count from 1"
            )
    is_odd = result.num_tokens != 1
    if np.count_nonzero(is_odd):
        is_odd[[error.sample for error in result.errors]] = False
        if np.count_nonzero(is_odd):
            raise ValueError("num_tokens must be 1 for every sample: no drafts were planned")
    plans.popleft()
    state.progress.num_updates += 1


def commit_full_blocks(state: SchedulerState, plan: StepPlan, are_held: Mask | None) -> None:
    """Makes blocks findable that `plan` filled, for requests that still hold their rows.

    Only to the end of what this plan computed: later plans may have computed more, but they have
    not succeeded yet.
    """
    columns, sequences = state.columns, plan.sequences
    is_full = columns.commit_at[sequences.rows] <= plan.seq_lens
    if are_held is not None:
        is_full &= are_held
    full = is_full.nonzero()[0]
    if not len(full):
        return
    rows, ends = sequences.rows[full], plan.seq_lens[full]
    # A request that decodes has filled just its open block, whose tokens are in the columns.
    columns.commit_at[rows] = ends + columns.block_size
    in_columns = columns.open_tokens.take(rows, 0).tobytes()
    num_bytes = columns.block_size * TOKEN_BYTES
    decoding, names, indices, contents = [], [], [], []
    requests = [sequences.requests[index] for index in full.tolist()]
    for place, (request, end) in enumerate(zip(requests, ends.tolist(), strict=True)):
        num_missing = end - len(request.tokens)
        if num_missing > 0:
            content = in_columns[place * num_bytes : (place + 1) * num_bytes]
            if num_missing < columns.block_size:  # the rest came with the request
                start = num_bytes - num_missing * TOKEN_BYTES
                content = request.tokens[end - columns.block_size :].tobytes() + content[start:]
                request.tokens.frombytes(content[start:])
            else:
                request.tokens.frombytes(content)
            decoding.append(request)
            names.append(request.request_id)
            indices.append(end // columns.block_size - 1)
            contents.append(content)
        else:  # it computed tokens that it came with
            columns.commit_at[rows[place]] = (end // columns.block_size + 1) * columns.block_size
            state.blocks.commit(request.request_id, request.tokens, end)
    for missed in state.blocks.commit_next(names, indices, contents):
        request = decoding[missed]
        state.blocks.commit(names[missed], request.tokens, len(request.tokens))


def note_prompt_logprobs(plan: StepPlan, result: StepResult) -> None:
    """Keeps them with their requests, whatever has become of these: the samples share them."""
    for part in result.prompt_logprobs:
        request = plan.sequences.requests[part.sequence]
        if request.prompt_logprobs is not None:
            # One that starts over computes the same again.
            end = part.start - 1 + len(part.values)
            request.prompt_logprobs[part.start - 1 : end] = array("f", part.values.tolist())


class ResultReader:
    """Appends sampled tokens to requests and finds those that end.

    Args:
        state: The books.
        stop_tokens: Every id that ends any request.
        clock: For the time of a first token.
        end: Ends a request for a reason, with an error message if there is one.
    """

    def __init__(
        self,
        state: SchedulerState,
        stop_tokens: StopTokens,
        clock: Callable[[], float],
        end: End,
    ) -> None:
        self._state = state
        self._stop_tokens = stop_tokens
        self._clock = clock
        self._end = end

    def append(self, samples: Batch, result: StepResult, are_held: Mask | None) -> StepOutput:
        """Appends a token to each of `samples`, whatever has become of it meanwhile."""
        token_ids = result.token_ids[:, 0]
        if result.errors or (are_held is not None and not are_held.all()):
            if are_held is None:
                are_held = np.ones(len(samples), np.bool_)
            return self._append_mixed(samples, result, are_held)
        finished = self._append_running(samples, token_ids)
        return StepOutput(samples.request_ids, token_ids, finished)

    def _append_running(self, samples: Batch, token_ids: Int32Column) -> tuple[RequestOutput, ...]:
        """All of them run: one look at the columns finds those with an event."""
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
        """Some of them wait again, have ended, or failed."""
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
                finished.append(self._end(request, FinishReason.ERROR, errors[index]))
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
        return None if reason is None else self._end(request, reason, None)
