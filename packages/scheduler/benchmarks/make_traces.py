"""Writes the three traces that the package ships; run it again and they are the same.

python benchmarks/make_traces.py
"""

from __future__ import annotations

import random
from pathlib import Path

from pagetide_scheduler.trace import TraceRequest, write_trace

FOLDER = Path(__file__).parent.parent / "src" / "pagetide_scheduler" / "traces"


def chat(draw: random.Random, arrival: float) -> TraceRequest:
    """A chat turn: one of four system prompts, a question, an answer that ends before its limit."""
    question = min(400, int(draw.lognormvariate(3.5, 0.8)) + 4)
    answer = min(200, int(draw.lognormvariate(3.8, 0.7)) + 1)
    prefix = f"system{draw.randrange(4)}"
    return TraceRequest(arrival, 96 + question, answer, 256, prefix, 96)


def poisson() -> list[TraceRequest]:
    """300 chat turns at a steady rate."""
    draw = random.Random(1)
    arrival = 0.0
    requests = []
    for _ in range(300):
        arrival += draw.expovariate(70.0)
        requests.append(chat(draw, arrival))
    return requests


def bursty() -> list[TraceRequest]:
    """The same turns, in three bursts of a hundred, two seconds apart."""
    draw = random.Random(1)
    requests = []
    for index in range(300):
        requests.append(chat(draw, 2.0 * (index // 100) + draw.random() * 0.2))
    return requests


def giant() -> list[TraceRequest]:
    """A stream of small requests, and one that needs most of the pool, twice."""
    draw = random.Random(2)
    requests = []
    for index in range(600):
        length, answer = draw.randint(8, 60), draw.randint(8, 60)
        requests.append(TraceRequest(index / 170, length, answer, answer + 4))
    requests.append(TraceRequest(0.5, 3000, 40, 64))
    requests.append(TraceRequest(2.0, 3000, 40, 64))
    return requests


def main() -> None:
    for make in (poisson, bursty, giant):
        (FOLDER / f"{make.__name__}.jsonl").write_text(write_trace(make()), encoding="utf-8")


if __name__ == "__main__":
    main()
