"""Traces of requests: when they come, how long they are, what they share."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

_VOCAB_SIZE = 32_000


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """A line of a trace.

    Attributes:
        arrival: Seconds from the start.
        prompt_tokens: Length of the prompt.
        output_tokens: Tokens after which it stops by itself.
        max_tokens: Tokens its caller allows; the scheduler knows only this.
        prefix: Requests of the same prefix begin with the same tokens.
        prefix_tokens: How many.
        priority: As for `Scheduler.add`.

    Raises:
        ValueError: A value outside its range.
    """

    arrival: float
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    prefix: str = ""
    prefix_tokens: int = 0
    priority: int = 0

    def __post_init__(self) -> None:
        if self.arrival < 0 or self.prompt_tokens < 1:
            raise ValueError(f"arrival must not be negative and prompt_tokens at least 1: {self}")
        if not 1 <= self.output_tokens <= self.max_tokens:
            raise ValueError(f"output_tokens must lie in 1..max_tokens: {self}")
        if not 0 <= self.prefix_tokens <= self.prompt_tokens:
            raise ValueError(f"prefix_tokens must lie in 0..prompt_tokens: {self}")

    def prompt(self, index: int) -> list[int]:
        """Made-up tokens, the same for the same trace. Ids from 1; 0 is end-of-sequence."""
        shared = random.Random(f"prefix {self.prefix}")
        own = random.Random(f"request {index}")
        tokens = [shared.randrange(1, _VOCAB_SIZE) for _ in range(self.prefix_tokens)]
        tokens += [
            own.randrange(1, _VOCAB_SIZE) for _ in range(self.prompt_tokens - self.prefix_tokens)
        ]
        return tokens


def shipped_traces() -> tuple[str, ...]:
    """Names of the traces that come with this package."""
    folder = resources.files("pagetide_scheduler") / "traces"
    return tuple(sorted(f.name.removesuffix(".jsonl") for f in folder.iterdir()))


def read_trace(source: str) -> list[TraceRequest]:
    """Reads a file of one JSON object a line, or a shipped trace by its name.

    Raises:
        ValueError: A line is not a request; the message names it.
        FileNotFoundError: There is neither such a file nor such a shipped trace.
    """
    if source in shipped_traces():
        folder = resources.files("pagetide_scheduler") / "traces"
        text = (folder / f"{source}.jsonl").read_text(encoding="utf-8")
    elif Path(source).is_file():
        text = Path(source).read_text(encoding="utf-8")
    else:
        raise FileNotFoundError(
            f"no file {source!r}; the traces shipped are {', '.join(shipped_traces())}"
        )
    requests = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                requests.append(TraceRequest(**json.loads(line)))
            except (TypeError, ValueError) as error:
                raise ValueError(f"{source}, line {number}: {error}") from None
    if not requests:
        raise ValueError(f"{source} holds no request")
    return sorted(requests, key=lambda request: request.arrival)


def write_trace(requests: Iterable[TraceRequest]) -> str:
    """The requests as JSON lines, defaults left out."""
    lines = []
    for request in requests:
        values: dict[str, float | str] = {
            "arrival": round(request.arrival, 4),
            "prompt_tokens": request.prompt_tokens,
            "output_tokens": request.output_tokens,
            "max_tokens": request.max_tokens,
        }
        if request.prefix:
            values |= {"prefix": request.prefix, "prefix_tokens": request.prefix_tokens}
        if request.priority:
            values["priority"] = request.priority
        lines.append(json.dumps(values))
    return "\n".join(lines) + "\n"
