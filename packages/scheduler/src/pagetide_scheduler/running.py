"""The running requests in their order, oldest first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from pagetide_scheduler.plan import EMPTY_BATCH, Batch
from pagetide_scheduler.request import Request

MOST_LEFT = 8  # requests that may leave a batch one by one before it is cheaper to rebuild it


def _order(request: Request) -> tuple[int, int]:
    return request.order


class RunningSet:
    """Requests that hold a row, in order.

    `batch` follows single changes, which are cheap where they happen at the young end, and is
    rebuilt after many.
    """

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._batch: Batch | None = EMPTY_BATCH
        self._came: list[Request] = []  # at the end, not in the batch yet
        self._num_left = 0

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        requests = self._requests
        if not requests or requests[-1].order < request.order:
            requests.append(request)
            self._came.append(request)
        else:
            insort(requests, request, key=_order)
            self._batch = None

    def remove(self, request: Request) -> None:
        index = bisect_left(self._requests, request.order, key=_order)
        del self._requests[index]
        if self._came or self._num_left == MOST_LEFT:
            self._batch = None
        elif self._batch is not None:
            self._batch = self._batch.without(index)
            self._num_left += 1

    def younger_than(self, request: Request) -> list[Request]:
        """The requests behind `request`, oldest first."""
        return self._requests[bisect_left(self._requests, request.order, key=_order) + 1 :]

    def adopt(self, before: Batch, after: Batch) -> None:
        """Takes `after` for its batch if that is the batch `before` and whoever came since."""
        if before is self._batch and self._came == list(after.requests[len(before) :]):
            self._batch = after
            self._came.clear()

    @property
    def batch(self) -> Batch:
        """All of them, as columns."""
        if self._batch is None:
            self._batch = Batch.of(tuple(self._requests))
        elif self._came:
            self._batch = self._batch + Batch.of(tuple(self._came))
        self._came.clear()
        self._num_left = 0
        return self._batch
