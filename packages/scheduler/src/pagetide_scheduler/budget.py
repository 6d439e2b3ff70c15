"""Sharing a step's token budget among the running requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pagetide_scheduler.admission import Backfill
from pagetide_scheduler.assembly import Chunk, Shares
from pagetide_scheduler.columns import RunningColumns
from pagetide_scheduler.plan import EMPTY_BATCH, Batch
from pagetide_scheduler.request import Request


@dataclass(slots=True)
class Steadiness:
    """For how long it is certain that every request of a batch decodes.

    Whoever decodes goes on with a token a step until its limit, so nobody need be asked before
    the first limit is near; a batch in which somebody comes or leaves is another batch.
    """

    batch: Batch = EMPTY_BATCH
    num_steps: int = 0


def share_budget(
    columns: RunningColumns, batch: Batch, budget: int, max_chunk_tokens: int, steady: Steadiness
) -> Shares:
    """Decode first, oldest first; then the prompts, oldest first, each up to its cap.

    A request whose known and in-flight tokens reach its limit has nothing left to compute: it ends
    when its last result is read.
    """
    if batch is steady.batch and steady.num_steps and len(batch) <= budget:
        steady.num_steps -= 1
        return Shares(batch, [])
    rows = batch.rows
    left = columns.num_total_tokens[rows] - columns.num_computed_tokens[rows]
    to_sample = columns.limits[rows] - columns.num_total_tokens[rows]
    left[to_sample <= 0] = 0
    if len(rows) <= budget and np.count_nonzero(left == 1) == len(rows):
        steady.batch = batch
        steady.num_steps = int(to_sample[to_sample.argmin()]) - 1 if len(batch) else 0
        return Shares(batch, [])

    decode = (left == 1).nonzero()[0][:budget]
    budget -= len(decode)
    chunks = []
    for index in (left > 1).nonzero()[0].tolist():
        if not budget:
            break
        request = batch.requests[index]
        count = min(int(left[index]), budget, max_chunk_tokens)
        chunks.append(Chunk.next_of(request, count))
        budget -= count
    return Shares(batch.take(np.asarray(decode)), chunks)


def share_backfill(columns: RunningColumns, backfills: Iterable[Backfill], budget: int) -> Shares:
    """Requests admitted past a reservation get only what the others leave, less one token.

    Those that must end in time come first and never get more than they were promised, so that each
    gets that much. The token is the head's, whose turn may come in this step.
    """
    budget -= 1
    decode: list[Request] = []
    chunks: list[Chunk] = []
    for backfill in sorted(backfills, key=lambda b: b.tokens_a_step is None):
        request = backfill.request
        total = request.num_tokens + request.num_inflight_tokens
        left = total - request.num_computed_tokens
        if budget <= 0 or total >= request.limit.num_tokens:
            continue
        if left == 1:
            decode.append(request)
            budget -= 1
        else:
            count = min(left, budget, backfill.tokens_a_step or left)
            chunks.append(Chunk.next_of(request, count))
            budget -= count
    return Shares(Batch.of(tuple(decode)), chunks)
