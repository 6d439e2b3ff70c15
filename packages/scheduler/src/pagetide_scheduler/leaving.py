"""How a running request gives up its row and its blocks: for good, to start over, or to be swapped.

A swapped request keeps its leading blocks as far as others hold them too: they would not come free
anyway. Every later block travels to the host pool, an open shared one too. Rows and blocks may be
given away by the next plan whatever is in flight, since plans run in order and copies come first.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

from pagetide_kvcache import BlockCopy, CopyDirection
from pagetide_scheduler.request import Request, SwappedBlocks
from pagetide_scheduler.state import SchedulerState


class Preemption(enum.Enum):
    """What becomes of a preempted request's blocks."""

    RECOMPUTE = "recompute"
    """They are freed; the request computes its tokens again."""
    SWAP = "swap"
    """They travel to the host pool and back."""


@dataclass(frozen=True, slots=True)
class Sacrifice:
    """What it costs to preempt a request in a certain way.

    Attributes:
        way: How.
        num_kept: Leading blocks that stay.
        num_travelling: Blocks that travel.
        num_freed: Blocks that come free.
        lost_tokens: Work lost, as tokens of prompt that could be computed in the time.
    """

    way: Preemption
    num_kept: int
    num_travelling: int
    num_freed: int
    lost_tokens: float

    @property
    def cost(self) -> tuple[float, float]:
        """Lost work a freed block; freeing nothing is worst, but still an order."""
        if self.num_freed:
            return (self.lost_tokens / self.num_freed, 0.0)
        return (float("inf"), self.lost_tokens)


def weigh(state: SchedulerState, request: Request, forced: Preemption | None = None) -> Sacrifice:
    """The cheaper way to preempt `request`, or the forced one where that is possible."""
    blocks, host = state.blocks, state.host_blocks
    table = blocks.sequence_blocks[request.request_id]
    ref_count = blocks.ref_count
    references = [ref_count[block_id] for block_id in table]
    num_computed = request.num_computed_tokens
    recompute = Sacrifice(Preemption.RECOMPUTE, 0, 0, references.count(1), num_computed)
    # Half a prompt's log-probabilities cannot be gone on with in another row.
    is_scored = request.params.prompt_logprobs and request.first_token_time is None
    if host is None or forced is Preemption.RECOMPUTE or is_scored:
        return recompute
    num_full = num_computed // blocks.block_size
    num_kept = max((i + 1 for i in range(num_full) if references[i] > 1), default=0)
    num_travelling = -(-num_computed // blocks.block_size) - num_kept
    if num_travelling <= 0 or num_travelling > host.num_available_blocks:
        return recompute
    lost = num_travelling * state.config.swap_cost
    num_freed = references[num_kept:].count(1)
    swap = Sacrifice(Preemption.SWAP, num_kept, num_travelling, num_freed, lost)
    wished = forced.value if forced is not None else state.config.preemption
    if wished == "auto":
        return min(swap, recompute, key=lambda sacrifice: sacrifice.cost)
    return swap if wished == "swap" else recompute


def release(state: SchedulerState, request: Request) -> None:
    """Takes row and blocks from a running request."""
    _leave_row(state, request)
    state.blocks.free_sequence(request.request_id)


def start_over(state: SchedulerState, request: Request) -> None:
    """Lets a running request compute everything again: it waits, ahead of new ones."""
    release(state, request)
    request.num_preemptions += 1
    state.progress.preempted.append(request.request_id)
    state.waiting.add_returning(request)


def give_up(state: SchedulerState, request: Request, sacrifice: Sacrifice) -> None:
    """Preempts a running request the way that was weighed."""
    if sacrifice.way is Preemption.SWAP and state.host_blocks is not None:
        _swap_out(state, request, sacrifice)
    else:
        start_over(state, request)


def forget_blocks(state: SchedulerState, request: Request) -> None:
    """Drops what a waiting request holds, on the device and on the host: it will recompute."""
    host = state.host_blocks
    if request.swapped is None or host is None:
        return
    here = set(host.sequence_blocks[request.request_id])
    state.swap_copies[:] = [
        copy
        for copy in state.swap_copies
        if copy.direction is not CopyDirection.OUT or copy.destination not in here
    ]
    host.free_sequence(request.request_id)
    state.blocks.free_sequence(request.request_id)
    request.swapped = None


def keep_apart(state: SchedulerState, copies: Iterable[BlockCopy]) -> None:
    """Makes sure that no block which this plan copies out is the destination of `copies`, too.

    A plan's copies may run in any order. Whoever's block was given away again within the plan that
    would have copied it out recomputes instead.
    """
    written = {copy.destination for copy in copies}
    clashing = {
        copy.destination
        for copy in state.swap_copies
        if copy.direction is CopyDirection.OUT and copy.source in written
    }
    if clashing and state.host_blocks is not None:
        for request in state.waiting.returning:
            if request.swapped is not None:
                on_host = state.host_blocks.sequence_blocks[request.request_id]
                if not clashing.isdisjoint(on_host):
                    forget_blocks(state, request)


def forget_kept_blocks(state: SchedulerState) -> bool:
    """Drops one swapped request's blocks, if it kept any on the device; the youngest first."""
    for request in reversed(state.waiting.returning):
        if request.swapped is not None and request.swapped.num_kept:
            forget_blocks(state, request)
            return True
    return False


def _swap_out(state: SchedulerState, request: Request, sacrifice: Sacrifice) -> None:
    blocks, host, name = state.blocks, state.host_blocks, request.request_id
    if host is None:
        raise ValueError("there is no host pool to swap to")
    num_kept, num_travelling = sacrifice.num_kept, sacrifice.num_travelling
    sources = blocks.sequence_blocks[name][num_kept : num_kept + num_travelling]
    destinations = host.allocate_blocks(name, num_travelling)
    state.swap_copies.extend(
        BlockCopy(source, destination, CopyDirection.OUT)
        for source, destination in zip(sources, destinations, strict=True)
    )
    request.swapped = SwappedBlocks(num_kept, request.num_computed_tokens)
    _leave_row(state, request)
    request.last_step = state.progress.next_step_id  # the plan that performs the copies names it
    blocks.truncate(name, num_kept * blocks.block_size)
    request.num_preemptions += 1
    state.progress.preempted.append(request.request_id)
    request.num_swaps += 1
    state.waiting.add_returning(request)


def _leave_row(state: SchedulerState, request: Request) -> None:
    state.running.remove(request)
    state.columns.leave(request)
    state.leaders.pop(request.request_id, None)
