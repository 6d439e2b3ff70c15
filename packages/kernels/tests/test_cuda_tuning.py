"""How the compiled back end deals a step to thread blocks, which is arithmetic alone."""

import pytest
import torch

from pagetide_kernels import AttentionShape
from pagetide_kernels.cuda.tuning import Path, tuning_for
from pagetide_kernels.cuda.work_list import _num_runs

MULTIPROCESSORS = 132  # of an H200


def runs(num_seqs: int, kv_dtype: str = "float16", *, is_hopper: bool = True) -> int:
    """Thread blocks of each of Llama's eight KV heads, for sequences of 4,096 keys."""
    shape = AttentionShape(32, 8, 128, 16, torch.float16, kv_dtype)
    tuning = tuning_for(shape, is_hopper=is_hopper)
    return _num_runs(num_seqs, tuning.most_leaves(4096), 8, MULTIPROCESSORS, tuning)


@pytest.mark.parametrize("num_seqs", [15, 16, 32, 33, 64])
def test_whole_sequences_go_to_one_block_where_that_costs_nothing(num_seqs: int) -> None:
    assert runs(num_seqs) == (16 if num_seqs <= 16 else 33)


def test_two_blocks_share_a_sequence_where_one_would_have_more_to_do() -> None:
    assert runs(12) == runs(20) == 33  # of 132 / 8 x 2


def test_one_block_is_not_enough_for_int8_nor_elsewhere() -> None:
    assert runs(16, "int8") == runs(16, is_hopper=False) == 33


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
    most = MULTIPROCESSORS * tuning.blocks_an_sm
    for num_seqs in (1, 2, 7, 64, 500):
        for seq_len in (1, 100, 4096, 100_000):
            leaves = tuning.most_leaves(seq_len)
            count = _num_runs(num_seqs, leaves, num_kv_heads, MULTIPROCESSORS, tuning)
            assert 1 <= count <= num_seqs * leaves
            assert count * num_kv_heads <= max(most, num_kv_heads)
