"""Finding the sampled tokens that might end a request, for a whole step at once."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from pagetide_scheduler.plan import Int32Column, Mask

LARGEST_TABLE = 1 << 20  # ids beyond need a binary search: a table would take too much memory


class StopTokens:
    """Every token id that ends any request. A hit is a candidate: the request itself decides."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._sorted: Int32Column = np.empty(0, np.int32)
        self._is_stop: Mask | None = None

    def include(self, token_ids: Iterable[int]) -> None:
        """Adds ids; sorts again only when there are new ones."""
        if not self._known.issuperset(token_ids):
            self._known.update(token_ids)
            self._sorted = np.array(sorted(self._known), np.int32)
            self._is_stop = None
            if self._sorted[-1] < LARGEST_TABLE:
                # One more entry, False: where `take` looks for every larger id.
                self._is_stop = np.zeros(self._sorted[-1] + 2, np.bool_)
                self._is_stop[self._sorted] = True

    def candidates(self, token_ids: Int32Column) -> Mask | None:
        """Which of `token_ids` are stop tokens of some request, None if there are none at all."""
        if not len(self._sorted):
            return None
        if self._is_stop is not None:
            return self._is_stop.take(token_ids, mode="clip")
        nearest = self._sorted.searchsorted(token_ids)
        found: Mask = self._sorted.take(nearest, mode="clip") == token_ids
        return found
