"""A request: the only form it ever has inside the engine."""

from __future__ import annotations

import enum
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from pagetide_kvcache import PrefixPath
from pagetide_scheduler.params import MOST_TOKENS, SamplingParams

if TYPE_CHECKING:
    from pagetide_scheduler.columns import RunningColumns


class FinishReason(enum.Enum):
    """Why a request ended."""

    STOP = "stop"
    """An end-of-sequence id, a stop token or a stop string."""
    LENGTH = "length"
    """`max_tokens` tokens were generated."""
    CONTEXT = "context"
    """The model's context is full."""
    POOL = "pool"
    """The request fills the whole KV pool."""
    ABORT = "abort"
    """The caller no longer wants it."""
    ERROR = "error"
    """Its step failed, and again when it ran alone; or the model reported an error for it."""


class RequestState(enum.Enum):
    """Where a request stands; derived, never stored."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class LengthLimit:
    """The most tokens a request may ever have, prompt included, and the reason that names it."""

    num_tokens: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class SwappedBlocks:
    """What a preempted request left behind.

    Attributes:
        num_kept: Leading blocks that it still holds on the device; the others are on the host.
        num_computed_tokens: Tokens whose keys and values these blocks hold together.
    """

    num_kept: int
    num_computed_tokens: int


@dataclass(slots=True, eq=False)
class Request:
    """One request, changed only by the `Scheduler`.

    While it runs its counters live in `RunningColumns` at `row`, and the properties here read them
    there; `tokens` then lags behind by at most the open block, which the columns hold.

    Attributes:
        request_id: The caller's name for it.
        num_prompt_tokens: Length of the prompt.
        params: The user's wishes.
        key: 64 random bits that every draw of this request is keyed by.
        limit: Fixed when it was added.
        priority: The caller's wish; higher goes first.
        order: Place among all requests; smaller is served first and preempted last. It holds
            priority and age in one, and never changes.
        arrival_time: When it was added, on the scheduler's clock.
        queue_key: Its place in the queue among those of equal priority.
        leader: The sample of the same prompt that computes it for this one too, until they part.
        followers: The samples that this one computes the prompt for.
        row: Its place in device state while it runs.
        num_skips: Steps in which a later request was admitted past it since it began to wait.
        prefix_path: How much of it the prefix cache knew when it was last asked; holds no block.
        swapped: Where its blocks are, if it was swapped out.
        prompt_logprobs: Log-probabilities of the prompt's tokens from the second on, as far as
            they are known, if the user asked for them; samples of a prompt share them.
        last_step: The last plan that names it, while it does not run (a running request's is in
            the columns).
    """

    request_id: str
    num_prompt_tokens: int
    params: SamplingParams
    key: int
    limit: LengthLimit
    priority: int
    order: tuple[int, int]
    arrival_time: float
    tokens: array[int]
    stop_token_ids: frozenset[int]
    columns: RunningColumns = field(repr=False)
    queue_key: int
    leader: Request | None = field(default=None, repr=False)
    followers: list[Request] = field(default_factory=list, repr=False)
    row: int | None = None
    last_step: int = 0
    is_suspect: bool = False
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    num_skips: int = 0
    num_swaps: int = 0
    swapped: SwappedBlocks | None = None
    prefix_path: PrefixPath | None = field(default=None, repr=False)
    admitted_time: float | None = None
    first_token_time: float | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: array[float] | None = None

    @property
    def state(self) -> RequestState:
        if self.finish_reason is not None:
            return RequestState.FINISHED
        return RequestState.WAITING if self.row is None else RequestState.RUNNING

    @property
    def has_run(self) -> bool:
        """Whether it was ever admitted; if it waits, it does so ahead of those that were not."""
        return self.admitted_time is not None

    @property
    def num_tokens(self) -> int:
        """Tokens that the host knows: the prompt and every result read so far."""
        return len(self.tokens) if self.row is None else int(self.columns.num_tokens[self.row])

    @property
    def num_computed_tokens(self) -> int:
        """Tokens whose keys and values are in its blocks once every plan so far has run."""
        return 0 if self.row is None else int(self.columns.num_computed_tokens[self.row])

    @property
    def num_inflight_tokens(self) -> int:
        """Tokens sampled for its row by steps whose results are not read yet."""
        if self.row is None:
            return 0
        columns = self.columns
        return int(columns.num_total_tokens[self.row] - columns.num_tokens[self.row])

    @property
    def num_generated_tokens(self) -> int:
        return self.num_tokens - self.num_prompt_tokens

    @property
    def token_ids(self) -> Sequence[int]:
        """A copy of every known token, prompt first."""
        return (
            self.tokens + self.columns.open_tail(self) if self.row is not None else self.tokens[:]
        )

    @property
    def min_stop_length(self) -> int:
        """Length at which a stop token may first end it: `min_tokens` others precede that."""
        return min(self.num_prompt_tokens + self.params.min_tokens + 1, MOST_TOKENS)

    def stops_at(self, token_id: int, num_tokens: int) -> FinishReason | None:
        """Whether `token_id`, as the token number `num_tokens`, ends this request, and why."""
        if token_id in self.stop_token_ids and num_tokens >= self.min_stop_length:
            return FinishReason.STOP
        return self.limit.reason if num_tokens >= self.limit.num_tokens else None
