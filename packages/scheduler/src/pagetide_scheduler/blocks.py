"""Blocks for a request that is admitted."""

from __future__ import annotations

from pagetide_kvcache import Admission, OutOfBlocksError
from pagetide_scheduler.request import Request
from pagetide_scheduler.state import SchedulerState


def take_blocks(state: SchedulerState, request: Request) -> Admission | None:
    """Blocks for every known token of `request`, those of its cached prefix by reference, or None.

    While others run, the watermark's blocks are left for them to grow into.
    """
    blocks, tokens, name = state.blocks, request.tokens, request.request_id
    num_blocks = -(-len(tokens) // blocks.block_size)
    reserve = state.num_watermark_blocks if state.running else 0
    reads_cache = not request.params.prompt_logprobs
    num_cached = blocks.match_prefix(tokens) if reads_cache else 0
    if num_blocks - num_cached + reserve > blocks.num_available_blocks:
        return None
    try:
        if reads_cache:
            admission = blocks.admit(name, tokens, len(tokens))
        else:
            admission = Admission(blocks.allocate_blocks(name, num_blocks), 0)
    except OutOfBlocksError:  # some of the cached blocks are themselves among the available ones
        return None
    if blocks.num_available_blocks < reserve:
        blocks.free_sequence(name)
        return None
    return admission
