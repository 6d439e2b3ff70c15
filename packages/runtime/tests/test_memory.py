"""How many blocks the pool gets."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from pagetide_kvcache import KVCacheSpec
from pagetide_runtime import MemoryPlanError, memory

CPU = torch.device("cpu")
SPEC = KVCacheSpec(num_layers=2, num_kv_heads=2, head_dim=16, block_size=16, kv_dtype="float32")


def plan(num_blocks: int | None = None, memory_fraction: float | None = None) -> int:
    return memory.plan_num_blocks(
        SPEC, CPU, num_blocks=num_blocks, max_num_seqs=3, max_model_len=100,
        memory_fraction=memory_fraction,
    )  # fmt: skip


def test_pages_that_only_cache_files_count_as_free(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(
        "MemTotal: 9000 kB\nMemFree: 10 kB\nMemAvailable:    5000 kB\nBuffers: 7 kB\n"
    )
    monkeypatch.setattr(memory, "_MEMINFO", meminfo)
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    assert memory.free_memory(CPU) == 5000 * 1024
    meminfo.unlink()
    assert memory.free_memory(CPU) > 0  # no such file: what is free outright


def test_a_containers_limit_counts_without_its_cached_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    without = memory.free_memory(CPU)
    (tmp_path / "memory.max").write_text("90000\n")
    (tmp_path / "memory.current").write_text("80000\n")
    (tmp_path / "memory.stat").write_text("anon 70000\ninactive_file 5000\nslab 7\n")
    assert memory.free_memory(CPU) == 15000
    (tmp_path / "memory.current").write_text("99000\n")
    assert memory.free_memory(CPU) == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_memory(CPU) > without / 2  # no limit: the machine's own figure


def test_the_pool_is_what_was_asked_for_or_what_the_limits_can_use_and_memory_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory, "free_memory", lambda device: 40 * SPEC.bytes_per_block)
    assert plan(num_blocks=40) == 40
    with pytest.raises(MemoryPlanError, match="at most 40 blocks"):
        plan(num_blocks=41)
    assert plan(memory_fraction=0.25) == 10
    assert plan(memory_fraction=1.0) == 3 * 7  # three requests of 100 tokens fill no more
    with pytest.raises(MemoryPlanError, match="raise memory_fraction"):
        plan(memory_fraction=0.01)
