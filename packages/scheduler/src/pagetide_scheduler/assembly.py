"""A plan while it is being made, and its columns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pagetide_kvcache import BlockCopy
from pagetide_scheduler.columns import RunningColumns, row_of
from pagetide_scheduler.plan import EMPTY_BATCH, Batch, Int32Column, StepPlan
from pagetide_scheduler.request import Request

EMPTY: Int32Column = np.empty(0, np.int32)
EMPTY.flags.writeable = False
NO_KEYS = np.empty(0, np.uint64)
NO_KEYS.flags.writeable = False


class Chunk(NamedTuple):
    """The part of a request's known tokens that one step computes."""

    request: Request
    start: int
    num_tokens: int

    @classmethod
    def next_of(cls, request: Request, num_tokens: int) -> Chunk:
        """The next `num_tokens` tokens of a running request."""
        return cls(request, request.num_computed_tokens, num_tokens)

    @property
    def end(self) -> int:
        return self.start + self.num_tokens


class Fork(NamedTuple):
    """A sample that takes its first token from the logits of another."""

    source: Request
    target: Request


class Shares(NamedTuple):
    """Running requests' part of a step.

    Attributes:
        decode: Requests with one token left to compute; each samples its next one.
        chunks: The others' next tokens.
    """

    decode: Batch
    chunks: list[Chunk]

    @property
    def num_tokens(self) -> int:
        return len(self.decode) + sum(chunk.num_tokens for chunk in self.chunks)


@dataclass(slots=True)
class PlanDraft:
    """What the next plan holds so far.

    Attributes:
        step_id: The plan's number, if it will not be empty.
        budget: Tokens it may still take.
        decode: Requests that compute just one token and sample the next, oldest first.
        chunks: Requests that compute more, or are new.
        new: Requests that this plan gives a row.
        forks: Samples that part from another in this plan.
    """

    step_id: int
    budget: int
    decode: Batch = EMPTY_BATCH
    chunks: list[Chunk] = field(default_factory=list)
    new: list[Request] = field(default_factory=list)
    forks: list[Fork] = field(default_factory=list)
    copies: list[BlockCopy] = field(default_factory=list)
    table_rows: list[int] = field(default_factory=list)
    table_indices: list[int] = field(default_factory=list)
    table_blocks: list[int] = field(default_factory=list)

    def take(self, shares: Shares) -> None:
        """Adds the tokens of running requests."""
        self.decode = self.decode + shares.decode if len(self.decode) else shares.decode
        self.chunks += shares.chunks
        self.budget -= shares.num_tokens

    def drop_preempted(self) -> None:
        """Leaves out the requests that no longer run."""
        stayed = [request.row is not None for request in self.decode.requests]
        self.decode = self.decode.take(np.flatnonzero(stayed))
        self.chunks = [chunk for chunk in self.chunks if chunk.request.row is not None]

    def change_tables(
        self, rows: Iterable[int], indices: Iterable[int], blocks: Iterable[int]
    ) -> None:
        """Notes `block_tables[row, index] = block` for each triple."""
        self.table_rows.extend(rows)
        self.table_indices.extend(indices)
        self.table_blocks.extend(blocks)

    def assemble(self, columns: RunningColumns, swap_copies: list[BlockCopy]) -> StepPlan:
        """The plan's columns; counts its tokens as computed and its samples as in flight."""
        # First the decode part: one token a request, and every request samples.
        decode = self.decode
        num_decode = len(decode)
        positions, seq_lens, is_inflight = columns.plan_decode(decode.rows, self.step_id)
        inflight_tokens = is_inflight.nonzero()[0]
        token_ids = columns.last_tokens[decode.rows]
        token_ids[inflight_tokens] = 0
        counting = columns.counting.up_to(num_decode + 1)
        parts = _Parts(
            sequences=decode,
            samples=decode,
            query_start_loc=counting,
            seq_lens=seq_lens,
            token_ids=token_ids,
            positions=positions,
            sample_tokens=counting[:-1],
            sample_positions=seq_lens,
            max_query_len=1 if num_decode else 0,
        )
        if self.chunks:
            parts.add_chunks(self.chunks, columns, self.step_id)
        if self.forks:
            parts.add_forks(self.forks)
        seq_lens, new = parts.seq_lens, self.new
        rows = parts.sequences.rows.astype(np.int32)
        is_same = parts.samples is parts.sequences
        return StepPlan(
            step_id=self.step_id,
            rows=rows,
            query_start_loc=parts.query_start_loc,
            seq_lens=seq_lens,
            token_ids=parts.token_ids,
            positions=parts.positions,
            inflight_tokens=inflight_tokens.astype(np.int32),
            inflight_rows=rows[inflight_tokens],
            sample_tokens=parts.sample_tokens,
            sample_rows=rows if is_same else parts.samples.rows.astype(np.int32),
            sample_positions=parts.sample_positions,
            new_rows=_column([r.row for r in new]),
            new_params=tuple([r.params for r in new]),
            new_keys=np.array([r.key for r in new], np.uint64) if new else NO_KEYS,
            new_min_positions=_column([r.min_stop_length - 1 for r in new]),
            table_rows=_column(self.table_rows),
            table_indices=_column(self.table_indices),
            table_blocks=_column(self.table_blocks),
            copies=(*swap_copies, *self.copies),
            max_query_len=parts.max_query_len,
            # argmax is several times faster than max on arrays this small.
            max_seq_len=int(seq_lens[seq_lens.argmax()]) if len(seq_lens) else 0,
            sequences=parts.sequences,
            samples=parts.samples,
        )


