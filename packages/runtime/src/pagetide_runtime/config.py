"""What a user may ask of an engine, validated once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

__all__ = ["EngineConfig"]

AdmissionName = Literal["fcfs", "lookahead", "reserve"]
PreemptionName = Literal["recompute", "swap", "auto"]


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and choices of one engine; everything has a default that works.

    Attributes:
        device: `"auto"` (CUDA where there is a usable card, else the CPU), or a torch device
            string.
        dtype: the weights' and activations' dtype, or `"auto"` (`pagetide_models.load_model`).
        kv_dtype: what keys and values are stored as, or `"auto"` (the model's dtype).
        attention_backend: a name of `pagetide_kernels.available_backends()`, or `"auto"`.
        block_size: tokens a KV block.
        num_blocks: blocks of the pool; None sizes it from the device's memory (`memory.py`).
        memory_fraction: the share of the device's free memory that the pool may take when
            `num_blocks` is None.
        max_model_len: tokens a request may reach, prompt included; None is the model's own limit.
        max_num_seqs: requests that may run at once.
        max_num_batched_tokens: the token budget of one step.
        admission: whom to admit when not all fit: `fcfs`, `lookahead` or `reserve`
            (`pagetide_scheduler.SchedulerConfig`).
        preemption: how a running request gives up its blocks when they run out: `recompute`,
            `swap` to host memory, or `auto`, whichever loses less time.
        num_host_blocks: blocks of host memory to swap to; 0 for none.
        enable_prefix_cache: whether finished blocks may serve later requests.
        max_plans_in_flight: how many steps may be planned before the first one's result is read:
            0 waits for each step, 1 plans the next while the card computes.

    Raises:
        ValueError: a number is out of range; the message names it, its value and the remedy.
    """

    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    attention_backend: str = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    memory_fraction: float | None = None
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 2048
    admission: AdmissionName = "lookahead"
    preemption: PreemptionName = "auto"
    num_host_blocks: int = 0
    enable_prefix_cache: bool = True
    max_plans_in_flight: int = 0

    def __post_init__(self) -> None:
        at_least_one = ("block_size", "max_num_seqs", "max_num_batched_tokens")
        optional = ("num_blocks", "max_model_len")
        for name in at_least_one + optional:
            value = getattr(self, name)
            if value is None and name in optional:
                continue
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"{name}={value!r}: give a whole number of at least 1")
        for name, known in (
            ("admission", get_args(AdmissionName)),
            ("preemption", get_args(PreemptionName)),
        ):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}: give one of {', '.join(known)}")
        num_host = self.num_host_blocks
        if not isinstance(num_host, int) or isinstance(num_host, bool) or num_host < 0:
            raise ValueError(
                f"num_host_blocks={self.num_host_blocks!r}: give a whole number, 0 for no swapping"
            )
        if self.max_plans_in_flight not in (0, 1, 2):
            raise ValueError(
                f"max_plans_in_flight={self.max_plans_in_flight!r}: give 0, 1 or 2; "
                "more would only delay the discovery of finished requests"
            )
        share = self.memory_fraction
        if share is not None and not (isinstance(share, (int, float)) and 0.0 < share <= 1.0):
            raise ValueError(f"memory_fraction={share!r}: give a share above 0 and at most 1")
