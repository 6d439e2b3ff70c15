"""Filling a plan: the running requests first, then whoever waits and fits."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pagetide_scheduler.admission import AdmissionPolicy, Outcome
from pagetide_scheduler.assembly import PlanDraft
from pagetide_scheduler.budget import share_backfill, share_budget
from pagetide_scheduler.entrance import try_to_admit
from pagetide_scheduler.plan import Batch
from pagetide_scheduler.preemption import grow_tables
from pagetide_scheduler.request import Request
from pagetide_scheduler.state import SchedulerState


def fill(
    draft: PlanDraft,
    state: SchedulerState,
    policy: AdmissionPolicy,
    suspect: Request | None,
    clock: Callable[[], float],
) -> list[Request]:
    """Fills a plan; returns the waiting requests that a later one passed.

    Nobody is admitted in a step that preempted. While there is a `suspect`, a request of a failed
    step, it runs alone, or the others do until it can be admitted.
    """
    if suspect is not None and suspect.row is not None:
        serve_running(state, policy, draft, Batch.of((suspect,)))
    elif suspect is not None:
        if try_to_admit(state, draft, clock, suspect) is not Outcome.ADMITTED:
            serve_running(state, policy, draft, state.running.batch)
    elif not serve_running(state, policy, draft, state.running.batch):
        attempt = partial(try_to_admit, state, draft, clock)
        return policy.admit(state.waiting, draft.step_id, attempt)
    return []


def serve_running(
    state: SchedulerState, policy: AdmissionPolicy, draft: PlanDraft, batch: Batch
) -> bool:
    """Plans the running requests of `batch`; returns whether anybody had to leave for them."""
    backfills = policy.backfills
    if backfills:
        batch = batch.without_all(backfills)
    limit = state.config.chunk_limit
    draft.take(share_budget(state.columns, batch, draft.budget, limit, state.steady))
    if backfills:
        draft.take(share_backfill(state.columns, backfills.values(), draft.budget))
    has_preempted = grow_tables(state, draft, draft.decode)
    if has_preempted:
        policy.void()
        draft.drop_preempted()
    return has_preempted
