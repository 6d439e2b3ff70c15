"""What crosses between the scheduler and whoever runs the model: columns, never request objects."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pagetide_kvcache import BlockCopy
from pagetide_scheduler.params import SamplingParams
from pagetide_scheduler.request import FinishReason, Request

Int32Column = npt.NDArray[np.int32]
Int64Column = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Batch:
    """Requests in an order, with their ids and rows: made once, reused while the order stands.

    Attributes:
        requests: The requests. [B]
        request_ids: Their ids. [B]
        rows: Their rows. int64 [B], as numpy wants an index
    """

    requests: tuple[Request, ...]
    request_ids: tuple[str, ...]
    rows: Int64Column

    @classmethod
    def of(cls, requests: tuple[Request, ...]) -> Batch:
        ids = tuple([request.request_id for request in requests])
        return cls(requests, ids, np.array([request.row for request in requests], np.int64))

    def __len__(self) -> int:
        return len(self.requests)

    def take(self, indices: Int64Column) -> Batch:
        """The requests at `indices`, which ascend."""
        requests, ids = self.requests, self.request_ids
        first, count = int(indices[0]) if len(indices) else 0, len(indices)
        if not count or indices[-1] == first + count - 1:  # all in a row: no look at each
            part = slice(first, first + count)
            return Batch(requests[part], ids[part], self.rows[part])
        chosen = indices.tolist()
        return Batch(
            tuple([requests[i] for i in chosen]),
            tuple([ids[i] for i in chosen]),
            self.rows[indices],
        )

    def without(self, index: int) -> Batch:
        """All but the one at `index`."""
        after = index + 1
        requests, ids, rows = self.requests, self.request_ids, self.rows
        return Batch(
            requests[:index] + requests[after:],
            ids[:index] + ids[after:],
            np.concatenate((rows[:index], rows[after:])),
        )

    def without_all(self, request_ids: Container[str]) -> Batch:
        """All but those of these ids."""
        chosen = [i for i, name in enumerate(self.request_ids) if name not in request_ids]
        return self.take(np.array(chosen, np.int64))

    def __add__(self, other: Batch) -> Batch:
        if not other.requests:
            return self
        return Batch(
            self.requests + other.requests,
            self.request_ids + other.request_ids,
            np.concatenate((self.rows, other.rows)),
        )


EMPTY_BATCH = Batch.of(())


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What one step computes. B sequences, T tokens, F of them in flight, S samples, R new rows,
    D changes to block tables.

    Whoever runs it performs `copies` first, in order, then initialises the new rows, writes the
    block-table changes, computes the tokens and samples; plans run in the order of `step_id`.

    Attributes:
        step_id: Counts plans that are not empty, from 1.
        rows: Row of each sequence. int32 [B]
        query_start_loc: Where each sequence's tokens start, and T. int32 [B + 1]
        seq_lens: Keys each sequence's last token of this step sees, itself included. int32 [B]
        token_ids: Token ids, 0 where the token is in flight. int32 [T]
        positions: Position of each token in its sequence. int32 [T]
        inflight_tokens: Indices of the tokens to read on the device instead. int32 [F]
        inflight_rows: The rows whose last sampled token they are. int32 [F]
        sample_tokens: Token index whose logits are sampled; one may occur several times. int32 [S]
        sample_rows: Row the sampled token belongs to. int32 [S]
        sample_positions: Position that the sampled token will have. int32 [S]
        new_rows: Rows given by this plan; their sampling state starts afresh. int32 [R]
        new_params: Sampling parameters of the new rows. [R]
        new_keys: Random keys of the new rows. uint64 [R]
        new_min_positions: Positions from which the new rows may end: end-of-sequence and stop
            tokens are masked where the sampled token's position is smaller. int32 [R]
        table_rows: Block-table changes: `block_tables[row, index] = block`. int32 [D]
        table_indices: int32 [D]
        table_blocks: int32 [D]
        copies: Block copies to perform before anything else: out to the host pool, in from it,
            within the pool. No block is written twice, nor both read and written.
        sequences: The requests behind `rows`. [B]
        samples: The requests behind `sample_rows`. [S]
        max_query_len: Most tokens of one sequence.
        max_seq_len: Largest of `seq_lens`.
    """

    step_id: int
    rows: Int32Column
    query_start_loc: Int32Column
    seq_lens: Int32Column
    token_ids: Int32Column
    positions: Int32Column
    inflight_tokens: Int32Column
    inflight_rows: Int32Column
    sample_tokens: Int32Column
    sample_rows: Int32Column
    sample_positions: Int32Column
    new_rows: Int32Column
    new_params: tuple[SamplingParams, ...]
    new_keys: npt.NDArray[np.uint64]
    new_min_positions: Int32Column
    table_rows: Int32Column
    table_indices: Int32Column
    table_blocks: Int32Column
    copies: tuple[BlockCopy, ...]
    max_query_len: int
    max_seq_len: int
    sequences: Batch = field(repr=False)
    samples: Batch = field(repr=False)

    @property
    def request_ids(self) -> tuple[str, ...]:
        """Request of each sequence. [B]"""
        return self.sequences.request_ids

    @property
    def num_seqs(self) -> int:
        return len(self.rows)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_samples(self) -> int:
        return len(self.sample_rows)

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to do; such a plan is not submitted."""
        return not len(self.token_ids) and not self.copies


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """A request that has ended, with everything its caller is told.

    Attributes:
        request_id: The caller's name for it.
        prompt_token_ids: The prompt.
        token_ids: The generated tokens, a stop token included.
        finish_reason: Why it ended.
        num_cached_tokens: Prompt tokens found in the prefix cache when it was first admitted.
        num_preemptions: How often it gave up its blocks and started over.
        queue_seconds: From `add` to its first admission, or to its end if there was none.
        prefill_seconds: From there to its first token, or to its end if there was none.
        decode_seconds: From there to its end.
        error: What went wrong, for `FinishReason.ERROR`.
        prompt_logprobs: Log-probability of each prompt token given those before it, if asked for:
            None for the first token, which follows nothing. One that ended before its prompt was
            computed has fewer.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    num_cached_tokens: int
    num_preemptions: int
    queue_seconds: float
    prefill_seconds: float
    decode_seconds: float
    error: str | None = None
    prompt_logprobs: tuple[float | None, ...] | None = None

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The news of a step: token `token_ids[i]` for request `request_ids[i]`, and who ended.

    Attributes:
        request_ids: [N]
        token_ids: int32 [N]
        finished: An output for each request that ended with this step; its tokens are complete,
            those of this step included.
    """

    request_ids: tuple[str, ...]
    token_ids: Int32Column
    finished: tuple[RequestOutput, ...]
