"""What the manager keeps of a sequence. It keeps no length: lengths are the scheduler's."""

from __future__ import annotations

from dataclasses import dataclass

from pagetide_kvcache.prefix_index import PrefixPath

__all__ = ["Admission", "SequenceState"]


@dataclass(frozen=True, slots=True)
class Admission:
    """What admitting a sequence gave.

    Attributes:
        block_ids: its block table; the cached blocks come first.
        num_cached_tokens: tokens at its beginning that need not be computed.
    """

    block_ids: tuple[int, ...]
    num_cached_tokens: int


class SequenceState:
    """A block table, and how far its content is in the prefix index."""

    __slots__ = ("block_ids", "path")

    def __init__(self, block_ids: list[int], path: PrefixPath) -> None:
        self.block_ids = block_ids
        self.path = path
