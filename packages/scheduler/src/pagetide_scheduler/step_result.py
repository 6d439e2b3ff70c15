"""What a step produced, as whoever ran it says."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pagetide_scheduler.plan import Int32Column


@dataclass(frozen=True, slots=True)
class SampleError:
    """An error of one sample: its index in the plan's sampling columns, and what went wrong."""

    sample: int
    message: str


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Log-probabilities of some of a request's prompt tokens, each given the tokens before it.

    Attributes:
        sequence: Index of the request in the plan's sequence columns.
        start: Position of the first of these tokens; at least 1, since nothing precedes token 0.
        values: float32 [N], for the positions `start` to `start + N - 1`
    """

    sequence: int
    start: int
    values: npt.NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced, in the order of the plan's sampling columns.

    Attributes:
        token_ids: Accepted tokens. int32 [S, K]
        num_tokens: How many of each row's K count. int32 [S]
        logprobs: Their log-probabilities, if any were asked for. float32 [S, K]
        errors: Samples that failed; their requests end, the others go on.
        prompt_logprobs: For the requests that asked for them, in ascending positions.

    Raises:
        ValueError: Columns whose shapes disagree, or an error for a sample that does not exist.
    """

    token_ids: Int32Column
    num_tokens: Int32Column
    logprobs: npt.NDArray[np.float32] | None = None
    errors: tuple[SampleError, ...] = ()
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 2 or self.num_tokens.shape != self.token_ids.shape[:1]:
            raise ValueError(
                f"token_ids must be [S, K] and num_tokens [S], got {self.token_ids.shape} and "
                f"{self.num_tokens.shape}"
            )
        if self.logprobs is not None and self.logprobs.shape != self.token_ids.shape:
            raise ValueError(
                f"logprobs must have the shape of token_ids {self.token_ids.shape}, got "
                f"{self.logprobs.shape}"
            )
        for error in self.errors:
            if not 0 <= error.sample < len(self.num_tokens):
                raise ValueError(f"error for sample {error.sample} of {len(self.num_tokens)}")

    @classmethod
    def of(
        cls,
        token_ids: npt.ArrayLike,
        *,
        errors: tuple[SampleError, ...] = (),
        prompt_logprobs: tuple[PromptLogprobs, ...] = (),
    ) -> StepResult:
        """One token a sample, from anything that numpy reads as [S] integers."""
        column = np.asarray(token_ids, np.int32).reshape(-1, 1)
        ones = np.ones(len(column), np.int32)
        return cls(column, ones, errors=errors, prompt_logprobs=prompt_logprobs)
