"""The attention contract on a GPU: thousands of steps, eager and by graph, and large caches."""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest
import torch
from contract_gpu import (
    SPECIALISATIONS,
    Buffers,
    Specialisation,
    check_step,
    num_compiled,
    random_step,
)
from contract_harness import backends_here

import pagetide_kernels as pk
from pagetide_kvcache import BlockCopy, KVCacheSpec
from pagetide_kvcache.storage import KVCache

ON_GPU = [(name, device) for name, device in backends_here() if device == "cuda"]
GPU_BACKENDS = pytest.mark.parametrize(
    "backend", [name for name, _ in ON_GPU if name != "reference"] or ["none"]
)
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason="needs an NVIDIA GPU and a back end for it")


@pytest.mark.gpu
@NEEDS_GPU
@GPU_BACKENDS
@pytest.mark.parametrize("spec", SPECIALISATIONS, ids=str)
def test_many_steps_on_a_gpu(backend: str, spec: Specialisation) -> None:
    """Over 5,000 random steps in all, eager and by graph, with few compiled kernels.

    ``PAGETIDE_GPU_STEPS`` sets the steps of each specialisation, ``PAGETIDE_GPU_RECORD`` names a
    folder for a line of JSON each.
    """
    steps = int(os.environ.get("PAGETIDE_GPU_STEPS", "320"))
    chosen = pk.select_backend(backend, spec.shape, "cuda")
    compiled, started = num_compiled(), time.perf_counter()
    buffers = Buffers(spec, chosen, "cuda")
    rng, generator = random.Random(str(spec)), torch.Generator("cuda").manual_seed(0)
    for _ in range(steps):
        check_step(buffers, random_step(buffers, rng, generator))
    if folder := os.environ.get("PAGETIDE_GPU_RECORD"):
        record = {
            "backend": backend, "specialisation": str(spec), "steps": steps,
            "compiled": num_compiled() - compiled,
            "seconds": round(time.perf_counter() - started, 1),
        }  # fmt: skip
        name = f"{backend}-{SPECIALISATIONS.index(spec)}.json"
        Path(folder, name).write_text(json.dumps(record) + "\n", encoding="utf-8")


@pytest.mark.gpu
@NEEDS_GPU
@GPU_BACKENDS
@pytest.mark.parametrize("kv_dtype", ["float16", "int8"])
def test_a_cache_beyond_32_bits(backend: str, kv_dtype: str) -> None:
    """More than 2^31 elements, block ids beyond 65,536: the bits are those of a small cache."""
    num_blocks = 1_100_000  # of 2,048 elements
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free GPU memory")
    layers = {}
    ids = {"small": list(range(70)), "large": [num_blocks - 1 - 7919 * i for i in range(70)]}
    ids["large"][:4] = [65_535, 65_536, 1_048_575, 1_048_576]
    query_lens, seq_lens = [1, 30, 3, 1], [300, 60, 500, 1]
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(n, heads, 64, generator=generator).to("cuda", torch.float16)
        for n, heads in ((sum(query_lens), 6), (sum(seq_lens), 2), (sum(seq_lens), 2))
    )
    caches = {}
    for size, blocks in ids.items():
        spec = KVCacheSpec(1, 2, 64, 16, kv_dtype)
        caches[size] = KVCache(spec, num_blocks if size == "large" else 70, device="cuda")
        layer = caches[size].layer(0)
        left = iter(blocks)
        tables = [[next(left) for _ in range(-(-n // 16))] for n in seq_lens]
        host = {"block_size": 16, "num_blocks": num_blocks, "device": "cuda"}
        scales = {"k_scales": layer.k_scales, "v_scales": layer.v_scales}
        full = pk.AttentionMetadata.from_host(seq_lens, seq_lens, tables, **host)
        pk.store_kv(k, v, layer.k, layer.v, full, **scales, backend=backend)
        metadata = pk.AttentionMetadata.from_host(query_lens, seq_lens, tables, **host)
        layers[size] = pk.paged_attention(
            q, layer.k, layer.v, metadata, scale=0.125, **scales, backend=backend
        )
    assert caches["large"].layer(0).k.numel() > 2**31
    assert torch.equal(layers["large"], layers["small"])
    assert layers["large"].isfinite().all()
    assert (layers["large"] != 0).any(dim=-1).all()

    large = caches["large"]
    untouched = next(b for b in range(num_blocks - 1, 0, -1) if b not in ids["large"])
    pk.copy_blocks(
        large, [BlockCopy(ids["large"][0], untouched), BlockCopy(1_048_576, 5)], backend=backend
    )
    assert torch.equal(large.data[:, :, untouched], large.data[:, :, ids["large"][0]])
    assert torch.equal(large.data[:, :, 5], large.data[:, :, 1_048_576])
    assert large.data[:, :, 5].any()
