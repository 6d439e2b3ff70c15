"""The ``cpu`` back end: vectorised PyTorch, held to ``reference`` within 1e-5.

It gathers blocks into order and runs dense products over them, in float32 whatever the dtypes. What
every layer shares (indices, masks, grouping) is made once a step by ``prepare``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetide_kernels.backends import AttentionBackend
from pagetide_kernels.cpu.attention import attend_batch, attend_long
from pagetide_kernels.cpu.store import store_in_blocks, store_rows
from pagetide_kernels.cpu.tiles import Tiles
from pagetide_kernels.cpu.work_list import WorkList
from pagetide_kernels.metadata import AttentionMetadata, AttentionShape
from pagetide_kernels.reference import INT8_MAX, quantize

__all__ = ["CpuBackend"]


class CpuBackend(AttentionBackend):
    """Gathered blocks and dense products on the CPU."""

    name = "cpu"
    is_exact = False

    def unsupported_reason(self, shape: AttentionShape | None, device: torch.device) -> str | None:
        """Any shape, on the CPU."""
        del shape
        return None if device.type == "cpu" else f"it computes on the CPU, not on {device}"

    def prepare(self, metadata: AttentionMetadata, shape: AttentionShape) -> AttentionMetadata:
        """Read the step's lengths and tables once for all layers."""
        return metadata.with_work_list(WorkList.build(metadata, shape))

    def paged_attention(
        self,
        q: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        *,
        scale: float,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
        window: int | None,
        soft_cap: float | None,
        out: Tensor,
    ) -> None:
        """Attend batch by batch, then prefill sequence by prefill sequence."""
        work = _work_list(metadata, shape)
        plan = work.plan(window)
        if not work.is_every_token_attended:
            out.zero_()
        keys = Tiles(k_cache, k_scales, work.scratch)
        values = Tiles(v_cache, v_scales, work.scratch)
        for batch in plan.batches:
            # Scaling the queries is cheaper than scaling the scores.
            queries = q[batch.tokens].float() * scale
            out[batch.tokens] = attend_batch(queries, keys, values, batch, soft_cap).to(out.dtype)
        for sequence in plan.long_queries:
            attend_long(
                q[sequence.tokens],
                keys,
                values,
                sequence,
                plan.causal_mask,
                scale=scale,
                window=window,
                soft_cap=soft_cap,
                out=out[sequence.tokens],
            )

    def store_kv(
        self,
        k: Tensor,
        v: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        metadata: AttentionMetadata,
        shape: AttentionShape,
        *,
        k_scales: Tensor | None,
        v_scales: Tensor | None,
    ) -> None:
        """Write each token of a sequence to its slot, in the cache's dtype."""
        work = _work_list(metadata, shape)
        if len(k) > work.num_tokens:
            k, v = k[: work.num_tokens], v[: work.num_tokens]
        block_ids, offsets = work.slot_block_ids, work.slot_offsets
        for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
            if scales is None:
                store_rows(x, cache, work)
            elif shape.kv_dtype == "int8-block":
                store_in_blocks(x.float(), cache, scales[:, :, 0], block_ids, offsets)
            else:
                x = x.float()
                token_scales = x.abs().amax(dim=-1) / INT8_MAX
                scales[block_ids, :, offsets] = token_scales
                cache[block_ids, :, offsets] = quantize(x, token_scales)


def _work_list(metadata: AttentionMetadata, shape: AttentionShape) -> WorkList:
    work = metadata.work_list
    if isinstance(work, WorkList) and work.serves(shape):
        return work
    return WorkList.build(metadata, shape)
