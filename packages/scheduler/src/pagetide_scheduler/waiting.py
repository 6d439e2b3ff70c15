"""The requests that wait: those that gave up their blocks, then the new ones, each in order."""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Iterator
from itertools import islice

from pagetide_scheduler.request import Request


def _order(request: Request) -> tuple[int, int]:
    return request.order


class WaitingQueue:
    """A queue whose every operation is independent of its length.

    New requests stand in one lane a priority, each lane in order of arrival; reading in order
    merges the lanes' heads. Requests that return after a preemption or a failed step are few
    (at most as many as ran) and stand before all new ones, sorted.
    """

    def __init__(self) -> None:
        self._returning: list[Request] = []
        self._lanes: dict[int, OrderedDict[int, Request]] = {}
        self._num_new = 0
        self._head: Request | None = None

    def __len__(self) -> int:
        return len(self._returning) + self._num_new

    def __iter__(self) -> Iterator[Request]:
        """In the order of admission; the queue must not change meanwhile."""
        yield from self._returning
        lanes = [lane.values() for lane in self._lanes.values()]
        yield from lanes[0] if len(lanes) == 1 else heapq.merge(*lanes, key=_order)

    @property
    def returning(self) -> tuple[Request, ...]:
        """Requests that have run before, oldest first."""
        return tuple(self._returning)

    @property
    def head(self) -> Request | None:
        """The request at the front: found once and kept, since every step asks for it."""
        if self._head is None:
            self._head = self._find_head()
        return self._head

    def _find_head(self) -> Request | None:
        if self._returning:
            return self._returning[0]
        if len(self._lanes) > 1:
            return min([next(iter(lane.values())) for lane in self._lanes.values()], key=_order)
        for lane in self._lanes.values():
            return next(iter(lane.values()))
        return None

    def at(self, index: int) -> Request | None:
        """The request that `index` others stand before; costs O(index)."""
        return next(islice(self, index, None), None) if index else self.head

    def first(self, count: int) -> list[Request]:
        """The `count` requests at the front, or all if there are fewer."""
        return list(islice(self, count))

    def add(self, request: Request) -> None:
        """Takes a new request, which must be the latest of its priority."""
        self._lanes.setdefault(request.priority, OrderedDict())[request.queue_key] = request
        self._num_new += 1
        if len(self._lanes) > 1:
            self._head = None  # it may be of a higher priority

    def add_returning(self, request: Request) -> None:
        """Takes a request back that has run."""
        insort(self._returning, request, key=_order)
        self._head = None

    def replace(self, request: Request, successor: Request) -> None:
        """Puts `successor` in the place of a request that waits."""
        self._head = None
        successor.queue_key = request.queue_key
        lane = self._lanes.get(request.priority)
        if lane is not None and request.queue_key in lane:
            lane[request.queue_key] = successor
        else:
            self.remove(request)
            self.add_returning(successor)

    def remove(self, request: Request) -> None:
        """Removes a request that waits."""
        if request is self._head:
            self._head = None
        lane = self._lanes.get(request.priority)
        if lane is not None and lane.pop(request.queue_key, None) is not None:
            self._num_new -= 1
            if not lane:
                del self._lanes[request.priority]
        else:
            del self._returning[bisect_left(self._returning, request.order, key=_order)]
