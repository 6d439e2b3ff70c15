"""The counters of running requests, one array a counter and one entry a row.

In steady decode a step is a few array operations over all running rows; only rows with an event
(a full block, a first token, a limit) are looked at one by one.
"""

from __future__ import annotations

from array import array

import numpy as np

from pagetide_scheduler.plan import Batch, Int32Column, Int64Column, Mask
from pagetide_scheduler.request import Request

NEVER = np.iinfo(np.int64).max


class RunningColumns:
    """Counters by row, and the rows that are free.

    Attributes:
        num_tokens: Tokens the host knows. int64 [R]
        num_inflight_tokens: Tokens sampled by steps whose results are not read. int64 [R]
        num_computed_tokens: Tokens whose keys and values every plan so far will have written.
        limits: Most tokens the row's request may have.
        capacities: Tokens its block table has room for.
        commit_at: Length of computed tokens at which its next block is full.
        event_at: Length of known tokens at which the host must look: first token or limit.
        admitted_steps: The plan that gave the row to its request; NEVER while the row is free.
        last_steps: The last plan that names the row.
        last_tokens: The last known token.
        is_open_shared: Whether the next token may go to a block that others hold too (a fork).
        open_tokens: Known tokens of the open block. int32 [R, block_size]
        free_rows: Rows without a request; the last one is given next.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        def column(fill: int = 0) -> Int64Column:
            return np.full(num_rows, fill, np.int64)

        self.block_size = block_size
        self.num_tokens = column()
        self.num_inflight_tokens = column()
        self.num_computed_tokens = column()
        self.limits = column()
        self.capacities = column()
        self.commit_at = column()
        self.event_at = column()
        self.admitted_steps = column(NEVER)
        self.last_steps = column()
        self.last_tokens = column()
        self.is_open_shared = np.zeros(num_rows, np.bool_)
        self.open_tokens: Int32Column = np.zeros((num_rows, block_size), np.int32)
        self.free_rows = list(range(num_rows - 1, -1, -1))

    def enter(self, request: Request, step_id: int, num_computed: int, num_blocks: int) -> int:
        """Gives `request` a free row, its first `num_computed` tokens being in its blocks."""
        row = self.free_rows.pop()
        size = self.block_size
        tokens = request.tokens
        self.num_tokens[row] = len(tokens)
        self.num_inflight_tokens[row] = 0
        self.num_computed_tokens[row] = num_computed
        self.limits[row] = request.limit.num_tokens
        self.capacities[row] = num_blocks * size
        self.commit_at[row] = (num_computed // size + 1) * size
        has_first = request.first_token_time is not None
        self.event_at[row] = self.limits[row] if has_first else request.num_prompt_tokens + 1
        self.admitted_steps[row] = self.last_steps[row] = step_id
        self.last_tokens[row] = tokens[-1]
        self.is_open_shared[row] = False
        num_open = len(tokens) % size
        if num_open:
            self.open_tokens[row, :num_open] = tokens[-num_open:]
        request.row = row
        return row

    def share_open_block(self, *requests: Request) -> None:
        """Notes that running requests hold the same open block: who writes first copies it."""
        for request in requests:
            self.is_open_shared[_row(request)] = True

    def leave(self, request: Request) -> None:
        """Takes the row of `request` away; whatever is in flight for it stays in plan order."""
        row = _row(request)
        self.flush(request)
        request.last_step = int(self.last_steps[row])
        self.admitted_steps[row] = NEVER
        self.free_rows.append(row)
        request.row = None

    def open_tail(self, request: Request) -> array[int]:
        """The known tokens that `request.tokens` lacks; they all lie in the open block."""
        row = _row(request)
        known, listed = int(self.num_tokens[row]), len(request.tokens)
        if known == listed:
            return array("i")
        start = (known - 1) // self.block_size * self.block_size
        return array("i", self.open_tokens[row, listed - start : known - start].tobytes())

    def flush(self, request: Request) -> None:
        """Moves the open block's known tokens into `request.tokens`.

        Must happen before the token behind a full block overwrites it.
        """
        request.tokens.extend(self.open_tail(request))

    def flush_all(self, requests: list[Request], rows: Int64Column) -> None:
        """`flush` for many: one look at the columns for all of them."""
        size = self.block_size
        data = self.open_tokens[rows].tobytes()
        known_tokens = self.num_tokens[rows].tolist()
        for index, (request, known) in enumerate(zip(requests, known_tokens, strict=True)):
            listed = len(request.tokens)
            if listed < known:
                origin = index * size - (known - 1) // size * size
                request.tokens.frombytes(data[(origin + listed) * 4 : (origin + known) * 4])

    def are_held(self, rows: Int64Column, step_id: int) -> Mask:
        """Which of a plan's rows still belong to the request that the plan named. bool [N]

        A row given away since was given by a later plan, and a request that lost its row is not
        admitted again while a plan that names it is in flight.
        """
        return self.admitted_steps[rows] <= step_id

    def append(self, rows: Int64Column, token_ids: Int32Column) -> Int64Column:
        """Makes one sampled token a row known; returns the new lengths. int64 [N]"""
        known = self.num_tokens[rows]
        self.open_tokens[rows, known % self.block_size] = token_ids
        known += 1
        self.num_tokens[rows] = known
        self.num_inflight_tokens[rows] -= 1
        self.last_tokens[rows] = token_ids
        return known

    def plan_decode(self, batch: Batch, step_id: int) -> tuple[Int64Column, Int64Column]:
        """Counts one more token of each row as computed and one as in flight.

        Returns the position computed and the number that were in flight before. int64 [N] each
        """
        rows = batch.rows
        computed = self.num_computed_tokens[rows]
        inflight = self.num_inflight_tokens[rows]
        self.num_computed_tokens[rows] = computed + 1
        self.num_inflight_tokens[rows] = inflight + 1
        self.last_steps[rows] = step_id
        return computed, inflight


def _row(request: Request) -> int:
    if request.row is None:
        raise ValueError(f"request {request.request_id!r} is not running")
    return request.row
