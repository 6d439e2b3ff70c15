"""What is decided about a request when it arrives: whether it can ever fit, its limit, its key."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from pagetide_scheduler.errors import RequestRefusedError, RequestTooLargeError
from pagetide_scheduler.params import SamplingParams
from pagetide_scheduler.request import FinishReason, LengthLimit, Request
from pagetide_scheduler.state import SchedulerState

_MASK = 2**64 - 1


class Arrivals:
    """Makes requests and gives each its place in the order.

    Args:
        state: The books.
        eos_token_ids: The model's end-of-sequence ids.
        source: Draws the keys of requests without a seed.
    """

    def __init__(
        self, state: SchedulerState, eos_token_ids: frozenset[int], source: random.Random
    ) -> None:
        self._state = state
        self._eos_token_ids = eos_token_ids
        self._source = source
        self._num_made = 0

    def make_requests(
        self,
        request_ids: Sequence[str],
        prompt_token_ids: Sequence[int],
        params: Sequence[SamplingParams],
        *,
        priority: int,
        now: float,
    ) -> list[Request]:
        """A request for each sample of one prompt, or none of them.

        Raises:
            RequestRefusedError: They cannot be taken; see `Scheduler.add_samples`.
            ValueError: There are none, not as many parameters as ids, or no whole priority.
        """
        state = self._state
        check_names(request_ids, state)
        if isinstance(priority, bool) or not isinstance(priority, int):
            raise ValueError(f"priority must be a whole number, got {priority!r}")
        tokens = read_prompt(request_ids[0], prompt_token_ids, state.config.vocab_size)
        # Age and priority in one number that never changes: all who wait grow older alike.
        place = state.progress.next_step_id - priority * state.config.priority_steps
        requests: list[Request] = []
        for request_id, wishes in zip(request_ids, params, strict=True):
            number = self._num_made + len(requests)
            request = Request(
                request_id=request_id,
                num_prompt_tokens=len(tokens),
                params=wishes,
                key=make_key(wishes.seed, self._source),
                limit=set_limit(request_id, len(tokens), wishes, state),
                priority=priority,
                order=(place, number),
                arrival_time=now,
                tokens=tokens[:],
                stop_token_ids=stop_token_ids(wishes, self._eos_token_ids),
                columns=state.columns,
                queue_key=number,
                prompt_logprobs=array("f") if wishes.prompt_logprobs else None,
            )
            requests.append(request)
        self._num_made += len(requests)
        return requests


def check_names(request_ids: Sequence[str], state: SchedulerState) -> None:
    """Whether these samples of one prompt may be told apart and run at once.

    Raises:
        RequestRefusedError: An id is taken, or there are too many.
        ValueError: There are none.
    """
    if not request_ids:
        raise ValueError("request_ids must name at least one sample")
    for index, request_id in enumerate(request_ids):
        if request_id in state.requests or request_id in request_ids[:index]:
            raise RequestRefusedError(request_id, "an unfinished request has this id")
    if len(request_ids) > state.config.max_num_seqs:
        raise RequestRefusedError(
            request_ids[0],
            f"{len(request_ids)} samples of its prompt cannot run at once: max_num_seqs is "
            f"{state.config.max_num_seqs}",
        )


def read_prompt(request_id: str, token_ids: Sequence[int], vocab_size: int | None) -> array[int]:
    """The prompt as int32.

    Raises:
        RequestRefusedError: It is empty, or an id lies outside the vocabulary.
    """
    if not len(token_ids):
        raise RequestRefusedError(request_id, "its prompt is empty; give at least one token")
    end = 2**31 if vocab_size is None else vocab_size
    for token_id in (min(token_ids), max(token_ids)):
        if not 0 <= token_id < end:
            raise RequestRefusedError(request_id, f"token id {token_id} is not in 0..{end - 1}")
    try:
        return array("i", list(token_ids))
    except TypeError as error:
        raise RequestRefusedError(request_id, f"token ids must be whole numbers: {error}") from None


def set_limit(
    request_id: str, num_prompt_tokens: int, params: SamplingParams, state: SchedulerState
) -> LengthLimit:
    """The least of `max_tokens`, the context and the pool, whose last token needs no slot.

    Raises:
        RequestTooLargeError: Not even one token could follow the prompt.
    """
    needed = num_prompt_tokens + 1
    pool_tokens = state.blocks.total_blocks * state.blocks.block_size
    max_model_len = state.config.max_model_len
    if needed > max_model_len:
        raise RequestTooLargeError(
            request_id, num_tokens=needed, max_tokens=max_model_len, resource="context"
        )
    if needed > pool_tokens:
        raise RequestTooLargeError(
            request_id, num_tokens=needed, max_tokens=pool_tokens, resource="pool"
        )
    limits = [
        LengthLimit(max_model_len, FinishReason.CONTEXT),
        LengthLimit(pool_tokens + 1, FinishReason.POOL),
    ]
    if params.max_tokens is not None:
        limits.insert(0, LengthLimit(num_prompt_tokens + params.max_tokens, FinishReason.LENGTH))
    return min(limits, key=lambda limit: limit.num_tokens)  # of equals the first: the user's own


def stop_token_ids(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The ids that end a request; the common set itself where it adds none of its own."""
    own = frozenset(params.stop_token_ids)
    if params.ignore_eos:
        return own
    return own | eos_token_ids if own else eos_token_ids


def make_key(seed: int | None, source: random.Random) -> int:
    """64 bits that key a request's random numbers: splitmix64 of its seed, or drawn from `source`.

    Nearby seeds must not give related keys, hence the mixing.
    """
    if seed is None:
        return source.getrandbits(64)
    z = (seed + 0x9E3779B97F4A7C15) & _MASK
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
    return z ^ (z >> 31)
