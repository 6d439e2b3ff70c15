"""A model whose next token is a hash of everything it reads through the block table.

It keeps a "KV cache" by slot, follows the plans' columns and nothing else, and runs plans in order,
as a device would. So a wrong block, order, position, copy or stale row changes its output, which
`generate_alone` computes without any blocks at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pagetide_kvcache import CopyDirection
from pagetide_scheduler import SampleError, SamplingParams, StepPlan, StepResult

POISON = np.uint64(0xDEAD_BEEF_DEAD_BEEF)


def mix(values: np.ndarray) -> np.ndarray:
    """splitmix64's finaliser: every bit of the input changes about half of the output's."""
    z = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def keys_and_values(token_ids: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """What the model stores for a token at a position. uint64"""
    return mix((positions.astype(np.uint64) << np.uint64(32)) | token_ids.astype(np.uint64))


def next_token(read: np.ndarray, key: int, vocab_size: int, masked: Sequence[int] = ()) -> int:
    """The token after a context, from what was read for positions 0.. in order."""
    order = np.arange(len(read), dtype=np.uint64)
    total = mix(read ^ mix(order)).sum(dtype=np.uint64) ^ np.uint64(key)
    token = int(mix(total.reshape(1))[0] % np.uint64(vocab_size))
    while token in masked:
        token = (token + 1) % vocab_size
    return token


def generate_alone(
    prompt: Sequence[int],
    params: SamplingParams,
    key: int,
    *,
    vocab_size: int,
    max_new_tokens: int,
    eos_token_ids: Sequence[int] = (),
) -> tuple[int, ...]:
    """What a request generates with nobody else there: no blocks, no steps, no batch."""
    stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
    tokens = list(prompt)
    for count in range(max_new_tokens):
        ids = np.array(tokens, np.int64)
        masked = stops if count < params.min_tokens else ()
        read = keys_and_values(ids, np.arange(len(ids)))
        token = next_token(read, key, vocab_size, tuple(masked))
        tokens.append(token)
        if token in stops:
            break
    return tuple(tokens[len(prompt) :])


class StepFailedError(Exception):
    """A step of the toy model raised."""


@dataclass
class Row:
    """Sampling state of a row on the device."""

    params: SamplingParams
    key: int
    min_position: int


class ToyModel:
    """Device state and one `run` a plan."""

    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        num_rows: int,
        vocab_size: int,
        max_blocks: int,
        num_host_blocks: int = 0,
        eos_token_ids: Sequence[int] = (),
    ) -> None:
        self.block_size = block_size
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(eos_token_ids)
        self.cache = np.full((num_blocks, block_size), POISON, np.uint64)
        self.host_cache = np.full((num_host_blocks, block_size), POISON, np.uint64)
        # Never cleared: a stale entry of a former request in the row must not matter.
        self.block_tables = np.full((num_rows, max_blocks), num_blocks, np.int64)
        self.last_sampled = np.full(num_rows, -1, np.int64)
        self.rows: list[Row | None] = [None] * num_rows
        self.last_step_id = 0

    def run(
        self,
        plan: StepPlan,
        *,
        free_blocks: Sequence[int] = (),
        free_host_blocks: Sequence[int] = (),
        fails: bool = False,
    ) -> StepResult:
        """Performs one plan; poisons the blocks that are free while it runs."""
        if plan.step_id <= self.last_step_id:
            raise AssertionError("plans must run in order")
        self.last_step_id = plan.step_id
        self._copy(plan)
        self.cache[list(free_blocks)] = POISON
        self.host_cache[list(free_host_blocks)] = POISON
        for row, params, key, minimum in zip(
            plan.new_rows.tolist(),
            plan.new_params,
            plan.new_keys.tolist(),
            plan.new_min_positions.tolist(),
            strict=True,
        ):
            self.rows[row] = Row(params, key, minimum)
            self.last_sampled[row] = -1
        self.block_tables[plan.table_rows, plan.table_indices] = plan.table_blocks
        if fails:
            self._write(plan, np.full(plan.num_tokens, POISON, np.uint64))
            raise StepFailedError(f"step {plan.step_id}")

        token_ids = plan.token_ids.astype(np.int64)
        assert (token_ids[plan.inflight_tokens] == 0).all()
        token_ids[plan.inflight_tokens] = self.last_sampled[plan.inflight_rows]
        assert (token_ids >= 0).all(), "a token was read from a row that has sampled none"
        self._write(plan, keys_and_values(token_ids, plan.positions.astype(np.int64)))
        return self._sample(plan)

    def _copy(self, plan: StepPlan) -> None:
        for copy in plan.copies:
            if copy.direction is CopyDirection.OUT:
                self.host_cache[copy.destination] = self.cache[copy.source]
            elif copy.direction is CopyDirection.IN:
                self.cache[copy.destination] = self.host_cache[copy.source]
            else:
                self.cache[copy.destination] = self.cache[copy.source]

    def _slots(self, plan: StepPlan) -> tuple[np.ndarray, np.ndarray]:
        rows = np.repeat(plan.rows, np.diff(plan.query_start_loc))
        blocks = self.block_tables[rows, plan.positions // self.block_size]
        return blocks, plan.positions % self.block_size

    def _write(self, plan: StepPlan, values: np.ndarray) -> None:
        blocks, offsets = self._slots(plan)
        slots = blocks * self.block_size + offsets
        assert len(set(slots.tolist())) == len(slots), "two tokens share a slot"
        self.cache[blocks, offsets] = values

    def _sample(self, plan: StepPlan) -> StepResult:
        sequence_of = np.repeat(np.arange(plan.num_seqs), np.diff(plan.query_start_loc))
        sampled, errors = [], []
        for index, (token, row, position) in enumerate(
            zip(
                plan.sample_tokens.tolist(),
                plan.sample_rows.tolist(),
                plan.sample_positions.tolist(),
                strict=True,
            )
        ):
            source = plan.rows[sequence_of[token]]
            length = int(plan.positions[token]) + 1
            assert position == length
            num_blocks = -(-length // self.block_size)
            table = self.block_tables[source, :num_blocks]
            read = self.cache[table].reshape(-1)[:length]
            state = self.rows[row]
            assert state is not None
            stops = set(state.params.stop_token_ids)
            if not state.params.ignore_eos:
                stops |= set(self.eos_token_ids)
            masked = tuple(stops) if position < state.min_position else ()
            value = next_token(read, state.key, self.vocab_size, masked)
            self.last_sampled[row] = value
            sampled.append(value)
            if state.params.stop == ("raise",):  # the tests' way to ask for an error of one sample
                errors.append(SampleError(index, "asked to fail"))
        return StepResult.of(sampled, errors=tuple(errors))
