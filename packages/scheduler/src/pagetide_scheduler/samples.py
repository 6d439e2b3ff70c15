"""Several samples of one prompt: it is computed once, and they part at the first token.

The first sample leads: it alone waits, is admitted and computes the prompt, while rows are kept
for its followers. In the plan that computes the last prompt token they fork: each gets a row, the
prompt's blocks by reference, and a first token sampled from the same logits. Whoever then writes
to the open block first copies it. From there on they are requests like any other.
"""

from __future__ import annotations

from itertools import repeat

from pagetide_scheduler.assembly import Fork, PlanDraft
from pagetide_scheduler.leaving import forget_blocks, release
from pagetide_scheduler.request import Request
from pagetide_scheduler.state import SchedulerState


def follow(leader: Request, followers: list[Request]) -> None:
    """Lets `followers` wait for `leader` to compute their prompt."""
    leader.leader = None
    leader.followers = followers
    for follower in followers:
        follower.leader = leader


def fork_samples(state: SchedulerState, draft: PlanDraft, now: float) -> None:
    """Parts the samples whose prompt this plan completes."""
    for leader in list(state.leaders.values()):
        if _completes(draft, leader):
            for follower in leader.followers:
                _fork(state, draft, leader, follower)
                follower.admitted_time = now
            leader.followers = []
            del state.leaders[leader.request_id]


def hand_over(state: SchedulerState, leader: Request) -> None:
    """Lets the next sample lead, because `leader` is about to end with its prompt not computed."""
    successor, *others = leader.followers
    follow(successor, others)
    leader.followers = []
    if leader.row is None:
        forget_blocks(state, leader)
        state.waiting.replace(leader, successor)
    else:
        release(state, leader)
        state.waiting.add_returning(successor)


def unfollow(state: SchedulerState, follower: Request, leader: Request) -> None:
    """Forgets a sample that ends before the prompt is computed."""
    leader.followers.remove(follower)
    if not leader.followers:
        state.leaders.pop(leader.request_id, None)


def _completes(draft: PlanDraft, leader: Request) -> bool:
    for chunk in draft.chunks:
        if chunk.request is leader:
            return chunk.end == leader.num_tokens
    return leader.request_id in draft.decode.request_ids


def _fork(state: SchedulerState, draft: PlanDraft, leader: Request, follower: Request) -> None:
    columns, blocks = state.columns, state.blocks
    num_tokens = leader.num_tokens
    blocks.fork(leader.request_id, follower.request_id, num_tokens)
    table = blocks.sequence_blocks[follower.request_id]
    row = columns.enter(follower, draft.step_id, num_tokens, len(table))
    columns.num_total_tokens[row] += 1
    if num_tokens % columns.block_size:
        columns.share_open_block(leader, follower)
    state.running.add(follower)
    follower.leader = None
    follower.num_cached_tokens = num_tokens
    follower.prompt_logprobs = leader.prompt_logprobs
    draft.new.append(follower)
    draft.forks.append(Fork(leader, follower))
    draft.change_tables(repeat(row, len(table)), range(len(table)), table)
