"""Recounting the scheduler's books, for tests."""

from __future__ import annotations

from pagetide_kvcache import InvariantError
from pagetide_scheduler.columns import NEVER
from pagetide_scheduler.request import Request
from pagetide_scheduler.state import SchedulerState


def verify_scheduler(state: SchedulerState) -> None:
    """Compares the rows, the queues, the columns and the block manager with each other.

    Raises:
        InvariantError: Two of them disagree; the message names the request.
    """
    state.blocks.verify()
    running, waiting = list(state.running), list(state.waiting)
    _require(len(waiting) == len(state.waiting), "the queue miscounts itself")
    following = [follower for request in running + waiting for follower in request.followers]
    known = {id(request) for request in running + waiting + following}
    _require(
        len(known) == len(running) + len(waiting) + len(following)
        and known == {id(request) for request in state.requests.values()},
        "a request is nowhere, or in two places",
    )
    swapped = {request.request_id for request in waiting if request.swapped is not None}
    _require(
        set(state.blocks.sequence_blocks) == {r.request_id for r in running} | swapped,
        "blocks are held by other requests than the running and the swapped ones",
    )
    if state.host_blocks is not None:
        state.host_blocks.verify()
        _require(set(state.host_blocks.sequence_blocks) == swapped, "the host holds others' blocks")
    rows = sorted([row for r in running if (row := r.row) is not None] + state.columns.free_rows)
    _require(rows == list(range(state.config.max_num_seqs)), "a row is lost, or held twice")
    leading = {request.request_id for request in running if request.followers}
    _require(set(state.leaders) == leading, "the leaders are miscounted")
    _require(state.num_followers <= len(state.columns.free_rows), "followers have no rows")
    for row in state.columns.free_rows:
        _require(state.columns.admitted_steps[row] == NEVER, f"free row {row} looks held")
    orders = [request.order for request in running]
    _require(orders == sorted(orders), "the running requests are out of order")
    for request in running:
        _verify_running(state, request)
    for request in waiting:
        _require(request.row is None, f"waiting request {request.request_id!r} holds a row")


def _verify_running(state: SchedulerState, request: Request) -> None:
    columns, name = state.columns, f"request {request.request_id!r}"
    row = request.row
    _require(row is not None, f"running {name} holds no row")
    total = request.num_tokens + request.num_inflight_tokens
    _require(request.num_computed_tokens <= total, f"{name} computed tokens that do not exist")
    _require(total <= request.limit.num_tokens, f"{name} is beyond its limit")
    _require(len(request.token_ids) == request.num_tokens, f"{name} has lost tokens")
    _require(request.token_ids[-1] == columns.last_tokens[row], f"{name} has a wrong last token")
    table = state.blocks.sequence_blocks[request.request_id]
    _require(
        int(columns.capacities[row]) == len(table) * columns.block_size,
        f"{name} miscounts its blocks",
    )
    _require(
        request.num_computed_tokens <= len(table) * columns.block_size,
        f"{name} computed tokens beyond its blocks",
    )


def _require(is_true: bool, message: str) -> None:
    if not is_true:
        raise InvariantError(message)
