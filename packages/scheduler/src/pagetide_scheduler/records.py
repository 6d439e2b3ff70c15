"""What each step leaves behind, and a sentence on why a request is where it is."""

from __future__ import annotations

from dataclasses import dataclass

from pagetide_scheduler.plan import StepPlan
from pagetide_scheduler.request import Request
from pagetide_scheduler.reservation import Reservation
from pagetide_scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class StepRecord:
    """A step in a few numbers.

    Attributes:
        step_id: The plan's number.
        num_tokens: Tokens it computes.
        num_seqs: Requests they belong to.
        num_samples: Tokens it samples.
        num_copies: Blocks it copies.
        admitted: Requests it gave a row.
        preempted: Requests that lost theirs since the step before.
        passed: Waiting requests that a later one was admitted past.
        num_waiting: Requests that wait.
        num_available_blocks: Blocks that could still be given away.
    """

    step_id: int
    num_tokens: int
    num_seqs: int
    num_samples: int
    num_copies: int
    admitted: tuple[str, ...]
    preempted: tuple[str, ...]
    passed: tuple[str, ...]
    num_waiting: int
    num_available_blocks: int

    @classmethod
    def of(
        cls, state: SchedulerState, plan: StepPlan, new: list[Request], passed: list[Request]
    ) -> StepRecord:
        """The record of `plan`, which gave rows to `new` and let later requests past `passed`."""
        return cls(
            step_id=plan.step_id,
            num_tokens=plan.num_tokens,
            num_seqs=plan.num_seqs,
            num_samples=plan.num_samples,
            num_copies=len(plan.copies),
            admitted=tuple([request.request_id for request in new]),
            preempted=tuple(state.progress.preempted),
            passed=tuple([request.request_id for request in passed]),
            num_waiting=len(state.waiting),
            num_available_blocks=state.blocks.num_available_blocks,
        )


def explain(state: SchedulerState, request: Request, promise: Reservation | None) -> str:
    """Why `request` is where it is, in a sentence with numbers."""
    if request.row is not None:
        return _explain_running(state, request)
    if request.leader is not None:
        leader = request.leader
        return (
            f"waiting: {leader.request_id} computes the prompt for it too "
            f"({leader.num_computed_tokens} of {leader.num_tokens} tokens so far)"
        )
    parts = []
    if state.is_in_flight(request):
        parts.append(f"step {request.last_step}, which names it, is not read yet")
    if request.is_suspect:
        parts.append("its step failed, so it will run alone until its next token")
    parts.append(_explain_blocks(state, request, promise))
    num_rows = len(state.columns.free_rows) - state.num_followers
    if num_rows < 1 + len(request.followers):
        parts.append(f"needs {1 + len(request.followers)} rows, {max(0, num_rows)} free")
    if request.num_preemptions:
        parts.append(f"gave up its blocks {request.num_preemptions} times")
    num_before = next(i for i, other in enumerate(state.waiting) if other is request)
    parts.append(f"{num_before} wait before it")
    parts.append(f"passed over {request.num_skips} of {state.config.max_skips} times")
    return "waiting: " + "; ".join(parts)


def _explain_running(state: SchedulerState, request: Request) -> str:
    num_blocks = len(state.blocks.sequence_blocks[request.request_id])
    left = request.num_tokens - request.num_computed_tokens
    doing = f"{left} tokens left to compute" if left > 1 else "decoding"
    return (
        f"running: {doing}; {request.num_tokens} of at most {request.limit.num_tokens} tokens "
        f"known, {request.num_inflight_tokens} in flight; {num_blocks} blocks"
    )


def _explain_blocks(state: SchedulerState, request: Request, promise: Reservation | None) -> str:
    needed = -(-len(request.tokens) // state.blocks.block_size)
    text = f"needs {needed} blocks"
    if request.swapped is not None:
        text += f" ({request.swapped.num_kept} kept, the others swapped out)"
    text += f", {state.blocks.num_available_blocks} free"
    if state.running and state.num_watermark_blocks:
        text += f" ({state.num_watermark_blocks} kept for those that run)"
    if promise is not None:
        whom = "it" if promise.request is request else promise.request.request_id
        text += f", {promise.num_blocks} reserved for {whom} until step {promise.due}"
    return text