@dataclass(slots=True)
class _Parts:
    """The token columns of a plan while chunks are joined to the decode part."""

    sequences: Batch
    samples: Batch
    query_start_loc: Int32Column
    seq_lens: Int32Column
    token_ids: Int32Column
    positions: Int32Column
    sample_tokens: Int32Column
    sample_positions: Int32Column
    max_query_len: int

    def add_chunks(self, chunks: list[Chunk], columns: RunningColumns, step_id: int) -> None:
        stop = len(self.token_ids)
        counting = columns.counting.up_to(max([chunk.end for chunk in chunks]))
        known, positions, stops, ends, sampling, sample_tokens = [], [], [], [], [], []
        for request, start, num_tokens in chunks:
            end = start + num_tokens
            stop += num_tokens
            known.append(request.tokens[start:end])
            positions.append(counting[start:end])
            stops.append(stop)
            ends.append(end)
            # Whoever computes its last known token samples the next one.
            is_last = end == len(request.tokens)
            if is_last:
                sampling.append(request)
                sample_tokens.append(stop - 1)
            columns.plan_chunk(row_of(request), end, is_last, step_id)
        known_ids = np.frombuffer(b"".join(known), np.int32)
        self.token_ids = np.concatenate((self.token_ids, known_ids))
        self.positions = np.concatenate((self.positions, *positions))
        self.query_start_loc = np.concatenate((self.query_start_loc, _column(stops)))
        self.seq_lens = np.concatenate((self.seq_lens, _column(ends)))
        self.max_query_len = max(self.max_query_len, max([chunk.num_tokens for chunk in chunks]))
        self.sequences = self.sequences + Batch.of(tuple([chunk.request for chunk in chunks]))
        self.sample_tokens = np.concatenate((self.sample_tokens, _column(sample_tokens)))
        if len(sampling) == len(chunks):
            self.samples, self.sample_positions = self.sequences, self.seq_lens
        elif sampling:
            self.samples = self.samples + Batch.of(tuple(sampling))
            lengths = _column([len(request.tokens) for request in sampling])
            self.sample_positions = np.concatenate((self.sample_positions, lengths))

    def add_forks(self, forks: list[Fork]) -> None:
        index_of = {id(request): i for i, request in enumerate(self.samples.requests)}
        sources = [index_of[id(fork.source)] for fork in forks]
        self.sample_tokens = np.concatenate((self.sample_tokens, self.sample_tokens[sources]))
        positions = self.sample_positions
        self.sample_positions = np.concatenate((positions, positions[sources]))
        self.samples = self.samples + Batch.of(tuple([fork.target for fork in forks]))


def _column(values: list[int] | list[int | None]) -> Int32Column:
    return np.array(values, np.int32) if values else EMPTY
