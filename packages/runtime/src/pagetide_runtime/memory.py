"""How large the KV pool may be on this device."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Final

import torch

from pagetide_kvcache import KVCacheSpec
from pagetide_runtime.errors import MemoryPlanError

__all__ = ["free_memory", "plan_num_blocks"]

# Of the free bytes: on a card nearly all memory is the engine's; on a CPU the user's other programs
# and the model's own activations live in the same memory.
_DEFAULT_FRACTION: Final = {"cuda": 0.85, "cpu": 0.25}
_MEMINFO: Final = Path("/proc/meminfo")
_CGROUP: Final = Path("/sys/fs/cgroup")  # version 2; a container sees its own group as the root


def free_memory(device: torch.device) -> int:
    """Bytes that can still be taken on `device`.

    On a CPU the kernel's own estimate, `MemAvailable`, or what a container's limit leaves, if that
    is less: pages that hold only cached files, such as a model that was just read, count as free.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free)
    available = _meminfo_available()
    left = _cgroup_left()
    return available if left is None else min(available, left)


def _meminfo_available() -> int:
    try:
        found = re.search(r"^MemAvailable:\s+(\d+) kB", _MEMINFO.read_text(), flags=re.MULTILINE)
    except OSError:
        found = None
    if found is not None:
        return int(found[1]) * 1024
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")  # cached pages not counted


def _cgroup_left() -> int | None:
    """Bytes below the control group's limit; None: no limit, or none to be read."""
    try:
        limit, used, stat = (
            (_CGROUP / f"memory.{name}").read_text() for name in ("max", "current", "stat")
        )
        cached = re.search(r"^inactive_file (\d+)$", stat, flags=re.MULTILINE)
        return max(0, int(limit) - int(used) + (int(cached[1]) if cached else 0))
    except (OSError, ValueError):  # no such group, or its limit is the word "max"
        return None


def plan_num_blocks(
    spec: KVCacheSpec,
    device: torch.device,
    *,
    num_blocks: int | None,
    max_num_seqs: int,
    max_model_len: int,
    memory_fraction: float | None,
) -> int:
    """Blocks of the pool: what was asked for, else what memory allows and the limits can use.

    More blocks than `max_num_seqs` requests of `max_model_len` tokens could fill are never taken.

    Raises:
        MemoryPlanError: `num_blocks` needs more bytes than are free, or not even one block fits.
    """
    free = free_memory(device)
    if num_blocks is not None:
        needed = num_blocks * spec.bytes_per_block
        if needed > free:
            raise MemoryPlanError(
                f"num_blocks={num_blocks} takes {needed / 2**20:,.0f} MiB as {spec.kv_dtype}, and "
                f"{free / 2**20:,.0f} MiB are free on {device}: ask for at most "
                f"{free // spec.bytes_per_block} blocks, or for a smaller kv_dtype"
            )
        return num_blocks
    fraction = _DEFAULT_FRACTION[device.type] if memory_fraction is None else memory_fraction
    usable = max_num_seqs * -(-max_model_len // spec.block_size)
    affordable = int(free * fraction) // spec.bytes_per_block
    if affordable < 1:
        raise MemoryPlanError(
            f"{free / 2**20:,.0f} MiB are free on {device} and one KV block takes "
            f"{spec.bytes_per_block / 2**20:.2f} MiB: free memory or raise memory_fraction "
            f"(now {fraction})"
        )
    return min(usable, affordable)
