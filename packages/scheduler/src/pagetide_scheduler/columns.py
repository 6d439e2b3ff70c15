"""The counters of running requests, one array a counter and one entry a row.

In steady decode a step is a few array operations over all running rows; only rows with an event
(a full block, a first token, a limit) are looked at one by one.
"""

from __future__ import annotations

from array import array

import numpy as np

from pagetide_scheduler.params import MOST_TOKENS
from pagetide_scheduler.plan import Int32Column, Int64Column, Mask
from pagetide_scheduler.request import Request

NEVER = np.iinfo(np.int64).max


class Counting:
    """0, 1, 2, ...: one array that grows, for the columns that are parts of it. Read-only."""

    def __init__(self) -> None:
        self._numbers: Int32Column = np.empty(0, np.int32)

    def up_to(self, end: int) -> Int32Column:
        """The numbers below `end`. int32 [end]"""
        if end > len(self._numbers):
            self._numbers = np.arange(2 * end, dtype=np.int32)
            self._numbers.flags.writeable = False
        return self._numbers[:end]


class RunningColumns:
    """Counters by row, and the rows that are free. Tokens are counted in int32, steps in int64.

    Attributes:
        num_tokens: Tokens the host knows. [R]
        num_total_tokens: Those and the ones sampled by steps whose results are not read.
        num_computed_tokens: Tokens whose keys and values every plan so far will have written.
        limits: Most tokens the row's request may have.
        capacities: Tokens its block table has room for.
        commit_at: Length of computed tokens at which its next block is full.
        event_at: Length of known tokens at which the host must look: first token or limit.
        admitted_steps: The plan that gave the row to its request; NEVER while the row is free.
        last_steps: The last plan that names the row.
        last_tokens: The last known token.
        is_open_shared: Whether the next token may go to a block that others hold too (a fork).
        open_tokens: Known tokens of the open block, those that the request lists aside.
            int32 [R, block_size]
        counting: For columns that count.
        free_rows: Rows without a request; the last one is given next.
    """

    def __init__(self, num_rows: int, block_size: int) -> None:
        def column() -> Int32Column:
            return np.zeros(num_rows, np.int32)

        self.block_size = block_size
        self.num_tokens = column()
        self.num_total_tokens = column()
        self.num_computed_tokens = column()
        self.limits = column()
        self.capacities = column()
        self.commit_at = column()
        self.event_at = column()
        self.admitted_steps = np.full(num_rows, NEVER, np.int64)
        self.last_steps = np.zeros(num_rows, np.int64)
        self.last_tokens = column()
        self.is_open_shared = np.zeros(num_rows, np.bool_)
        self.open_tokens: Int32Column = np.zeros((num_rows, block_size), np.int32)
        self._open_slots = self.open_tokens.reshape(-1)  # one index is much faster than two
        self.counting = Counting()
        self.free_rows = list(range(num_rows - 1, -1, -1))
        self._left_step = 0  # the last plan that names any request which has left

    def enter(self, request: Request, step_id: int, num_computed: int, num_blocks: int) -> int:
        """Gives `request` a free row, its first `num_computed` tokens being in its blocks."""
        row = self.free_rows.pop()
        size = self.block_size
        tokens = request.tokens
        self.num_tokens[row] = self.num_total_tokens[row] = len(tokens)
        self.num_computed_tokens[row] = num_computed
        limit = min(request.limit.num_tokens, MOST_TOKENS)
        self.limits[row] = limit
        self.capacities[row] = min(num_blocks * size, MOST_TOKENS)
        self.commit_at[row] = (num_computed // size + 1) * size
        has_first = request.first_token_time is not None
        self.event_at[row] = limit if has_first else request.num_prompt_tokens + 1
        self.admitted_steps[row] = self.last_steps[row] = step_id
        self.last_tokens[row] = tokens[-1]
        self.is_open_shared[row] = False
        request.row = row
        return row

    def share_open_block(self, *requests: Request) -> None:
        """Notes that running requests hold the same open block: who writes first copies it."""
        for request in requests:
            self.is_open_shared[row_of(request)] = True

    def leave(self, request: Request) -> None:
        """Takes the row of `request` away; whatever is in flight for it stays in plan order."""
        row = row_of(request)
        self.flush(request)
        request.last_step = int(self.last_steps[row])
        self._left_step = max(self._left_step, request.last_step)
        self.admitted_steps[row] = NEVER
        self.free_rows.append(row)
        request.row = None

    def open_tail(self, request: Request) -> array[int]:
        """The known tokens that `request.tokens` lacks; they all lie in the open block."""
        row = row_of(request)
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

    def are_held(self, rows: Int64Column, step_id: int) -> Mask | None:
        """Which of a plan's rows still belong to the request that the plan named. bool [N]

        None if all of them do, which is certain while nobody has left whom it could name.

        A row given away since was given by a later plan, and a request that lost its row is not
        admitted again while a plan that names it is in flight.
        """
        if step_id > self._left_step:
            return None
        return self.admitted_steps[rows] <= step_id

    def append(self, rows: Int64Column, token_ids: Int32Column) -> Int32Column:
        """Makes one sampled token a row known; returns the new lengths. int32 [N]"""
        known = self.num_tokens[rows]
        size = self.block_size
        self._open_slots[rows * size + known % size] = token_ids
        known += 1
        self.num_tokens[rows] = known
        self.last_tokens[rows] = token_ids
        return known

    def plan_decode(self, rows: Int64Column, step_id: int) -> tuple[Int32Column, Int32Column, Mask]:
        """Counts the one token that each row has left as computed, and one more as in flight.

        Returns the position computed, the length then, and whether that token is in flight. [N]
        """
        positions = self.num_computed_tokens[rows]
        ends = positions + 1
        self.num_computed_tokens[rows] = ends
        self.num_total_tokens[rows] = ends + 1
        self.last_steps[rows] = step_id
        return positions, ends, positions >= self.num_tokens[rows]

    def plan_chunk(self, row: int, end: int, is_last: bool, step_id: int) -> None:
        """Counts the tokens before `end` as computed; if they are the last, one more in flight."""
        self.num_computed_tokens[row] = end
        if is_last:
            self.num_total_tokens[row] = end + 1
        self.last_steps[row] = step_id


def row_of(request: Request) -> int:
    """The row of a running request.

    Raises:
        ValueError: It is not running.
    """
    if request.row is None:
        raise ValueError(f"request {request.request_id!r} is not running")
    return request.row
