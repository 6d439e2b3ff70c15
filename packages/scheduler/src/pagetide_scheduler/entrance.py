"""Letting a waiting request in: a row, blocks for all it knows, and a part of the plan."""

from __future__ import annotations

from collections.abc import Callable

from pagetide_scheduler.admission import Outcome
from pagetide_scheduler.assembly import Chunk, PlanDraft
from pagetide_scheduler.blocks import take_blocks
from pagetide_scheduler.leaving import forget_kept_blocks
from pagetide_scheduler.request import Request
from pagetide_scheduler.state import SchedulerState


def try_to_admit(
    state: SchedulerState, draft: PlanDraft, clock: Callable[[], float], request: Request
) -> Outcome:
    """Admits `request` to the plan if there is room, whole or not at all."""
    num_rows = len(state.columns.free_rows) - state.num_followers
    if not draft.budget or num_rows < 1:
        return Outcome.FULL
    if num_rows < 1 + len(request.followers):
        return Outcome.NO_ROOM
    if state.is_in_flight(request):
        return Outcome.IN_FLIGHT
    admission = take_blocks(state, request)
    if not state.running and (request is state.waiting.head or request.is_suspect):
        # Only swapped requests hold blocks now; alone, everything that was ever added fits.
        while admission is None and forget_kept_blocks(state):
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
        request.admitted_time = clock()
        request.num_cached_tokens = num_cached
    num_tokens = min(len(request.tokens) - num_cached, draft.budget, state.config.chunk_limit)
    draft.new.append(request)
    draft.chunks.append(Chunk(request, num_cached, num_tokens))
    draft.change_tables([row] * len(block_ids), range(len(block_ids)), block_ids)
    draft.budget -= num_tokens
    return Outcome.ADMITTED
