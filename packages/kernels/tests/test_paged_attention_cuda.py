"""Compiled kernel equals Python, at Qwen2's real shape: 14 query heads, 2 KV heads, 64 columns."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from pagetide_kernels import (
    AttentionMetadata,
    available_backends,
    paged_attention,
    store_kv,
)
from pagetide_kvcache import KVCache, KVCacheSpec

NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, BLOCK_SIZE = 14, 2, 64, 16
STEPS = {
    "one-key": [(1, 1)],
    "decode": [(1, n) for n in (1, 15, 16, 17, 63, 64, 65, 500, 512, 1025, 4096)],
    "drafts": [(2, 300), (2, 2), (1, 40)],
    "prefill": [(7, 7), (64, 64), (300, 300)],
    "chunk": [(128, 1024), (33, 100)],
    "mixed": [(1, 900), (200, 200), (1, 1), (40, 700), (0, 0), (2, 129)],
    "many": [(1, 50 + 37 * n) for n in range(64)],
}

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", autouse=True)
def _library() -> None:
    status = available_backends("cuda" if torch.cuda.is_available() else "cpu")["cuda"]
    if not status.is_available:
        pytest.skip(f"the compiled back end does not work here: {status.reason}")


def random_step(
    lengths: list[tuple[int, int]],
) -> tuple[Tensor, Tensor, Tensor, AttentionMetadata]:
    """q, a layer's k and v in scattered blocks, NaN around them, and the step's metadata."""
    generator = torch.Generator().manual_seed(len(lengths))
    num_blocks = sum(-(-seq_len // BLOCK_SIZE) for _, seq_len in lengths) + 3
    free = torch.randperm(num_blocks, generator=generator).tolist()
    tables = [[free.pop() for _ in range(-(-seq_len // BLOCK_SIZE))] for _, seq_len in lengths]
    spec = KVCacheSpec(
        num_layers=1, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE
    )
    layer = KVCache(spec, num_blocks, device="cuda").layer(0)
    for cache in (layer.k, layer.v):
        cache.fill_(float("nan"))
    seq_lens = [seq_len for _, seq_len in lengths]

    def metadata_of(query_lens: list[int]) -> AttentionMetadata:
        return AttentionMetadata.from_host(
            query_lens,
            seq_lens,
            tables,
            block_size=BLOCK_SIZE,
            num_blocks=num_blocks,
            device="cuda",
        )

    def normal(tokens: int, heads: int) -> Tensor:
        size = (tokens, heads, HEAD_DIM)
        return torch.randn(size, generator=generator).to("cuda", torch.float16)

    keys = sum(seq_lens)
    # The reference writes the cache: what is compared is attention alone.
    k, v = (normal(keys, NUM_KV_HEADS) for _ in "kv")
    store_kv(k, v, layer.k, layer.v, metadata_of(seq_lens), backend="reference")
    query_lens = [query_len for query_len, _ in lengths]
    return normal(sum(query_lens), NUM_HEADS), layer.k, layer.v, metadata_of(query_lens)


@pytest.mark.parametrize("name", STEPS)
def test_compiled_kernel_equals_python(name: str) -> None:
    q, k, v, metadata = random_step(STEPS[name])
    scale = HEAD_DIM**-0.5
    out = torch.full_like(q, float("nan"))
    paged_attention(q, k, v, metadata, scale=scale, backend="cuda", out=out)
    # The specification in float32, over the same half-precision bits.
    expected = paged_attention(
        q.float(), k.float(), v.float(), metadata, scale=scale, backend="reference"
    )
    error = (out.float() - expected).abs().max().item()
    # A half has 11 bits: the output's rounding, and that of weights that sum to one.
    assert error <= 2**-10 * max(1.0, expected.abs().max().item())
    relative = ((out.float() - expected).norm() / expected.norm()).item()
    assert relative < 1e-3


def test_a_step_alone_and_among_others_has_the_same_bits() -> None:
    q, k, v, metadata = random_step(STEPS["many"])
    scale = HEAD_DIM**-0.5
    together = paged_attention(q, k, v, metadata, scale=scale, backend="cuda")
    for index in (0, 9, 31, 63):
        seq_len = STEPS["many"][index][1]
        row = int(metadata.rows[index])
        table = metadata.block_tables[row, : -(-seq_len // BLOCK_SIZE)].tolist()
        alone = AttentionMetadata.from_host(
            [1], [seq_len], [table], block_size=BLOCK_SIZE, num_blocks=k.shape[0], device="cuda"
        )
        mine = q[index : index + 1]
        assert torch.equal(
            paged_attention(mine, k, v, alone, scale=scale, backend="cuda")[0], together[index]
        )
