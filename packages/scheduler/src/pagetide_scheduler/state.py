"""What the parts of the scheduler share: who runs, who waits, which plans are in flight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from pagetide_kvcache import BlockCopy, BlockManager
from pagetide_scheduler.budget import Steadiness
from pagetide_scheduler.columns import RunningColumns
from pagetide_scheduler.config import SchedulerConfig
from pagetide_scheduler.plan import StepPlan
from pagetide_scheduler.request import Request
from pagetide_scheduler.running import RunningSet
from pagetide_scheduler.waiting import WaitingQueue


@dataclass(slots=True)
class Progress:
    """Counts of what has happened.

    Attributes:
        next_step_id: Number of the next plan that is not empty.
        num_updates: Results read.
        preempted: Requests that gave up their blocks since the last plan that was not empty.
    """

    next_step_id: int = 1
    num_updates: int = 0
    preempted: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class SchedulerState:
    """The scheduler's books; the reference is fixed, the contents change.

    Attributes:
        requests: Every unfinished request by id.
        running: Those that hold a row and blocks.
        waiting: All others, but for samples that follow another.
        host_blocks: The pool that swapped requests' blocks go to, if there is one.
        swap_copies: Copies out to it and in from it that the next plan performs.
        num_watermark_blocks: Blocks that admission leaves free while others run.
        steady: How long all running requests decode for sure.
        leaders: Running requests that compute a prompt for others too.
        plans: Plans in flight, oldest first.
    """

    config: SchedulerConfig
    blocks: BlockManager
    columns: RunningColumns
    requests: dict[str, Request]
    running: RunningSet
    waiting: WaitingQueue
    leaders: dict[str, Request]
    plans: deque[StepPlan]
    progress: Progress
    host_blocks: BlockManager | None
    swap_copies: list[BlockCopy]
    num_watermark_blocks: int
    steady: Steadiness = field(default_factory=Steadiness)

    def most_blocks(self, request: Request) -> int:
        """Blocks that `request` ever needs at most: its last token needs no slot."""
        return -(-(request.limit.num_tokens - 1) // self.blocks.block_size)

    @property
    def num_followers(self) -> int:
        """Rows that are kept for samples of prompts that are being computed."""
        if not self.leaders:
            return 0
        return sum(len(leader.followers) for leader in self.leaders.values())

    def is_in_flight(self, request: Request) -> bool:
        """Whether a plan that names this waiting request is being made or not read yet."""
        oldest = self.plans[0].step_id if self.plans else self.progress.next_step_id
        return request.last_step >= oldest
