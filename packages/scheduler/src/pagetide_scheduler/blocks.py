"""Blocks for a request that is admitted."""

from __future__ import annotations

from pagetide_kvcache import Admission, BlockCopy, CopyDirection, OutOfBlocksError
from pagetide_scheduler.leaving import keep_apart
from pagetide_scheduler.request import Request, SwappedBlocks
from pagetide_scheduler.state import SchedulerState


def take_blocks(state: SchedulerState, request: Request) -> Admission | None:
    """Blocks for every known token of `request`, or None if there are not enough.

    What is computed already comes from the prefix cache by reference, or back from the host. While
    others run, the watermark's blocks are left for them to grow into.
    """
    if request.swapped is not None:
        return _swap_in(state, request, request.swapped)
    blocks, tokens, name = state.blocks, request.tokens, request.request_id
    num_blocks = -(-len(tokens) // blocks.block_size)
    reads_cache = not request.params.prompt_logprobs
    reserve = state.num_watermark_blocks if state.running else 0
    num_lacking = num_blocks + reserve - blocks.num_available_blocks
    if not reads_cache:
        if num_lacking > 0:
            return None
        return Admission(blocks.allocate_blocks(name, num_blocks), 0)
    if num_lacking <= 0:  # enough even if nothing of it is cached
        return blocks.admit(name, tokens, len(tokens))
    request.prefix_path = blocks.follow_prefix(tokens, request.prefix_path)
    if num_lacking > request.prefix_path.num_blocks:
        return None
    try:
        admission = blocks.admit(name, tokens, len(tokens))
    except OutOfBlocksError:  # some of the cached blocks are themselves among the available ones
        return None
    if blocks.num_available_blocks < reserve:
        blocks.free_sequence(name)
        return None
    return admission


def _swap_in(state: SchedulerState, request: Request, swapped: SwappedBlocks) -> Admission | None:
    blocks, host, name = state.blocks, state.host_blocks, request.request_id
    if host is None:
        raise ValueError("there is no host pool to swap in from")
    num_blocks = -(-len(request.tokens) // blocks.block_size)
    reserve = state.num_watermark_blocks if state.running else 0
    if num_blocks - swapped.num_kept + reserve > blocks.num_available_blocks:
        return None
    # The kept blocks are full, so nothing that others hold is written and nothing copied here.
    blocks.grow(name, swapped.num_kept * blocks.block_size, len(request.tokens))
    table = blocks.sequence_blocks[name]
    sources = host.sequence_blocks[name]
    destinations = table[swapped.num_kept : swapped.num_kept + len(sources)]
    copies = [
        BlockCopy(source, destination, CopyDirection.IN)
        for source, destination in zip(sources, destinations, strict=True)
    ]
    keep_apart(state, copies)
    state.swap_copies.extend(copies)
    # Nobody swaps out behind an admission, so no copy of this plan writes these host blocks.
    host.free_sequence(name)
    request.swapped = None
    return Admission(table, swapped.num_computed_tokens)
