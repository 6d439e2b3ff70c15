"""After a failed step: who starts over, who runs alone, and who is to blame."""

from __future__ import annotations

from pagetide_scheduler.errors import PlanOrderError
from pagetide_scheduler.leaving import forget_blocks, start_over
from pagetide_scheduler.plan import Batch, StepPlan
from pagetide_scheduler.request import Request
from pagetide_scheduler.state import SchedulerState


class Recovery:
    """Requests of failed steps, each of which runs alone until its next token is known."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._suspects: dict[str, Request] = {}

    @property
    def suspect(self) -> Request | None:
        """The request whose turn it is to run alone: the oldest one that is not cleared."""
        if not self._suspects:
            return None
        return min(self._suspects.values(), key=lambda request: request.order)

    def clear(self, samples: Batch) -> None:
        """Trusts requests again whose token has arrived."""
        if self._suspects:
            for request in samples.requests:
                self.forget(request)

    def forget(self, request: Request) -> None:
        """Drops a request that has ended or is trusted again."""
        if request.is_suspect:
            request.is_suspect = False
            del self._suspects[request.request_id]

    def restart(self, plan: StepPlan) -> Request | None:
        """Makes `plan` and every later one void; who was last named by them starts over.

        Nothing that a void plan wrote is trusted and no earlier block table is restored: these
        requests give back their blocks and wait, ahead of new ones, with the tokens the host knows.

        Returns:
            The request that failed alone, for the second time, and must end. It waits, too.

        Raises:
            PlanOrderError: The plan is not in flight.
        """
        state = self._state
        if all(plan is not other for other in state.plans):
            raise PlanOrderError(f"plan {plan.step_id} is not in flight: it was read or is void")
        while state.plans.pop() is not plan:
            pass
        culprit = None
        if plan.num_seqs == 1 and plan.sequences.requests[0].is_suspect:
            culprit = plan.sequences.requests[0]

        running = [r for r in state.running if state.columns.last_steps[r.row] >= plan.step_id]
        for request in running:
            start_over(state, request)
        for request in state.waiting.returning:
            if request.last_step >= plan.step_id:
                # An earlier plan in flight may name it too; it must not start before that is read.
                request.last_step = plan.step_id - 1
                forget_blocks(state, request)
                request.is_suspect = True
                self._suspects[request.request_id] = request
        return culprit
