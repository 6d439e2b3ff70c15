"""The running requests' part of a plan."""

from __future__ import annotations

from pagetide_scheduler.admission import AdmissionPolicy
from pagetide_scheduler.assembly import PlanDraft
from pagetide_scheduler.budget import share_backfill, share_budget
from pagetide_scheduler.plan import Batch
from pagetide_scheduler.preemption import grow_tables
from pagetide_scheduler.state import SchedulerState


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
