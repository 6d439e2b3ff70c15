"""Attention of a batch of short queries, and of one sequence of many."""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from pagetide_kernels.cpu.tiles import Tiles
from pagetide_kernels.cpu.work_list import QUERY_TILE, Chunk, LongQuery, ShortQueryBatch

__all__ = ["attend_batch", "attend_long"]


def attend_batch(
    q: Tensor, keys: Tiles, values: Tiles, batch: ShortQueryBatch, soft_cap: float | None
) -> Tensor:
    """Attention of a batch of short queries; the query heads of a KV head are rows of one product.

    Args:
        q: float32 [num_seqs * query_len, num_heads, head_dim], scaled.
        keys: the layer's K.
        values: the layer's V.
        batch: what to gather and to hide.
        soft_cap: bound of the scores.

    Returns:
        float32 [num_seqs * query_len, num_heads, head_dim].
    """
    num_tokens, num_heads, head_dim = q.shape
    num_seqs, query_len = batch.num_seqs, batch.query_len
    num_kv_heads = keys.num_kv_heads
    group_size = num_heads // num_kv_heads
    num_rows = num_seqs * num_kv_heads
    if query_len > 1:
        q = q.view(num_seqs, query_len, num_kv_heads, group_size, head_dim).permute(0, 2, 3, 1, 4)
    q = q.reshape(num_rows, group_size * query_len, head_dim)

    def gather(name: str, tiles: Tiles, chunk: Chunk) -> Tensor:
        gathered = tiles.gather(name, chunk.tile_ids, num_rows, chunk.padding_ids)
        return gathered[:, : chunk.stop - chunk.start]

    products = [q @ gather("k", keys, chunk).transpose(1, 2) for chunk in batch.chunks]
    scores = products[0] if len(products) == 1 else torch.cat(products, dim=-1)
    if soft_cap is not None:
        scores.div_(soft_cap).tanh_().mul_(soft_cap)
    if batch.mask is not None:
        by_head = (num_seqs, num_heads, query_len, scores.shape[-1])
        scores.view(by_head).add_(batch.mask.unsqueeze(1))
    weights = torch.softmax(scores, dim=-1)

    attended = reduce(
        Tensor.add_,
        (weights[:, :, c.start : c.stop] @ gather("v", values, c) for c in batch.chunks),
    )
    if query_len > 1:
        attended = attended.view(num_seqs, num_kv_heads, group_size, query_len, head_dim)
        attended = attended.permute(0, 3, 1, 2, 4)
    return attended.reshape(num_tokens, num_heads, head_dim)


def attend_long(
    q: Tensor,
    keys: Tiles,
    values: Tiles,
    sequence: LongQuery,
    causal_mask: Tensor,
    *,
    scale: float,
    window: int | None,
    soft_cap: float | None,
    out: Tensor,
) -> None:
    """Attention of one sequence of many queries, in tiles that skip the keys behind their queries.

    Args:
        q: [query_len, num_heads, head_dim].
        keys: the layer's K.
        values: the layer's V.
        sequence: what to gather.
        causal_mask: float32, see ``Plan``.
        scale: factor of the dot products.
        window: keys a query sees.
        soft_cap: bound of the scores.
        out: like ``q``, written.
    """
    if scale <= 0.0:  # PyTorch's causal kernel scales what it masked, too: -inf must stay -inf
        q, scale = q.float() * scale, 1.0
    query_len, num_heads, head_dim = q.shape
    num_kv_heads = keys.num_kv_heads
    by_group = (num_kv_heads, num_heads // num_kv_heads, -1, head_dim)
    num_keys = sequence.seq_len - sequence.first_key
    none = torch.empty(0, dtype=torch.int64)
    # What lies behind the sequence in its last block is cut off rather than zeroed.
    k, v = (
        tiles.gather(name, sequence.tile_ids, num_kv_heads, none)[:, None, :num_keys].expand(
            by_group
        )
        for name, tiles in (("k", keys), ("v", values))
    )
    q = q.float().view(query_len, *by_group[:2], head_dim).permute(1, 2, 0, 3)
    out = out.view(query_len, *by_group[:2], head_dim).permute(1, 2, 0, 3)
    if query_len == num_keys and window is None and soft_cap is None:
        out.copy_(scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale))
        return
    for start in range(0, query_len, QUERY_TILE):
        stop = min(start + QUERY_TILE, query_len)
        last = num_keys - query_len + stop
        first = 0 if window is None else max(0, last - (stop - start) + 1 - window)
        mask = causal_mask[QUERY_TILE - (stop - start) :, causal_mask.shape[1] - (last - first) :]
        tile = q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last]
        if soft_cap is None:
            attended = scaled_dot_product_attention(*tile, mask, scale=scale)
        else:
            scores = (tile[0] @ tile[1].transpose(-1, -2)).mul_(scale / soft_cap)
            attended = scores.tanh_().mul_(soft_cap).add_(mask).softmax(dim=-1) @ tile[2]
        out[:, :, start:stop] = attended
