"""The output of a request that has ended."""

from __future__ import annotations

from pagetide_scheduler.plan import RequestOutput
from pagetide_scheduler.request import Request


def make_output(
    request: Request, now: float, *, error: str | None = None, keep_tokens: int | None = None
) -> RequestOutput:
    """Everything the caller is told; `keep_tokens` generated tokens count, or all.

    Raises:
        ValueError: The request has not ended.
    """
    if request.finish_reason is None:
        raise ValueError(f"request {request.request_id!r} has not ended")
    prompt, generated = (
        request.tokens[: request.num_prompt_tokens],
        request.tokens[request.num_prompt_tokens :],
    )
    admitted = now if request.admitted_time is None else request.admitted_time
    first = now if request.first_token_time is None else request.first_token_time
    logprobs = request.prompt_logprobs
    return RequestOutput(
        request_id=request.request_id,
        prompt_token_ids=tuple(prompt),
        token_ids=tuple(generated if keep_tokens is None else generated[:keep_tokens]),
        finish_reason=request.finish_reason,
        num_cached_tokens=request.num_cached_tokens,
        num_preemptions=request.num_preemptions,
        queue_seconds=admitted - request.arrival_time,
        prefill_seconds=first - admitted,
        decode_seconds=now - first,
        error=error,
        prompt_logprobs=None if logprobs is None else (None, *logprobs),
    )
