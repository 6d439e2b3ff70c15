"""Paged attention equals naive attention: the first layer of validation, in plain PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagetide_kernels import AttentionMetadata, paged_attention, store_kv
from pagetide_kvcache import KVCache, KVCacheSpec

BLOCK_SIZE = 16


def naive_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention as the formula says, float64.

    Args:
        q: [query_len, num_heads, head_dim], the last tokens of the sequence.
        k: [seq_len, num_kv_heads, head_dim].
        v: [seq_len, num_kv_heads, head_dim].
    """
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for i in range(q.shape[0]):
        visible = k.shape[0] - q.shape[0] + i + 1
        for head in range(q.shape[1]):
            keys = k[:visible, head // group].double()
            values = v[:visible, head // group].double()
            scores = keys @ q[i, head].double() * q.shape[2] ** -0.5
            out[i, head] = torch.softmax(scores, 0) @ values
    return out


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("heads", [(12, 12), (14, 2), (9, 3)], ids=["gpt2", "qwen2", "smollm2"])
def test_paged_equals_naive_token_by_token_and_at_once(
    backend: str, heads: tuple[int, int]
) -> None:
    num_heads, num_kv_heads = heads
    generator = torch.Generator().manual_seed(num_heads)
    spec = KVCacheSpec(
        num_layers=1,
        num_kv_heads=num_kv_heads,
        head_dim=64,
        block_size=BLOCK_SIZE,
        kv_dtype="float32",
    )
    num_blocks = 40
    layer = KVCache(spec, num_blocks).layer(0)
    blocks = torch.randperm(num_blocks, generator=generator).tolist()
    seq_len = 2 * BLOCK_SIZE + 5
    table = blocks[:3]

    def draw(heads: int) -> Tensor:
        return torch.randn(seq_len, heads, 64, generator=generator)

    q, k, v = draw(num_heads), draw(num_kv_heads), draw(num_kv_heads)
    expected = naive_attention(q, k, v)

    def step(first: int, end: int) -> Tensor:
        """Writes the keys of tokens `first` to `end`, then attends with their queries."""
        metadata = AttentionMetadata.from_host(
            [end - first], [end], [table], block_size=BLOCK_SIZE, num_blocks=num_blocks
        )
        store_kv(k[first:end], v[first:end], layer.k, layer.v, metadata, backend=backend)
        return paged_attention(
            q[first:end], layer.k, layer.v, metadata, scale=64**-0.5, backend=backend
        )

    at_once = step(0, seq_len)
    one_by_one = torch.cat([step(token, token + 1) for token in range(seq_len)])
    in_chunks = torch.cat([step(0, 7), step(7, 30), step(30, seq_len)])
    for result in (at_once, one_by_one, in_chunks):
        assert (result.double() - expected).abs().max() < 2e-6
