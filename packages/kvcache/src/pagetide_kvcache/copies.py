"""Copies that the device must perform, and the rules that those of one plan keep."""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["BlockCopy", "CopyDirection", "PlanCopies"]


class CopyDirection(enum.Enum):
    """Where a copy's source and destination lie."""

    WITHIN = "within"
    """From a block of the pool to another."""
    OUT = "out"
    """From a block of the pool to a block in host memory."""
    IN = "in"
    """From a block in host memory to a block of the pool."""


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """One block's content, every layer's keys, values and scales, to be copied as it stands.

    Attributes:
        source: block id read.
        destination: block id written.
        direction: whether one of the two ids means a block in host memory.
    """

    source: int
    destination: int
    direction: CopyDirection = CopyDirection.WITHIN


class PlanCopies:
    """The copies of the plan that is being made.

    A plan's copies all run before its tokens. So that their order among themselves cannot matter,
    no block is written twice or both read and written: the blocks they name are held, that is, not
    given to anybody new until the next plan; and a copy of a copy reads what the first one reads.

    Before the first `start` there is no plan: a caller that never makes one performs each copy at
    once, and nothing is held.
    """

    __slots__ = ("_has_plan", "_source_of", "held")

    def __init__(self) -> None:
        self._has_plan = False
        self._source_of: dict[int, int] = {}
        self.held: dict[int, None] = {}

    def start(self) -> list[int]:
        """Begins the next plan; returns the blocks held until now."""
        held = list(self.held)
        self._has_plan = True
        self._source_of.clear()
        self.held.clear()
        return held

    def add(self, source: int, destination: int) -> BlockCopy:
        if self._has_plan:
            source = self._source_of.get(source, source)
            self._source_of[destination] = source
            self.held[source] = self.held[destination] = None
        return BlockCopy(source, destination)
