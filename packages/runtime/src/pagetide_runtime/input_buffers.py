"""The step's inputs on the device: persistent state by row, and one step's columns."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pagetide_kernels import AttentionBounds, AttentionMetadata
from pagetide_scheduler import StepPlan

__all__ = ["InputBuffers"]


class InputBuffers:
    """Block tables and last sampled tokens by row, which outlive a step.

    A plan changes them by deltas, in plan order, on the stream that the kernels run on; so a row or
    a block that one plan gives back may be given away by the next while the first still runs.

    Attributes:
        block_tables: int32 `[num_rows, max_blocks]`.
        last_tokens: int64 `[num_rows]`, the token last sampled for the row.
    """

    def __init__(
        self, num_rows: int, max_blocks: int, block_size: int, device: torch.device
    ) -> None:
        self.block_size = block_size
        self.device = device
        self.block_tables = torch.zeros(num_rows, max_blocks, dtype=torch.int32, device=device)
        self.last_tokens = torch.zeros(num_rows, dtype=torch.int64, device=device)

    def upload(self, column: npt.NDArray[np.generic], dtype: torch.dtype = torch.int64) -> Tensor:
        """One host column as a device tensor; on a card the copy does not wait for the device."""
        # A plan's columns are read-only and shared between plans: copied, unless `to` does anyway.
        host = torch.from_numpy(np.array(column)).to(dtype)
        if self.device.type == "cuda":
            return host.pin_memory().to(self.device, non_blocking=True)
        return host

    def apply_table_deltas(self, plan: StepPlan) -> None:
        """Writes the plan's new block-table entries."""
        if len(plan.table_rows):
            rows, indices = self.upload(plan.table_rows), self.upload(plan.table_indices)
            self.block_tables[rows, indices] = self.upload(plan.table_blocks, torch.int32)

    def input_ids(self, plan: StepPlan) -> Tensor:
        """The step's token ids, int64 `[num_tokens]`; a token in flight is read from its row."""
        ids = self.upload(plan.token_ids)
        if len(plan.inflight_tokens):
            ids[self.upload(plan.inflight_tokens)] = self.last_tokens[
                self.upload(plan.inflight_rows)
            ]
        return ids

    def metadata(self, plan: StepPlan, positions: Tensor) -> AttentionMetadata:
        """What attention needs to know of the step; `positions` is int64 `[num_tokens]`."""
        rows = self.upload(plan.rows, torch.int32)
        query_lens = np.diff(plan.query_start_loc)
        token_rows = self.upload(np.repeat(plan.rows, query_lens))
        blocks = self.block_tables[token_rows, positions // self.block_size].to(torch.int64)
        return AttentionMetadata(
            query_start_loc=self.upload(plan.query_start_loc, torch.int32),
            seq_lens=self.upload(plan.seq_lens, torch.int32),
            rows=rows,
            block_tables=self.block_tables,
            slot_mapping=blocks * self.block_size + positions % self.block_size,
            block_size=self.block_size,
            bounds=AttentionBounds(
                num_seqs=len(plan.rows),
                num_tokens=len(plan.token_ids),
                max_query_len=int(query_lens.max(initial=0)),
                max_seq_len=int(plan.seq_lens.max(initial=0)),
            ),
        )
