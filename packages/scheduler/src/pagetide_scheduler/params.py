"""What a user may wish for: `SamplingParams`, validated when made."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

MOST_TOKENS = 2**31 - 1  # what columns of int32 can say, of lengths and of token ids
MOST_TEMPERATURE = 3e38  # of float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the tokens of one request are drawn, and when it ends.

    Attributes:
        temperature: 0 (or anything under 1e-5) takes the likeliest token; else logits are divided
            by it.
        top_k: Keep the `top_k` likeliest tokens; 0 and -1 keep all.
        top_p: Keep the likeliest tokens until their probability reaches `top_p`, in (0, 1].
        seed: Key of this request's random numbers; None draws one.
        max_tokens: Tokens to generate at most; None leaves the context and the pool as limits.
        min_tokens: Tokens before which neither end-of-sequence nor a stop token ends the request.
        stop: Strings that end the text; matched by the runtime, which has the text.
        stop_token_ids: Token ids that end the request as end-of-sequence does.
        ignore_eos: Whether the model's end-of-sequence ids are ordinary tokens here.
        prompt_logprobs: Whether the prompt's log-probabilities are wanted. Such a request reads
            nothing from the prefix cache, since a hit computes no logits; what it computes is
            still cached for others.

    Raises:
        ValueError: A value outside its range; the message names it.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    prompt_logprobs: bool = False

    def __post_init__(self) -> None:
        set_field = object.__setattr__  # the dataclass is frozen; values are normalised once, here
        set_field(self, "temperature", _number("temperature", self.temperature))
        set_field(self, "top_p", _number("top_p", self.top_p))
        set_field(self, "top_k", max(0, _integer("top_k", self.top_k, at_least=-1)))
        if self.top_k > MOST_TOKENS:
            raise ValueError(f"top_k must fit in int32, got {self.top_k}; 0 keeps every token")
        set_field(self, "min_tokens", _integer("min_tokens", self.min_tokens, at_least=0))
        if self.max_tokens is not None:
            set_field(self, "max_tokens", _integer("max_tokens", self.max_tokens, at_least=1))
        if self.seed is not None:
            set_field(self, "seed", _integer("seed", self.seed))
        set_field(self, "stop", (self.stop,) if isinstance(self.stop, str) else tuple(self.stop))
        ids = tuple(_integer("stop_token_ids", t, at_least=0) for t in self.stop_token_ids)
        set_field(self, "stop_token_ids", ids)
        if ids and max(ids) > MOST_TOKENS:
            raise ValueError(f"stop_token_ids must fit in int32, got {max(ids)}")

        if not 0 <= self.temperature <= MOST_TEMPERATURE:
            raise ValueError(
                f"temperature must lie in 0..{MOST_TEMPERATURE:g}, got {self.temperature}"
            )
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}; 1 keeps every token")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must not exceed max_tokens, got {self.min_tokens} and "
                f"{self.max_tokens}"
            )
        if not all(isinstance(text, str) and text for text in self.stop):
            raise ValueError(f"stop must hold non-empty strings, got {self.stop!r}")


def _number(name: str, value: Any) -> float:
    if isinstance(value, (bool, str)):
        raise ValueError(f"{name} must be a number, got {value!r}")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"{name} must be a number, got {value!r}") from None
    if not math.isfinite(number):
        raise ValueError(f"{name} must be finite, got {value!r}")
    return number


def _integer(name: str, value: Any, *, at_least: int | None = None) -> int:
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ValueError(f"{name} must be a whole number, got {value!r}") from None
    if at_least is not None and number < at_least:
        raise ValueError(f"{name} must be at least {at_least}, got {number}")
    return number
