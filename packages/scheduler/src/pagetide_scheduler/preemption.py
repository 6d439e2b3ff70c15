"""Room for the running requests: growing their block tables, and who leaves when blocks run out."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat

import numpy as np

from pagetide_kvcache import OutOfBlocksError
from pagetide_scheduler.assembly import PlanDraft
from pagetide_scheduler.leaving import Sacrifice, forget_kept_blocks, give_up, keep_apart, weigh
from pagetide_scheduler.plan import Batch
from pagetide_scheduler.request import Request
from pagetide_scheduler.state import SchedulerState


def grow_tables(state: SchedulerState, draft: PlanDraft, decode: Batch) -> bool:
    """Makes the next position of each request in `decode` writable; returns whether anyone left.

    Only decoding requests grow: admission took blocks for every token known then. They grow oldest
    first and before anything is in the plan, so whoever must leave leaves no trace in it.
    """
    columns = state.columns
    rows = decode.rows
    positions = columns.num_computed_tokens[rows]
    needs_block = positions >= columns.capacities[rows]
    is_shared = columns.is_open_shared[rows]
    if np.count_nonzero(is_shared):
        growing = (needs_block | is_shared).nonzero()[0]
        return _grow_one_by_one(state, draft, [decode.requests[i] for i in growing.tolist()])
    growing = needs_block.nonzero()[0]
    if not len(growing):
        return False
    indices = growing.tolist()
    try:
        block_ids = state.blocks.append_blocks([decode.request_ids[i] for i in indices])
    except OutOfBlocksError:
        return _grow_one_by_one(state, draft, [decode.requests[i] for i in indices])
    grown, starts = rows[growing], positions[growing]
    table_indices = starts // columns.block_size
    columns.capacities[grown] = starts + columns.block_size
    draft.change_tables(grown.tolist(), table_indices.tolist(), block_ids)
    return False


def _grow_one_by_one(state: SchedulerState, draft: PlanDraft, growing: list[Request]) -> bool:
    has_preempted = False
    for request in sorted(growing, key=lambda request: request.order):
        while request.row is not None and not _grow(state, draft, request):
            # Everybody younger is still unserved; if nobody is, the request itself makes room.
            younger = state.running.younger_than(request)
            victim, sacrifice = choose_victim(state, younger or [request])
            if victim is request and forget_kept_blocks(state):
                continue
            give_up(state, victim, sacrifice)
            has_preempted = True
    return has_preempted


def _grow(state: SchedulerState, draft: PlanDraft, request: Request) -> bool:
    columns, blocks, row = state.columns, state.blocks, request.row
    if row is None:
        raise ValueError(f"request {request.request_id!r} is not running")
    position = request.num_computed_tokens
    try:
        copies = blocks.grow(request.request_id, position, position + 1)
    except OutOfBlocksError:
        return False
    first = position // columns.block_size
    changed = blocks.sequence_blocks[request.request_id][first:]
    draft.copies += copies
    keep_apart(state, copies)
    draft.change_tables(repeat(row, len(changed)), range(first, first + len(changed)), changed)
    columns.capacities[row] = (first + len(changed)) * columns.block_size
    columns.is_open_shared[row] = False
    return True


def choose_victim(
    state: SchedulerState, candidates: Sequence[Request]
) -> tuple[Request, Sacrifice]:
    """The candidate that loses the least work for each block that comes free, and how.

    One that frees nothing counts last, but counts: its leaving makes shared blocks private. Of
    equals the youngest leaves.
    """
    columns = state.columns
    rows = np.array([request.row for request in candidates], np.int64)
    num_blocks = columns.capacities[rows] // columns.block_size
    # At best every block of a request comes free; most are weighed no further than that.
    bounds = columns.num_computed_tokens[rows] / num_blocks
    if state.host_blocks is not None:
        bounds = np.minimum(bounds, state.config.swap_cost)
    best: tuple[Request, Sacrifice] | None = None
    for index in np.lexsort((-np.arange(len(rows)), bounds)).tolist():
        if best is not None and bounds[index] >= best[1].cost[0]:
            break
        sacrifice = weigh(state, candidates[index])
        if best is None or sacrifice.cost < best[1].cost:
            best = (candidates[index], sacrifice)
    if best is None:
        raise ValueError("candidates must not be empty")
    return best
