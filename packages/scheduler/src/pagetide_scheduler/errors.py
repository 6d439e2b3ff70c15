"""What the scheduler refuses, as exceptions that carry the numbers."""

from __future__ import annotations

from typing import Literal


class SchedulerError(Exception):
    """Base of every error of this package that is not a plain bad argument."""


class RequestRefusedError(SchedulerError, ValueError):
    """A request that `Scheduler.add` does not take; nothing has changed.

    Attributes:
        request_id: The request that was refused.
    """

    def __init__(self, request_id: str, message: str) -> None:
        super().__init__(f"request {request_id!r} refused: {message}")
        self.request_id = request_id


class RequestTooLargeError(RequestRefusedError):
    """A request whose prompt and one more token can never fit.

    Attributes:
        request_id: The request that was refused.
        num_tokens: Tokens it needs at least: its prompt and one more.
        max_tokens: Tokens there are.
        resource: What is too small: the block `pool` or the model's `context`.
    """

    def __init__(
        self,
        request_id: str,
        *,
        num_tokens: int,
        max_tokens: int,
        resource: Literal["pool", "context"],
    ) -> None:
        remedy = {
            "pool": "shorten the prompt or give the KV cache more blocks",
            "context": "shorten the prompt or raise max_model_len if the model allows it",
        }[resource]
        super().__init__(
            request_id,
            f"its prompt and one more token are {num_tokens} tokens, but the {resource} holds "
            f"{max_tokens}; {remedy}",
        )
        self.num_tokens = num_tokens
        self.max_tokens = max_tokens
        self.resource = resource


class PlanOrderError(SchedulerError, ValueError):
    """A plan handed back out of order, twice, or after a rollback made it void."""
