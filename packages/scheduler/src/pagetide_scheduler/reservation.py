"""Look-ahead with a promise: the head starts by a step that is known when it begins to wait.

EASY backfilling: when the head does not fit, the earliest step at which its blocks are certain is
reserved for it. Later requests are admitted only if they end before that step, or need only blocks
that the head will not.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from pagetide_scheduler.admission import NO_BACKFILLS, AdmissionPolicy, Attempt, Backfill, Outcome
from pagetide_scheduler.forecast import forecast, worst_growth
from pagetide_scheduler.request import Request
from pagetide_scheduler.state import SchedulerState
from pagetide_scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class Reservation:
    """A promise to the head of the queue.

    Attributes:
        request: The head.
        due: The number of updates after which it starts at the latest.
        num_blocks: Blocks set aside for it, the watermark included.
        slack: Blocks that nobody needs before `due`.
        spare: Blocks that nobody needs at `due`, the head included.
        spare_rows: The same for rows.
        backfills: Later requests that run meanwhile.
    """

    request: Request
    due: int
    num_blocks: int
    slack: int
    spare: int
    spare_rows: int
    backfills: dict[str, Backfill] = field(default_factory=dict)

    def start(self, backfill: Backfill) -> None:
        self.backfills[backfill.request.request_id] = backfill
        self._take(backfill, 1)

    def end(self, request: Request) -> None:
        backfill = self.backfills.pop(request.request_id, None)
        if backfill is not None:
            self._take(backfill, -1)

    def _take(self, backfill: Backfill, sign: int) -> None:
        self.slack -= sign * backfill.num_blocks
        if backfill.tokens_a_step is None:
            self.spare -= sign * backfill.num_blocks
            self.spare_rows -= sign


class Reserve(AdmissionPolicy):
    """The policy `reserve`.

    Attributes:
        reservation: The promise that stands, if any.
        num_reissued: Promises replaced because something of higher priority arrived, a running
            request lost its blocks, or a step failed. Nothing else replaces one.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self.reservation: Reservation | None = None
        self.num_reissued = 0
        self._is_void = False

    @property
    def promise(self) -> Reservation | None:
        return None if self._is_void else self.reservation

    @property
    def backfills(self) -> Mapping[str, Backfill]:
        """Running requests that get only what the others leave, by id."""
        if self.reservation is None or self._is_void:
            return NO_BACKFILLS
        return self.reservation.backfills

    def admit(self, waiting: WaitingQueue, step_id: int, attempt: Attempt) -> list[Request]:
        while (head := waiting.head) is not None:
            outcome = attempt(head)
            if outcome is Outcome.ADMITTED:
                self._note_admitted(head)
                continue
            if outcome is not Outcome.NO_ROOM:
                return []
            break
        else:
            return []
        reservation = self._reserve(head)
        stayed, num_passed = [head], 0
        while len(stayed) <= self._state.config.lookahead:
            request = waiting.at(len(stayed))
            if request is None or (head.has_run and not request.has_run):
                break
            backfill = self._fit(reservation, request)
            outcome = Outcome.NO_ROOM if backfill is None else attempt(request)
            if backfill is not None and outcome is Outcome.ADMITTED:
                reservation.start(backfill)
                num_passed = len(stayed)
            elif outcome is Outcome.FULL:
                break
            else:
                stayed.append(request)
                if request.num_skips >= self._state.config.max_skips:
                    break
        for request in stayed[:num_passed]:
            request.num_skips += 1
        return stayed[:num_passed]

    def forget(self, request: Request) -> None:
        """Ends its promise, or gives back what was set aside for it."""
        if self.reservation is None:
            return
        if request is self.reservation.request:
            self.reservation = None
        else:
            self.reservation.end(request)

    def void(self) -> None:
        """The forecast no longer holds; a promise is made anew at the next admission."""
        self._is_void = True

    def _note_admitted(self, head: Request) -> None:
        if self.reservation is not None:
            if head is self.reservation.request:
                self.reservation = None  # the promise is kept
            else:
                self._is_void = True  # something of higher priority took what was set aside

    def _reserve(self, head: Request) -> Reservation:
        old = self.reservation
        if old is not None and old.request is head and not self._is_void:
            return old
        self.num_reissued += old is not None
        self._is_void = False
        self.reservation = reserve(self._state, head)
        return self.reservation

    def _fit(self, reservation: Reservation, request: Request) -> Backfill | None:
        """How `request` may run without touching the promise, or None."""
        num_blocks = self._state.most_blocks(request)
        if num_blocks > reservation.slack or request.followers:
            return None
        rate = self._tokens_left_a_step(reservation, request)
        if rate > 0:
            known = len(request.tokens)
            num_steps = -(-known // rate) + request.limit.num_tokens - known - 1
            # One more: in its first step it may get fewer tokens than it surely gets later.
            end = self._state.progress.num_updates + len(self._state.plans) + num_steps + 1
            if end <= reservation.due:
                return Backfill(request, num_blocks, rate)
        if num_blocks <= reservation.spare and reservation.spare_rows > 0:
            return Backfill(request, num_blocks, None)
        return None

    def _tokens_left_a_step(self, reservation: Reservation, request: Request) -> int:
        """Budget that is surely left for `request` in each step while the promise stands."""
        state = self._state
        columns = state.columns
        others = [r for r in state.running if r.request_id not in reservation.backfills]
        if any(r.num_tokens - r.num_computed_tokens > 1 for r in others):
            return 0  # a prompt among the others takes what it can get
        promised = sum(b.tokens_a_step or 0 for b in reservation.backfills.values())
        left = state.config.max_num_batched_tokens - len(others) - state.num_followers
        left -= promised + 1  # one for the head, whose turn may come
        return min(left, state.config.chunk_limit, len(request.tokens)) if columns.free_rows else 0


def reserve(state: SchedulerState, head: Request) -> Reservation:
    """The earliest update at which the blocks and the row of `head` are certain."""
    future = forecast(state)
    needed = -(-len(head.tokens) // state.blocks.block_size) + state.num_watermark_blocks
    rows_needed = 1 + len(head.followers)
    available = slack = state.blocks.num_available_blocks
    free_rows = len(state.columns.free_rows) - state.num_followers
    is_alive = future.ends >= 0
    holders_gone: Counter[int] = Counter()
    spare, end = 0, 0
    for end in sorted(set(future.ends.tolist())):
        slack = min(slack, available - worst_growth(state, future, is_alive, end))
        ending = (is_alive & (future.ends == end)).nonzero()[0]
        for index in ending.tolist():
            available += _freed_by(state, future.batch.requests[index], holders_gone)
        is_alive[ending] = False
        free_rows += len(ending)
        spare = available - worst_growth(state, future, is_alive, end) - needed
        if spare >= 0 and free_rows >= rows_needed and end >= future.busy_until:
            break
    else:
        # Not even the last end leaves the watermark; but then nothing runs and none is needed.
        end = max(end, future.all_ended)
    return Reservation(
        request=head,
        due=state.progress.num_updates + end,
        num_blocks=needed,
        slack=slack,
        spare=spare,
        spare_rows=free_rows - rows_needed,
    )


def _freed_by(state: SchedulerState, request: Request, holders_gone: Counter[int]) -> int:
    """Blocks that come free when `request` ends, after those counted in `holders_gone`."""
    if request.followers:
        return 0  # they will hold its blocks on
    ref_count = state.blocks.ref_count
    freed = 0
    for block_id in state.blocks.sequence_blocks[request.request_id]:
        references = ref_count[block_id]
        if references > 1:
            holders_gone[block_id] += 1
            references -= holders_gone[block_id] - 1
        freed += references == 1
    return freed
