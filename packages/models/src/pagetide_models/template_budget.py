"""What a rendering of a chat template may still do: units of work, and time."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

__all__ = ["BoundsExceededError", "Budget", "Counted"]


class BoundsExceededError(RuntimeError):
    """A template did more than it may."""


class Budget:
    """Work that is left, and when to stop."""

    def __init__(self, work: int, seconds: float) -> None:
        self.left = work
        self.end = time.monotonic() + seconds
        self.seconds = seconds

    def charge(self, units: int = 1) -> None:
        self.left -= units
        if self.left < 0:
            raise BoundsExceededError("it does more work than the messages can justify")
        if time.monotonic() > self.end:
            raise BoundsExceededError(f"it takes more than {self.seconds:g} seconds")

    def charge_value(self, value: object) -> Any:
        """Pay for a value as if it were written out, and return it."""
        self.charge(self.measure(value)[0])
        return value

    def measure(self, value: object) -> tuple[int, int]:
        """Size and nesting depth of a value; stops with an error where it exceeds what is left."""
        size = depth = 0
        level = [value]
        while level:
            depth += 1
            below: list[object] = []
            for item in level:
                size += 1
                if isinstance(item, (str, bytes)):
                    size += len(item)
                elif isinstance(item, int):
                    size += item.bit_length() // 8
                elif isinstance(item, dict):
                    below += [*item.keys(), *item.values()]
                elif isinstance(item, (list, tuple, set, frozenset)):
                    below += item
                if size + len(below) > self.left:
                    self.charge(self.left + 1)
            level = below
        return size, depth


class Counted:
    """An iterable whose every step is charged; as long as what it wraps, if that has a length."""

    def __init__(self, iterable: Iterable[Any], budget: Budget) -> None:
        self.iterable = iterable
        self.budget = budget

    def __iter__(self) -> Iterator[Any]:
        for item in self.iterable:
            self.budget.charge()
            yield item

    def __len__(self) -> int:
        return len(self.iterable)  # type: ignore[arg-type]
