"""The step's inputs on the device: one upload of the plan's columns, and what outlives a step."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from pagetide_kernels import AttentionBounds, AttentionMetadata
from pagetide_scheduler import StepPlan

__all__ = ["InputBuffers", "StepInputs"]

# Columns start at multiples of 16 bytes, so that kernels specialised on their pointers' alignment
# see the same alignment in every step.
_ALIGNMENT = 4


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A plan's columns on the device: views of one int32 upload, named as in `StepPlan`.

    Attributes:
        token_rows: int32 [T], the row of each token's sequence; not a column of the plan's.
    """

    token_ids: Tensor
    positions: Tensor
    inflight_tokens: Tensor
    inflight_rows: Tensor
    rows: Tensor
    query_start_loc: Tensor
    seq_lens: Tensor
    sample_tokens: Tensor
    sample_rows: Tensor
    sample_positions: Tensor
    table_rows: Tensor
    table_indices: Tensor
    table_blocks: Tensor
    token_rows: Tensor

    @classmethod
    def upload(cls, plan: StepPlan, device: torch.device) -> StepInputs:
        """Packs the columns and copies them at once; on a card without waiting for the device."""
        columns = [getattr(plan, field.name) for field in fields(cls)[:-1]]
        columns.append(np.repeat(plan.rows, np.diff(plan.query_start_loc)))
        starts = [0]
        for column in columns:
            starts.append(starts[-1] + -(-len(column) // _ALIGNMENT) * _ALIGNMENT)
        # Pinned memory is torch's own to reuse, which it does only when its copy is done.
        packed = torch.empty(starts[-1], dtype=torch.int32, pin_memory=device.type == "cuda")
        host = packed.numpy()
        for start, column in zip(starts[:-1], columns, strict=True):
            host[start : start + len(column)] = column
        on_device = packed.to(device, non_blocking=True)
        views = [
            on_device[start : start + len(column)]
            for start, column in zip(starts[:-1], columns, strict=True)
        ]
        return cls(*views)


class InputBuffers:
    """Block tables and last sampled tokens by row, which outlive a step.

    A plan changes them by deltas, in plan order, on the stream that the kernels run on; so a row or
    a block that one plan gives back may be given away by the next while the first still runs.

    Attributes:
        block_tables: int32 `[num_rows, max_blocks]`.
        last_tokens: int32 `[num_rows]`, the token last sampled for the row.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.block_tables = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int32, device=device)

    def apply_table_deltas(self, inputs: StepInputs) -> None:
        """Writes the plan's new block-table entries."""
        if len(inputs.table_rows):
            self.block_tables[inputs.table_rows, inputs.table_indices] = inputs.table_blocks

    def input_ids(self, inputs: StepInputs) -> Tensor:
        """The step's token ids, int32 `[num_tokens]`; a token in flight is read from its row."""
        if len(inputs.inflight_tokens):
            inputs.token_ids[inputs.inflight_tokens] = self.last_tokens[inputs.inflight_rows]
        return inputs.token_ids

    def metadata(self, plan: StepPlan, inputs: StepInputs) -> AttentionMetadata:
        """What attention needs to know of the step."""
        block_size = self.block_size
        blocks = self.block_tables[inputs.token_rows, inputs.positions // block_size].long()
        return AttentionMetadata(
            query_start_loc=inputs.query_start_loc,
            seq_lens=inputs.seq_lens,
            rows=inputs.rows,
            block_tables=self.block_tables,
            slot_mapping=blocks * block_size + inputs.positions % block_size,
            block_size=block_size,
            bounds=AttentionBounds(
                num_seqs=plan.num_seqs,
                num_tokens=plan.num_tokens,
                max_query_len=plan.max_query_len,
                max_seq_len=plan.max_seq_len,
            ),
        )
