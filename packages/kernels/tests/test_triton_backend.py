"""What the Triton back end refuses, with what to use instead; nothing here needs a GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import pagetide_kernels as pk

pytest.importorskip("triton", reason="Triton is not installed (Linux only)")
HALF = pk.AttentionShape(8, 2, 64, 16, torch.float16, "float16")
BFLOAT = pk.AttentionShape(8, 2, 64, 16, torch.bfloat16, "bfloat16")


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> pk.AttentionBackend:
    """The back end on a machine whose GPU has the compute capability of an A100."""
    from pagetide_kernels.triton.backend import TritonBackend

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    return TritonBackend()


CUDA = torch.device("cuda")


def test_serves_what_the_design_names(backend: pk.AttentionBackend) -> None:
    for head_dim in range(32, 257, 8):
        for block_size in (8, 16, 32, 64):
            shape = pk.AttentionShape(8, 2, head_dim, block_size, torch.float16, "int8")
            assert backend.unsupported_reason(shape, CUDA) is None
    assert backend.unsupported_reason(BFLOAT, CUDA) is None
    assert backend.unsupported_reason(None, CUDA) is None


@pytest.mark.parametrize("capability", [(7, 0), (7, 5)])
@pytest.mark.parametrize("shape", [HALF, BFLOAT, None], ids=str)
def test_older_cards_are_sent_to_cuda(
    backend: pk.AttentionBackend,
    monkeypatch: pytest.MonkeyPatch,
    capability: tuple[int, int],
    shape: pk.AttentionShape | None,
) -> None:
    """bfloat16 below 8.0 above all: torch would emulate it, and say that it is supported."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    reason = backend.unsupported_reason(shape, CUDA)
    assert reason is not None
    assert ".".join(map(str, capability)) in reason
    assert "'cuda' back end" in reason
    assert "float16" in reason


@pytest.mark.parametrize("head_dim", [8, 24, 31, 33, 100, 257, 264, 512])
def test_other_head_dims_are_sent_to_the_reference(
    backend: pk.AttentionBackend, head_dim: int
) -> None:
    shape = pk.AttentionShape(8, 2, head_dim, 16, torch.float16, "float16")
    reason = backend.unsupported_reason(shape, CUDA)
    assert reason is not None
    assert f"head_dim={head_dim} " in reason
    assert "'reference'" in reason


@pytest.mark.parametrize("block_size", [1, 4, 12, 128])
def test_other_block_sizes_are_refused(backend: pk.AttentionBackend, block_size: int) -> None:
    shape = pk.AttentionShape(8, 2, 64, block_size, torch.float16, "float16")
    reason = backend.unsupported_reason(shape, CUDA)
    assert reason is not None
    assert f"block_size={block_size} " in reason
    assert "(8, 16, 32, 64)" in reason


def test_large_groups_are_refused(backend: pk.AttentionBackend) -> None:
    shape = pk.AttentionShape(128, 1, 64, 16, torch.float16, "float16")
    reason = backend.unsupported_reason(shape, CUDA)
    assert reason is not None
    assert "at most 64" in reason
    assert "'reference'" in reason


def test_cpu_tensors_are_refused_by_a_typed_error() -> None:
    """In a process of its own: here or elsewhere somebody may be interpreting."""
    code = """
import torch, pagetide_kernels as pk
metadata = pk.AttentionMetadata.from_host([1], [1], [[0]], block_size=16, num_blocks=1)
cache = torch.zeros(1, 2, 16, 64)
try:
    pk.paged_attention(
        torch.zeros(1, 8, 64), cache, cache, metadata, scale=1.0, backend="triton"
    )
except pk.UnsupportedError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True,
        env={"PATH": "", "PYTHONPATH": ":".join(sys.path)},
    )  # fmt: skip
    assert "not on cpu; use 'cpu' there" in done.stdout
    assert "use cpu or reference" in done.stdout


def test_shared_memory_decides_the_prefill_tile_alone() -> None:
    """Tiles along the keys and leaves, the arithmetic, are the same on every card."""
    from pagetide_kernels.triton.tuning import tuning_for

    for head_dim in (64, 128, 256):
        for query_dtype, kv_dtype in ((torch.float16, "float16"), (torch.float32, "float32")):
            shape = pk.AttentionShape(32, 8, head_dim, 16, query_dtype, kv_dtype)
            arithmetic = {
                (
                    tuning.tile,
                    tuning.decode_warps,
                    tuning.leaf_growth,
                    tuning.min_leaf_tiles,
                    tuning.group,
                    tuning.prefill_tile,
                )
                for tuning in (tuning_for(shape, card) for card in ((8, 0), (8, 9), (9, 0)))
            }
            assert len(arithmetic) == 1


@pytest.mark.parametrize("heads", [(14, 2), (12, 12), (32, 8), (64, 1)])
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_sequence_has_more_leaves_than_there_is_memory_for(
    heads: tuple[int, int], kv_dtype: str, head_dim: int
) -> None:
    """`tiles_a_leaf`, said again in Python: a shorter sequence may have more leaves."""
    from pagetide_kernels.triton.tuning import tuning_for

    shape = pk.AttentionShape(*heads, head_dim, 16, torch.float16, kv_dtype)
    tuning = tuning_for(shape, (9, 0))
    most = 0
    for seq_len in range(1, 20_000, 7):
        num_tiles = -(-seq_len // tuning.tile)
        length = tuning.min_leaf_tiles
        while length * length * tuning.tile < tuning.leaf_growth * num_tiles:
            length *= 2
        most = max(most, -(-num_tiles // length))
        assert most <= tuning.most_leaves(seq_len) <= most + 2
