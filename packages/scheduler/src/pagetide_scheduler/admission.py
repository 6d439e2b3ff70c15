"""Who of the waiting requests is tried, and in which order: one small class a policy."""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from pagetide_scheduler.request import Request
from pagetide_scheduler.waiting import WaitingQueue

if TYPE_CHECKING:
    from pagetide_scheduler.reservation import Reservation


class Outcome(enum.Enum):
    """What became of an attempt to admit a request."""

    ADMITTED = "admitted"
    NO_ROOM = "not enough blocks or rows for it"
    IN_FLIGHT = "a step that names it is not read yet"
    FULL = "no row or no budget left for anybody"


Attempt = Callable[[Request], Outcome]


@dataclass(frozen=True, slots=True)
class Backfill:
    """A later request that runs while a reservation stands.

    Attributes:
        request: It.
        num_blocks: Blocks it needs at most.
        tokens_a_step: Budget it surely gets each step, so that it ends in time; None if it may
            stay beyond the reservation, and then takes what is left.
    """

    request: Request
    num_blocks: int
    tokens_a_step: int | None


NO_BACKFILLS: Mapping[str, Backfill] = {}


class AdmissionPolicy(ABC):
    """Decides whom to try; `attempt` decides whether there is room, and takes it."""

    @property
    def promise(self) -> Reservation | None:
        """The promise that stands, if this policy makes any."""
        return None

    @property
    def backfills(self) -> Mapping[str, Backfill]:
        """Running requests that get only the budget which the others leave, by id."""
        return NO_BACKFILLS

    @abstractmethod
    def admit(self, waiting: WaitingQueue, step_id: int, attempt: Attempt) -> list[Request]:
        """Tries requests; returns those that a later one passed in this step."""

    def forget(self, request: Request) -> None:  # noqa: B027 - most policies remember nothing
        """Drops what is remembered about a request that has ended."""

    def void(self) -> None:  # noqa: B027 - most policies promise nothing
        """Hears that a running request lost its blocks, or that a step failed."""


class FirstComeFirstServed(AdmissionPolicy):
    """Stops at the first request that does not get in."""

    def admit(self, waiting: WaitingQueue, step_id: int, attempt: Attempt) -> list[Request]:
        while (head := waiting.head) is not None and attempt(head) is Outcome.ADMITTED:
            pass
        return []


class LookAhead(AdmissionPolicy):
    """Looks a bounded number of requests past those that do not fit, and admits whichever do.

    A request that later ones passed `max_skips` times, or that stood `max_wait_steps` steps at the
    head, blocks: nothing behind it is admitted until it is in. Requests that have run before are
    never passed by new ones.
    """

    def __init__(self, lookahead: int, max_skips: int, max_wait_steps: int) -> None:
        self._lookahead = lookahead
        self._max_skips = max_skips
        self._max_wait_steps = max_wait_steps
        self._head: Request | None = None
        self._head_since = 0

    def admit(self, waiting: WaitingQueue, step_id: int, attempt: Attempt) -> list[Request]:
        if not len(waiting):
            return []
        if waiting.head is not self._head:
            self._head, self._head_since = waiting.head, step_id
        stayed: list[Request] = []
        num_passed = 0
        while len(stayed) <= self._lookahead:
            # Those that stayed stand before it.
            request = waiting.at(len(stayed)) if stayed else waiting.head
            if request is None or (stayed and stayed[-1].has_run and not request.has_run):
                break
            outcome = attempt(request)
            if outcome is Outcome.ADMITTED:
                num_passed = len(stayed)
                continue
            if outcome is Outcome.FULL:
                break
            stayed.append(request)
            if self.is_blocking(request, step_id):
                break
        for request in stayed[:num_passed]:
            request.num_skips += 1
        return stayed[:num_passed]

    def is_blocking(self, request: Request, step_id: int) -> bool:
        """Whether nobody may pass `request` any more."""
        has_waited = request is self._head and step_id - self._head_since >= self._max_wait_steps
        return has_waited or request.num_skips >= self._max_skips

    def forget(self, request: Request) -> None:
        if request is self._head:
            self._head = None
