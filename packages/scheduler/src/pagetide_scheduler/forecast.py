"""When the running requests will have ended at the latest, and what they need until then."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagetide_scheduler.plan import Batch, Int64Column, Mask
from pagetide_scheduler.state import SchedulerState


@dataclass(frozen=True, slots=True)
class Forecast:
    """The worst case: nobody stops before its limit.

    Time is counted in updates from now: an update reads one plan, and the plans in flight come
    first.

    Attributes:
        batch: The running requests.
        ends: Updates until each has surely ended. int64 [N]
        busy_until: Updates until a step surely leaves budget for somebody else.
        all_ended: Updates until everybody has, with the samples that wait for a running request.
        num_in_flight: Plans in flight now.
        max_ahead: Plans in flight at most while another is made.
    """

    batch: Batch
    ends: Int64Column
    busy_until: int
    all_ended: int
    num_in_flight: int
    max_ahead: int


def forecast(state: SchedulerState) -> Forecast:
    """Runs the budget's rule on the running requests alone until everybody decodes.

    From there each gets a token a step, so the rest needs no simulation.
    """
    columns, batch, config = state.columns, state.running.batch, state.config
    rows = batch.rows
    total = columns.num_total_tokens[rows]
    left = total - columns.num_computed_tokens[rows]
    to_sample = columns.limits[rows] - total
    in_flight = len(state.plans)
    plan_ids = np.array([plan.step_id for plan in state.plans], np.int64)
    ends = plan_ids.searchsorted(columns.last_steps[rows], side="right")

    max_tokens = max(1, config.max_num_batched_tokens - state.num_followers)
    step = 0
    while True:
        is_active = to_sample > 0
        decoding = (is_active & (left == 1)).nonzero()[0]
        prefilling = (is_active & (left > 1)).nonzero()[0]
        if not len(prefilling) and len(decoding) < max_tokens:
            break
        step += 1
        served = decoding[:max_tokens]
        to_sample[served] -= 1
        budget = max_tokens - len(served)
        for index in prefilling.tolist():
            count = min(int(left[index]), budget, config.chunk_limit)
            left[index] -= count
            budget -= count
            if not left[index]:
                left[index] = 1
                to_sample[index] -= 1
        ends[is_active] = in_flight + step
    ends += to_sample
    ends[to_sample > 0] = in_flight + step + to_sample[to_sample > 0]
    max_ahead = max(in_flight, config.max_overlap)
    all_ended = int(ends.max(initial=0))
    for request, end in zip(batch.requests, ends.tolist(), strict=True):
        for follower in request.followers:
            rest = follower.limit.num_tokens - follower.num_prompt_tokens
            all_ended = max(all_ended, end + rest)
    busy_until = in_flight + step if step else 0
    return Forecast(batch, ends, busy_until, all_ended, in_flight, max_ahead)


def worst_growth(state: SchedulerState, future: Forecast, is_alive: Mask, updates: int) -> int:
    """Blocks that the requests in `is_alive` may take until `updates` from now, at most."""
    columns, rows = state.columns, future.batch.rows[is_alive]
    # Those read by then, those in flight then, and the one that is being made: it grows first.
    num_plans = max(0, updates - future.num_in_flight) + future.max_ahead + 1
    total = columns.num_total_tokens[rows].astype(np.int64)
    most = np.minimum(columns.limits[rows] - 1, total - 1 + num_plans)
    new_blocks = np.maximum(0, -(-most // columns.block_size) * columns.block_size)
    new_blocks = np.maximum(0, new_blocks - columns.capacities[rows]) // columns.block_size
    following = sum(
        state.most_blocks(follower) - follower.num_prompt_tokens // columns.block_size
        for leader in state.leaders.values()
        for follower in leader.followers
    )
    return int(new_blocks.sum()) + int(columns.is_open_shared[rows].sum()) + following
