"""Continuous batching over a paged KV cache, without torch.

`Scheduler` turns requests into `StepPlan`s, columns that say what one step computes, and reads
`StepResult`s back. It runs no model and imports no torch.
"""

from pagetide_scheduler.__about__ import __version__
from pagetide_scheduler.config import SchedulerConfig
from pagetide_scheduler.errors import (
    PlanOrderError,
    RequestRefusedError,
    RequestTooLargeError,
    SchedulerError,
)
from pagetide_scheduler.leaving import Preemption
from pagetide_scheduler.params import SamplingParams
from pagetide_scheduler.plan import RequestOutput, StepOutput, StepPlan
from pagetide_scheduler.records import StepRecord
from pagetide_scheduler.request import FinishReason, LengthLimit, Request, RequestState
from pagetide_scheduler.scheduler import Scheduler
from pagetide_scheduler.step_result import PromptLogprobs, SampleError, StepResult

__all__ = [
    "FinishReason",
    "LengthLimit",
    "PlanOrderError",
    "Preemption",
    "PromptLogprobs",
    "Request",
    "RequestOutput",
    "RequestRefusedError",
    "RequestState",
    "RequestTooLargeError",
    "SampleError",
    "SamplingParams",
    "Scheduler",
    "SchedulerConfig",
    "SchedulerError",
    "StepOutput",
    "StepPlan",
    "StepRecord",
    "StepResult",
    "__version__",
]
