"""How the compiled back end deals a step to thread blocks, which is arithmetic alone."""

from __future__ import annotations

import pytest
import torch

from pagetide_kernels import AttentionShape
from pagetide_kernels.cuda.tuning import Path, tuning_for
from pagetide_kernels.cuda.work_list import _num_runs

MULTIPROCESSORS = 132  # of an H200


def runs(
    num_seqs: int, kv_dtype: str = "float16", *, num_kv_heads: int = 8, head_dim: int = 128,
    num_rows: int = 4, is_hopper: bool = True,
) -> int:  # fmt: skip
    """Thread blocks of a KV head, for sequences of 4,096 keys."""
    shape = AttentionShape(4 * num_kv_heads, num_kv_heads, head_dim, 16, torch.float16, kv_dtype)
    tuning = tuning_for(shape, is_hopper=is_hopper)
    leaves = tuning.most_leaves(4096)
    return _num_runs(num_seqs, leaves, num_kv_heads, num_rows, MULTIPROCESSORS, tuning)


@pytest.mark.parametrize(("num_kv_heads", "num_seqs"), [(8, 16), (4, 32), (4, 33), (1, 132)])
def test_a_multiprocessor_gets_one_block_with_a_whole_sequence(
    num_kv_heads: int, num_seqs: int
) -> None:
    assert runs(num_seqs, num_kv_heads=num_kv_heads) == MULTIPROCESSORS // num_kv_heads


@pytest.mark.parametrize("num_seqs", [1, 9, 10, 13, 15, 17, 18, 20, 33, 34, 48, 64])
def test_it_gets_two_where_one_would_split_a_sequence_or_have_none(num_seqs: int) -> None:
    assert runs(num_seqs) == min(2 * MULTIPROCESSORS // 8, 8 * num_seqs)  # of 8 leaves each


def test_it_gets_two_where_one_is_not_known_to_keep_up() -> None:
    assert runs(16, "int8") == runs(16, is_hopper=False) == runs(16, num_rows=16) == 33
    assert runs(16, head_dim=96) == runs(16, head_dim=256) == 33


@pytest.mark.parametrize("query_dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("kv_dtype", ["same", "int8"])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("num_kv_heads", [1, 3, 8, 32])
def test_every_step_fits_the_card(
    query_dtype: torch.dtype, kv_dtype: str, head_dim: int, num_kv_heads: int
) -> None:
    """No more blocks than a multiprocessor is given, and none without a leaf."""
    stored = str(query_dtype)[6:] if kv_dtype == "same" else kv_dtype
    shape = AttentionShape(num_kv_heads, num_kv_heads, head_dim, 16, query_dtype, stored)
    tuning = tuning_for(shape, is_hopper=True)
    assert (tuning.path == Path.MMA) == (query_dtype == torch.float16)
    assert 1 <= tuning.least_blocks_an_sm <= tuning.blocks_an_sm
    most = max(MULTIPROCESSORS * tuning.blocks_an_sm, num_kv_heads)
    for num_seqs in (1, 2, 7, 16, 64, 132, 500):
        for seq_len in (1, 100, 4096, 100_000):
            leaves = tuning.most_leaves(seq_len)
            count = _num_runs(num_seqs, leaves, num_kv_heads, 1, MULTIPROCESSORS, tuning)
            assert 1 <= count <= num_seqs * leaves
            assert count * num_kv_heads <= most
