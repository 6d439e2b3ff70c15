"""How much the scheduler may run at once: `SchedulerConfig`, validated when made."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

AdmissionName = Literal["fcfs", "lookahead", "reserve"]
PreemptionName = Literal["recompute", "swap", "auto"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits and policies of a `Scheduler`.

    Attributes:
        max_model_len: Tokens of a request at most, prompt and generated: the model's context.
        max_num_seqs: Requests running at once; also the number of rows of device state.
        max_num_batched_tokens: Tokens a step computes at most.
        max_chunk_tokens: Tokens of one prompt a step computes at most, so that a long prompt
            leaves budget for the first tokens of others; None leaves only the step's budget.
        admission: Whom to admit: `fcfs` stops at the first request that does not fit; `lookahead`
            looks past it and admits whichever fit, within the three limits below; `reserve`
            promises it a step and admits only whoever does not delay that.
        lookahead: Requests that do not fit and may be looked past in one step.
        max_skips: Times a request may be passed by later ones before nothing passes it any more.
        max_wait_steps: Steps a request may stand at the head before nothing passes it any more.
        max_overlap: Plans in flight at most while another is made; only promises count on it.
        preemption: How a running request gives up its blocks when they run out: `recompute`, `swap`
            to the host pool, or `auto`, whichever loses less time. Without a host pool, or where
            nothing would travel, it recomputes.
        swap_cost: Time to move a block out and in again, in prompt tokens that could be computed
            meanwhile; `auto` and the choice of whom to preempt depend on it.
        watermark: Share of the pool that admission leaves free so that running requests can grow,
            in [0, 0.01]; it does not apply when nothing runs.
        priority_steps: How many steps of waiting one level of priority is worth: a request of
            priority 1 goes before those of priority 0 that came up to this many steps earlier, so
            nobody starves.
        num_records: Steps whose records are kept.
        vocab_size: Token ids from here on are refused; None checks only that they are not negative.

    Raises:
        ValueError: A value outside its range; the message names it.
    """

    max_model_len: int
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    max_chunk_tokens: int | None = None
    admission: AdmissionName = "lookahead"
    lookahead: int = 8
    max_skips: int = 8
    max_wait_steps: int = 256
    max_overlap: int = 2
    preemption: PreemptionName = "auto"
    swap_cost: float = 4.0
    watermark: float = 0.01
    priority_steps: int = 256
    num_records: int = 1024
    vocab_size: int | None = None

    @property
    def chunk_limit(self) -> int:
        """Tokens of one prompt a step computes at most."""
        return self.max_chunk_tokens or self.max_num_batched_tokens

    def __post_init__(self) -> None:
        counts = ["max_model_len", "max_num_seqs", "max_num_batched_tokens", "priority_steps"]
        counts += ["lookahead", "max_skips", "max_wait_steps", "num_records"]
        options = ["max_chunk_tokens", "vocab_size"]
        if isinstance(self.max_overlap, bool) or not self.max_overlap >= 0:
            raise ValueError(f"max_overlap must be at least 0, got {self.max_overlap!r}")
        for name in counts + options:
            value = getattr(self, name)
            if value is None and name in options:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
        names = get_args(AdmissionName)
        if self.admission not in names:
            raise ValueError(f"admission must be one of {names}, got {self.admission!r}")
        ways = get_args(PreemptionName)
        if self.preemption not in ways:
            raise ValueError(f"preemption must be one of {ways}, got {self.preemption!r}")
        if not (math.isfinite(self.swap_cost) and self.swap_cost >= 0):
            raise ValueError(f"swap_cost must be at least 0, got {self.swap_cost}")
        if self.max_model_len < 2:
            raise ValueError("max_model_len must be at least 2: a prompt token and a generated one")
        if not (math.isfinite(self.watermark) and 0 <= self.watermark <= 0.01):
            raise ValueError(
                f"watermark must lie in [0, 0.01], got {self.watermark}; "
                "more would idle memory that running requests could use"
            )
