"""The ``cpu`` back end's own decisions: batches, chunks and tiles do not change the answer."""

from __future__ import annotations

import dataclasses
import weakref

import pytest
import torch
from contract_axes import Case
from contract_harness import Problem

import pagetide_kernels as pk
from pagetide_kernels.cpu import work_list
from pagetide_kernels.cpu.tiles import Scratch

CASE = Case(
    dtypes=(torch.float32, "float32"), heads=(9, 3), head_dim=64, block_size=16, lengths="mixed",
    window=None, soft_cap=None, layout="kvcache", poison="nan",
)  # fmt: skip


@pytest.mark.parametrize("lengths", ["decode", "ragged", "mixed", "long", "drafts"])
@pytest.mark.parametrize(("window", "soft_cap"), [(None, None), (20, 5.0)])
@pytest.mark.parametrize("kv_dtype", ["float32", "int8"])
@pytest.mark.parametrize("sizes", [(1, 10**9, 1), (5000, 0, 16), (20000, 10**9, 7)])
def test_sizes_of_chunks_batches_and_tiles_do_not_matter(
    monkeypatch: pytest.MonkeyPatch,
    lengths: str,
    window: int | None,
    soft_cap: float | None,
    kv_dtype: str,
    sizes: tuple[int, int, int],
) -> None:
    case = dataclasses.replace(
        CASE, lengths=lengths, window=window, soft_cap=soft_cap, dtypes=(torch.float32, kv_dtype)
    )
    problem = Problem(case, "cpu")
    layer = problem.fill_cache("cpu", "nan")
    expected = problem.attend("reference", layer)
    monkeypatch.setattr(work_list, "CHUNK_ELEMENTS", sizes[0])
    monkeypatch.setattr(work_list, "BATCH_START_ELEMENTS", sizes[1])
    monkeypatch.setattr(work_list, "QUERY_TILE", sizes[2])
    monkeypatch.setattr("pagetide_kernels.cpu.attention.QUERY_TILE", sizes[2])
    torch.testing.assert_close(problem.attend("cpu", layer), expected, rtol=1e-5, atol=1e-5)


def plan_of(query_lens: list[int], seq_lens: list[int], window: int | None) -> work_list.Plan:
    blocks = [-(-n // 16) for n in seq_lens]
    starts = [sum(blocks[:i]) for i in range(len(blocks))]
    metadata = pk.AttentionMetadata.from_host(
        query_lens,
        seq_lens,
        [range(s, s + n) for s, n in zip(starts, blocks, strict=True)],
        block_size=16,
        num_blocks=sum(blocks),
    )
    shape = pk.AttentionShape(9, 3, 64, 16, torch.float32, "float32")
    prepared = pk.select_backend("cpu", shape, "cpu").prepare(metadata, shape)
    assert isinstance(prepared.work_list, work_list.WorkList)
    return prepared.work_list.plan(window)


def test_one_long_sequence_does_not_pad_the_others() -> None:
    plan = plan_of([1] * 8, [100, 90, 6000, 100, 110, 95, 80, 100], None)
    assert sorted(batch.chunks[-1].stop for batch in plan.batches) == [110, 6000]


def test_sequences_of_similar_length_share_a_batch() -> None:
    plan = plan_of([1] * 8, [100, 90, 130, 100, 110, 95, 80, 100], None)
    assert [batch.num_seqs for batch in plan.batches] == [8]
    assert plan.batches[0].tokens == slice(0, 8)


def test_a_window_gathers_its_own_blocks_alone() -> None:
    plan = plan_of([1, 1], [5000, 400], 40)
    assert [batch.chunks[-1].stop for batch in plan.batches] == [40, 48]
    assert plan_of([600], [5000], 40).long_queries[0].first_key == (5000 - 600 - 40 + 1) // 16 * 16


def test_a_lone_sequence_that_decodes_has_nothing_to_hide() -> None:
    for seq_len in (1, 15, 16, 17, 100):
        (batch,) = plan_of([1], [seq_len], None).batches
        assert batch.mask is None
        assert [(c.start, c.stop, len(c.padding_ids)) for c in batch.chunks] == [(0, seq_len, 0)]
    (drafts,) = plan_of([3], [20], None).batches
    assert drafts.mask is not None


def test_scratch_stays_small_and_is_reused() -> None:
    plan = plan_of([1] * 4, [20000] * 4, None)
    for batch in plan.batches:
        for chunk in batch.chunks:
            assert len(chunk.tile_ids) * 16 * 64 <= work_list.CHUNK_ELEMENTS


def test_cpu_is_refused_elsewhere() -> None:
    shape = pk.AttentionShape(9, 3, 64, 16, torch.float32, "float32")
    with pytest.raises(pk.UnsupportedError, match="computes on the CPU"):
        pk.select_backend("cpu", shape, "meta")


@pytest.mark.parametrize("kv_dtype", ["float32", "int8", "int8-block"])
def test_threads_do_not_matter(kv_dtype: str) -> None:
    case = dataclasses.replace(CASE, dtypes=(torch.float32, kv_dtype), heads=(32, 8))
    problem = Problem(case, "cpu")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        layer = problem.fill_cache("cpu", "nan")
        got = problem.attend("cpu", layer)
    finally:
        torch.set_num_threads(num_threads)
    torch.testing.assert_close(got, problem.attend("reference", layer), rtol=1e-5, atol=1e-5)


def test_scratch_keeps_one_buffer_a_name_however_the_shapes_change() -> None:
    """A view of a smaller buffer must not keep that buffer when a larger one takes its place."""
    scratch = Scratch()
    small = scratch.take("k", (2, 3), torch.float32)
    assert scratch.take("k", (2, 3), torch.float32) is small
    gone = weakref.ref(small)
    del small
    large = scratch.take("k", (4, 5), torch.float32)
    assert gone() is None
    assert scratch.take("k", (2, 3), torch.float32).data_ptr() == large.data_ptr()
