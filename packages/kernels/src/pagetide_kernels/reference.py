"""The specification: paged attention as a textbook states it, in float32 PyTorch, on any device.

Read this file to learn what every other back end must compute. It favours clarity over speed: one
sequence at a time, nothing shared between sequences. That is also why it keeps exactness level 1: a
token's bits depend on its query, its keys and values and on its sequence's ``query_len`` and
``seq_len``, never on its neighbours, its place in the batch, padding, or which blocks hold its
keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pagetide_kernels.backends import AttentionBackend
from pagetide_kernels.metadata import AttentionMetadata, AttentionShape

__all__ = ["ReferenceBackend", "attend", "gather_sequence", "quantize"]

INT8_MAX = 127.0


def gather_sequence(
    cache: Tensor, scales: Tensor | None, block_ids: Tensor, seq_len: int
) -> Tensor:
    """One sequence's keys (or values) in order, from the blocks that hold them.

    Args:
        cache: [N, num_kv_heads, block_size, head_dim].
        scales: float32 [N, num_kv_heads, block_size] of an INT8 cache, else None.
        block_ids: [ceil(seq_len / block_size)], the sequence's blocks in order.
        seq_len: keys the sequence has; what lies behind them in its last block is not its own.

    Returns:
        float32 [num_kv_heads, seq_len, head_dim], in memory of its own.
    """
    blocks = cache[block_ids].float()
    if scales is not None:
        blocks = blocks * scales[block_ids].unsqueeze(-1)
    # [blocks, heads, slots, head_dim] -> [heads, blocks x slots, head_dim]
    in_order = blocks.transpose(0, 1).flatten(1, 2)
    return in_order[:, :seq_len].contiguous()


def attend(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None, soft_cap: float | None
) -> Tensor:
    """Causal attention of the last ``query_len`` tokens of one sequence to all its keys.

    Query ``j`` stands at position ``p = seq_len - query_len + j`` and sees the keys at ``p`` and
    before, with a ``window`` only the last ``window`` of those. Query head ``h`` reads KV head ``h
    // group``. A query that sees no key at all (``query_len > seq_len``) gives zeros.

    Args:
        q: float32 [num_heads, query_len, head_dim].
        k: float32 [num_kv_heads, seq_len, head_dim].
        v: float32 [num_kv_heads, seq_len, head_dim].
        scale: factor of the dot products.
        window: keys a query sees, itself included; None: all.
        soft_cap: bound of the scores, ``soft_cap * tanh(score / soft_cap)``; None: none.

    Returns:
        float32 [num_heads, query_len, head_dim].
    """
    num_heads, query_len, _ = q.shape
    num_kv_heads, seq_len, _ = k.shape
    k = k.repeat_interleave(num_heads // num_kv_heads, dim=0)
    v = v.repeat_interleave(num_heads // num_kv_heads, dim=0)

    scores = scale * (q @ k.transpose(1, 2))
    if soft_cap is not None:
        scores = soft_cap * torch.tanh(scores / soft_cap)

    key_positions = torch.arange(seq_len, device=q.device)
    query_positions = torch.arange(seq_len - query_len, seq_len, device=q.device).unsqueeze(1)
    is_visible = key_positions <= query_positions
    if window is not None:
        is_visible &= key_positions > query_positions - window

    weights = torch.softmax(scores.masked_fill(~is_visible, -torch.inf), dim=-1)
    return weights.masked_fill(~is_visible, 0.0) @ v


def quantize(x: Tensor, scales: Tensor) -> Tensor:
    """``round(x / scales)`` as int8, zeros where the scale is 0.

    Args:
        x: float32 [..., head_dim].
        scales: float32 [...], ``amax(|x|) / 127`` or larger.
    """
    divisors = torch.where(scales == 0, 1.0, scales).unsqueeze(-1)
    return torch.round(x / divisors).clamp(-INT8_MAX, INT8_MAX).to(torch.int8)


def _int8_scales(largest: Tensor) -> Tensor:
    """``largest / 127``, rounded once.

    By a tensor: for a Python number PyTorch multiplies with its rounded reciprocal on a GPU.
    """
    return largest / torch.full_like(largest, INT8_MAX)


class ReferenceBackend(AttentionBackend):
    """Float32 PyTorch, one sequence at a time."""

    name = "reference"

    def unsupported_reason(self, shape: AttentionShape | None, device: torch.device) -> str | None:
        """None: every shape on every device."""
        del shape, device
        return None

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
        """Attend sequence by sequence; tokens of no sequence give zeros."""
        out.zero_()
        starts = metadata.query_start_loc.tolist()
        lengths = metadata.seq_lens.tolist()
        rows = metadata.rows.tolist()
        for i, (seq_len, row) in enumerate(zip(lengths, rows, strict=True)):
            tokens = slice(starts[i], starts[i + 1])
            if tokens.start == tokens.stop or seq_len == 0:
                continue
            block_ids = metadata.block_tables[row, : -(-seq_len // shape.block_size)].long()
            attended = attend(
                # A copy: the sums inside a matrix product may depend on where its operands start.
                q[tokens].transpose(0, 1).float().clone(memory_format=torch.contiguous_format),
                gather_sequence(k_cache, k_scales, block_ids, seq_len),
                gather_sequence(v_cache, v_scales, block_ids, seq_len),
                scale=scale,
                window=window,
                soft_cap=soft_cap,
            )
            out[tokens] = attended.transpose(0, 1).to(out.dtype)

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
        num_tokens = int(metadata.query_start_loc[-1])
        slots = metadata.slot_mapping[:num_tokens]
        block_ids, offsets = slots // shape.block_size, slots % shape.block_size
        for x, cache, scales in ((k, k_cache, k_scales), (v, v_cache, v_scales)):
            x = x[:num_tokens]
            if scales is None:
                cache[block_ids, :, offsets] = x.to(cache.dtype)
            elif shape.kv_dtype == "int8":
                token_scales = _int8_scales(x.float().abs().amax(dim=-1))
                scales[block_ids, :, offsets] = token_scales
                cache[block_ids, :, offsets] = quantize(x.float(), token_scales)
            else:
                for block_id in sorted(set(block_ids.tolist())):
                    is_here = block_ids == block_id
                    _store_in_block(
                        x[is_here].float(),
                        offsets[is_here],
                        cache[block_id],
                        scales[block_id, :, 0],
                    )


def _store_in_block(x: Tensor, offsets: Tensor, block: Tensor, scales: Tensor) -> None:
    """Write one step's tokens of one block that has a single scale a head (``int8-block``).

    A token at offset 0 begins the block afresh: the scale of its earlier life counts for nothing.
    Tokens larger than the block's range widen it, and what the block holds already is rounded again
    to the new range.

    Args:
        x: float32 [tokens, num_kv_heads, head_dim].
        offsets: int64 [tokens].
        block: int8 [num_kv_heads, block_size, head_dim], changed.
        scales: float32 [num_kv_heads], changed.
    """
    num_held = int(offsets.min())
    new_scales = _int8_scales(x.abs().amax(dim=(0, 2)))
    if num_held:
        new_scales = torch.maximum(new_scales, scales)
        held = block[:, :num_held].float() * scales[:, None, None]
        block[:, :num_held] = quantize(held, new_scales[:, None].expand(-1, num_held))
    scales.copy_(new_scales)
    block[:, offsets] = quantize(x, new_scales.expand(x.shape[0], -1)).transpose(0, 1)
