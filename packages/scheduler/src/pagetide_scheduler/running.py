"""The running requests in their order, oldest first."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from pagetide_scheduler.plan import Batch
from pagetide_scheduler.request import Request


def _order(request: Request) -> tuple[int, int]:
    return request.order


class RunningSet:
    """Requests that hold a row, in order; `batch` is rebuilt only on change."""

    def __init__(self) -> None:
        self._requests: list[Request] = []
        self._batch: Batch | None = None

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._requests)

    def add(self, request: Request) -> None:
        insort(self._requests, request, key=_order)
        self._batch = None

    def remove(self, request: Request) -> None:
        del self._requests[bisect_left(self._requests, request.order, key=_order)]
        self._batch = None

    def younger_than(self, request: Request) -> list[Request]:
        """The requests behind `request`, oldest first."""
        return self._requests[bisect_left(self._requests, request.order, key=_order) + 1 :]

    @property
    def batch(self) -> Batch:
        """All of them, as columns."""
        if self._batch is None:
            self._batch = Batch.of(tuple(self._requests))
        return self._batch
