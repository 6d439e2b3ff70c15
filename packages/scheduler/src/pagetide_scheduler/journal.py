"""Writing down everything a scheduler is told and answers, and replaying it without a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, fields
from typing import Any, TextIO

import numpy as np

from pagetide_kvcache import BlockManager
from pagetide_scheduler.config import SchedulerConfig
from pagetide_scheduler.errors import SchedulerError
from pagetide_scheduler.leaving import Preemption
from pagetide_scheduler.params import SamplingParams
from pagetide_scheduler.plan import RequestOutput, StepOutput, StepPlan
from pagetide_scheduler.request import FinishReason, Request
from pagetide_scheduler.scheduler import Scheduler
from pagetide_scheduler.step_result import SampleError, StepResult


class ReplayMismatchError(SchedulerError):
    """A replayed scheduler decided differently from the recorded one."""


def digest(plan: StepPlan) -> str:
    """A hash of everything a plan says, but for the random keys, which decide nothing."""
    hasher = hashlib.blake2b(digest_size=16)
    for field in fields(plan):
        value = getattr(plan, field.name)
        if field.name in ("new_keys", "sequences", "samples"):
            continue
        hasher.update(value.tobytes() if isinstance(value, np.ndarray) else repr(value).encode())
    hasher.update(repr((plan.request_ids, plan.samples.request_ids)).encode())
    return hasher.hexdigest()


class Recorder:
    """A scheduler's methods, each call written to `out` as a line of JSON.

    Args:
        config: As for `Scheduler`.
        total_blocks: Blocks of the pool.
        block_size: Tokens a block.
        out: Where the lines go.
        host_blocks: Blocks of the host pool, 0 for none.
        enable_prefix_cache: As for `BlockManager`.
        eos_token_ids: As for `Scheduler`.
        options: Further arguments of `Scheduler`.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        total_blocks: int,
        block_size: int,
        out: TextIO,
        *,
        host_blocks: int = 0,
        enable_prefix_cache: bool = True,
        eos_token_ids: Sequence[int] = (),
        **options: Any,
    ) -> None:
        self._out = out
        start = {
            "config": asdict(config),
            "total_blocks": total_blocks,
            "block_size": block_size,
            "host_blocks": host_blocks,
            "enable_prefix_cache": enable_prefix_cache,
            "eos_token_ids": list(eos_token_ids),
        }
        self.scheduler = _make(start, **options)
        self._write("start", **start)

    def add(
        self, request_id: str, prompt: Sequence[int], params: SamplingParams, *, priority: int = 0
    ) -> Request:
        return self.add_samples((request_id,), prompt, (params,), priority=priority)[0]

    def add_samples(
        self,
        request_ids: Sequence[str],
        prompt: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        priority: int = 0,
    ) -> tuple[Request, ...]:
        requests = self.scheduler.add_samples(request_ids, prompt, params, priority=priority)
        self._write(
            "add",
            ids=list(request_ids),
            prompt=[int(token) for token in prompt],
            params=[asdict(wishes) for wishes in params],
            priority=priority,
        )
        return requests

    def finish(
        self, request_id: str, reason: FinishReason, keep_tokens: int | None = None
    ) -> RequestOutput | None:
        self._write("finish", id=request_id, reason=reason.value, keep=keep_tokens)
        return self.scheduler.finish(request_id, reason, keep_tokens)

    def preempt(self, request_id: str, way: Preemption | None = None) -> bool:
        self._write("preempt", id=request_id, way=way.value if way is not None else None)
        return self.scheduler.preempt(request_id, way)

    def schedule(self) -> StepPlan:
        plan = self.scheduler.schedule()
        self._write("schedule", step=plan.step_id, empty=plan.is_empty, digest=digest(plan))
        return plan

    def update(self, plan: StepPlan, result: StepResult) -> StepOutput:
        output = self.scheduler.update(plan, result)
        errors = [[error.sample, error.message] for error in result.errors]
        tokens = result.token_ids[:, 0].tolist()
        self._write("update", step=plan.step_id, empty=plan.is_empty, tokens=tokens, errors=errors)
        return output

    def rollback(self, plan: StepPlan, error: str = "the step failed") -> StepOutput:
        output = self.scheduler.rollback(plan, error)
        self._write("rollback", step=plan.step_id, error=error)
        return output

    def _write(self, event: str, **values: Any) -> None:
        self._out.write(json.dumps({"event": event, **values}) + "\n")


def replay(lines: Iterable[str]) -> Scheduler:
    """Runs a recording through a new scheduler and compares every plan bit for bit.

    Returns:
        The scheduler, in the state in which the recording ends.

    Raises:
        ReplayMismatchError: A plan differs; the message names the line and the step.
        ValueError: The recording does not begin with its start.
    """
    scheduler: Scheduler | None = None
    plans: dict[int, StepPlan] = {}
    for number, line in enumerate(lines, start=1):
        entry = json.loads(line)
        event = entry["event"]
        if event == "start":
            scheduler = _make(entry)
            continue
        if scheduler is None:
            raise ValueError(f"line {number}: a recording begins with its start, not {event!r}")
        if event == "schedule":
            plan = scheduler.schedule()
            if digest(plan) != entry["digest"]:
                raise ReplayMismatchError(f"line {number}: step {entry['step']} is planned anew")
            if not plan.is_empty:
                plans[plan.step_id] = plan
        elif event == "add":
            params = [_params(wishes) for wishes in entry["params"]]
            scheduler.add_samples(entry["ids"], entry["prompt"], params, priority=entry["priority"])
        elif event == "finish":
            scheduler.finish(entry["id"], FinishReason(entry["reason"]), entry["keep"])
        elif event == "preempt":
            scheduler.preempt(entry["id"], Preemption(entry["way"]) if entry["way"] else None)
        elif event == "update" and not entry["empty"]:
            errors = tuple([SampleError(sample, text) for sample, text in entry["errors"]])
            result = StepResult.of(entry["tokens"], errors=errors)
            scheduler.update(plans.pop(entry["step"]), result)
        elif event == "rollback":
            scheduler.rollback(plans.pop(entry["step"]), entry["error"])
    if scheduler is None:
        raise ValueError("the recording is empty")
    return scheduler


def _make(start: dict[str, Any], **options: Any) -> Scheduler:
    host = start["host_blocks"]
    return Scheduler(
        SchedulerConfig(**start["config"]),
        BlockManager(
            start["total_blocks"],
            start["block_size"],
            enable_prefix_cache=start["enable_prefix_cache"],
        ),
        host_block_manager=BlockManager(host, start["block_size"]) if host else None,
        eos_token_ids=start["eos_token_ids"],
        **options,
    )


def _params(values: dict[str, Any]) -> SamplingParams:
    return SamplingParams(**values)
