"""The admission policies by name."""

from __future__ import annotations

from pagetide_scheduler.admission import AdmissionPolicy, FirstComeFirstServed, LookAhead
from pagetide_scheduler.reservation import Reserve
from pagetide_scheduler.state import SchedulerState


def make_policy(state: SchedulerState) -> AdmissionPolicy:
    """The policy that the configuration's `admission` names."""
    config = state.config
    if config.admission == "fcfs":
        return FirstComeFirstServed()
    if config.admission == "reserve":
        return Reserve(state)
    return LookAhead(config.lookahead, config.max_skips, config.max_wait_steps)
