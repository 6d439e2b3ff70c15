"""Sharing a step's token budget among the running requests."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pagetide_scheduler.assembly import Chunk
from pagetide_scheduler.columns import RunningColumns
from pagetide_scheduler.plan import Batch


@dataclass(frozen=True, slots=True)
class Shares:
    """Who computes in the next step.

    Attributes:
        decode: Requests with one token left to compute; each samples its next one. Oldest first.
        chunks: The others' next tokens.
    """

    decode: Batch
    chunks: list[Chunk]


def share_budget(
    columns: RunningColumns, batch: Batch, budget: int, max_chunk_tokens: int
) -> Shares:
    """Decode first, oldest first; then the prompts, oldest first, each up to its cap.

    A request whose known and in-flight tokens reach its limit has nothing left to compute: it ends
    when its last result is read.
    """
    rows = batch.rows
    total = columns.num_tokens[rows] + columns.num_inflight_tokens[rows]
    left = total - columns.num_computed_tokens[rows]
    left[total >= columns.limits[rows]] = 0
    if len(rows) <= budget and (left == 1).all():
        return Shares(batch, [])

    decode = (left == 1).nonzero()[0][:budget]
    budget -= len(decode)
    chunks = []
    for index in (left > 1).nonzero()[0].tolist():
        if not budget:
            break
        request = batch.requests[index]
        count = min(int(left[index]), budget, max_chunk_tokens)
        chunks.append(Chunk(request, request.num_computed_tokens, count))
        budget -= count
    return Shares(batch.take(np.asarray(decode)), chunks)
