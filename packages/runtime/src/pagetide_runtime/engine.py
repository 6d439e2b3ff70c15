"""The loop: plan, submit, update."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import numpy as np

from pagetide_runtime.errors import EngineDeadError
from pagetide_scheduler import (
    FinishReason,
    Request,
    RequestOutput,
    SamplingParams,
    Scheduler,
    StepOutput,
    StepPlan,
    StepResult,
)

__all__ = ["Engine", "Handle", "Runner"]

_NO_NEWS = StepOutput((), np.empty(0, np.int32), ())


class Handle(Protocol):
    """A submitted step."""

    def result(self) -> StepResult:
        """Waits for the step; raises what the step raised."""


class Runner(Protocol):
    """Whatever runs plans in order; `ModelRunner`, or a toy in the tests."""

    def submit(self, plan: StepPlan) -> Handle:
        """Starts the plan."""

    def is_usable(self) -> bool:
        """Whether later plans can still succeed after one has raised."""


class _Failed:
    """The handle of a step that already raised while it was being submitted."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def result(self) -> StepResult:
        raise self._error


class Engine:
    """Runs requests to their end: a `Scheduler` decides, a runner computes.

    Args:
        scheduler: holds every request.
        runner: runs the plans.
        max_plans_in_flight: steps that may be submitted before the oldest one's result is read.
    """

    def __init__(
        self, scheduler: Scheduler, runner: Runner, *, max_plans_in_flight: int = 0
    ) -> None:
        self.scheduler = scheduler
        self.runner = runner
        self._max_plans_in_flight = max_plans_in_flight
        self._in_flight: deque[tuple[StepPlan, Handle]] = deque()
        self._death: BaseException | None = None

    @property
    def has_unfinished(self) -> bool:
        """Whether any request has not ended yet, or any step's result is still to be read."""
        if self._death is not None:
            return False
        return self.scheduler.has_unfinished or bool(self._in_flight)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
    ) -> Request:
        """Queues a request; a higher `priority` goes first.

        Raises:
            ValueError: the request can never fit, or its id is in use (`Scheduler.add`).
            EngineDeadError: the engine failed earlier and cannot be used again.
        """
        (request,) = self.add_samples((request_id,), prompt_token_ids, (params,), priority=priority)
        return request

    def add_samples(
        self,
        request_ids: Sequence[str],
        prompt_token_ids: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
    ) -> tuple[Request, ...]:
        """Queues several samples of one prompt, which is computed once.

        Raises:
            ValueError: as `add_request`, or they differ in `prompt_logprobs`.
            EngineDeadError: as `add_request`.
        """
        self._raise_if_dead()
        if len({wishes.prompt_logprobs for wishes in params}) > 1:
            raise ValueError(
                "params of one prompt's samples must agree on prompt_logprobs: it is computed once"
            )
        return self.scheduler.add_samples(request_ids, prompt_token_ids, params, priority=priority)

    def finish(
        self, request_id: str, reason: FinishReason, *, keep_tokens: int | None = None
    ) -> RequestOutput | None:
        """Ends a request from outside: a stop string, an abort. None if it has ended already."""
        if self._death is not None:
            return None
        return self.scheduler.finish(request_id, reason, keep_tokens)

    def step(self) -> StepOutput:
        """Plans a step, starts it, and takes in the oldest step that is due.

        With plans in flight the output is that of an earlier step, and may be empty. A step that
        raised ends no request by itself: the requests it concerns are computed again, each alone,
        and only one that fails alone ends with `FinishReason.ERROR`.

        Ctrl-C while the device works costs that step alone: its requests are computed again too.

        Raises:
            EngineDeadError: the engine cannot be used any more, and no request goes on.
        """
        plan = self._schedule()
        self._submit(plan)
        return self._take_oldest(is_due=plan is None)

    def _raise_if_dead(self) -> None:
        if self._death is not None:
            cause = f"{type(self._death).__name__}: {self._death}".removesuffix(": ")
            raise EngineDeadError(f"the engine failed ({cause}); build a new one") from self._death

    @contextmanager
    def _books(self) -> Iterator[None]:
        """While the scheduler writes; what breaks that off, a Ctrl-C too, leaves nothing sound."""
        try:
            yield
        except BaseException as error:
            self._death = error
            raise

    def _schedule(self) -> StepPlan | None:
        """The next plan; None if there is nothing to do, or an interrupted step to read first."""
        self._raise_if_dead()
        if len(self._in_flight) > self._max_plans_in_flight:
            return None
        with self._books():
            plan = self.scheduler.schedule()
        return None if plan.is_empty else plan

    def _submit(self, plan: StepPlan | None) -> None:
        if plan is None:
            return
        handle: Handle = _Failed(RuntimeError("the step was interrupted"))
        try:
            handle = self.runner.submit(plan)
        except Exception as error:
            handle = _Failed(error)
        finally:  # a plan that Ctrl-C cut short is in flight, too: the next step makes it void
            self._in_flight.append((plan, handle))

    def _take_oldest(self, is_due: bool) -> StepOutput:
        if not self._in_flight:
            if self.scheduler.has_unfinished:
                raise RuntimeError(
                    "the scheduler planned nothing although requests wait and none is in flight; "
                    "this is a defect of the scheduler, please report it"
                )
            return _NO_NEWS
        if not is_due and len(self._in_flight) <= self._max_plans_in_flight:
            return _NO_NEWS
        plan, handle = self._in_flight[0]
        try:
            result = handle.result()  # an interrupt here loses nothing: the plan is still the next
        except Exception as error:
            return self._recover(plan, error)
        with self._books():
            self._in_flight.popleft()
            return self.scheduler.update(plan, result)

    def _recover(self, plan: StepPlan, error: Exception) -> StepOutput:
        """Drains the runner, so that nothing written late can reach a block given out again."""
        for _, handle in self._in_flight:
            try:
                handle.result()
            except Exception:
                continue
        self._in_flight.clear()
        if not self.runner.is_usable():
            self._death = error
            for request_id in self.scheduler.unfinished_ids:
                self.scheduler.finish(request_id, FinishReason.ERROR, error=str(error))
            raise EngineDeadError(f"the device failed: {error}") from error
        with self._books():
            return self.scheduler.rollback(plan, f"{type(error).__name__}: {error}")
