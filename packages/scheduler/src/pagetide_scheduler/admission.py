"""Who of the waiting requests gets a row and blocks, and when."""

from __future__ import annotations

import enum
from collections.abc import Callable

from pagetide_kvcache import Admission, OutOfBlocksError
from pagetide_scheduler.request import Request
from pagetide_scheduler.state import SchedulerState
from pagetide_scheduler.waiting import WaitingQueue


class Outcome(enum.Enum):
    """What became of an attempt to admit a request."""

    ADMITTED = "admitted"
    NO_ROOM = "not enough blocks"
    IN_FLIGHT = "a step that names it is not read yet"
    FULL = "no row or no budget left"


class FirstComeFirstServed:
    """Admits in order and stops at the first request that does not get in."""

    def admit(self, waiting: WaitingQueue, attempt: Callable[[Request], Outcome]) -> None:
        """Calls `attempt`, which takes a request out of `waiting` if it succeeds."""
        for request in iter(lambda: next(iter(waiting), None), None):
            if attempt(request) is not Outcome.ADMITTED:
                return


def take_blocks(state: SchedulerState, request: Request) -> Admission | None:
    """Blocks for every known token of `request`, those of its cached prefix by reference, or None.

    While others run, a few blocks are left for them to grow into.
    """
    blocks = state.blocks
    tokens = request.tokens
    reads_cache = not request.params.prompt_logprobs
    reserve = int(state.config.watermark * blocks.total_blocks) if state.running else 0
    try:
        if reads_cache:
            admission = blocks.admit(request.request_id, tokens, len(tokens))
        else:
            num_blocks = -(-len(tokens) // blocks.block_size)
            admission = Admission(blocks.allocate_blocks(request.request_id, num_blocks), 0)
    except OutOfBlocksError:
        return None
    if blocks.num_available_blocks < reserve:
        blocks.free_sequence(request.request_id)
        return None
    return admission
