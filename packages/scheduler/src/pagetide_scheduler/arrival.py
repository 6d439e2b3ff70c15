"""What is decided about a request when it arrives: whether it can ever fit, its limit, its key."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence

from pagetide_scheduler.config import SchedulerConfig
from pagetide_scheduler.errors import RequestRefusedError, RequestTooLargeError
from pagetide_scheduler.params import SamplingParams
from pagetide_scheduler.request import FinishReason, LengthLimit

_MASK = 2**64 - 1


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
    request_id: str,
    num_prompt_tokens: int,
    params: SamplingParams,
    config: SchedulerConfig,
    pool_tokens: int,
) -> LengthLimit:
    """The least of `max_tokens`, the context and the pool, whose last token needs no slot.

    Raises:
        RequestTooLargeError: Not even one token could follow the prompt.
    """
    needed = num_prompt_tokens + 1
    if needed > config.max_model_len:
        raise RequestTooLargeError(
            request_id, num_tokens=needed, max_tokens=config.max_model_len, resource="context"
        )
    if needed > pool_tokens:
        raise RequestTooLargeError(
            request_id, num_tokens=needed, max_tokens=pool_tokens, resource="pool"
        )
    limits = [
        LengthLimit(config.max_model_len, FinishReason.CONTEXT),
        LengthLimit(pool_tokens + 1, FinishReason.POOL),
    ]
    if params.max_tokens is not None:
        limits.insert(0, LengthLimit(num_prompt_tokens + params.max_tokens, FinishReason.LENGTH))
    return min(limits, key=lambda limit: limit.num_tokens)  # of equals the first: the user's own


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
