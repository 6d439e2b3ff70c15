"""The compiled back end where it cannot run: typed errors, each with what to use instead."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import pagetide_kernels as pk
from pagetide_kernels.cuda import library
from pagetide_kernels.cuda.backend import CudaBackend
from pagetide_kernels.cuda.tuning import Tuning, tuning_for

SHAPE = pk.AttentionShape(8, 2, 64, 16, torch.float16, "float16")
GPU = torch.device("cuda:0")


def shape_of(**changes: object) -> pk.AttentionShape:
    values = {name: getattr(SHAPE, name) for name in SHAPE.__dataclass_fields__}
    return pk.AttentionShape(**{**values, **changes})


@pytest.fixture
def card_of_75(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a GPU were here that runs code compiled for sm_75."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(library, "missing_reason", lambda: None)
    monkeypatch.setattr(library, "compiled_architecture", lambda _: 75)


@pytest.fixture
def forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing remembered of the library, before and after."""
    for function in (library.missing_reason, library._module):
        function.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    for function in (library.missing_reason, library._module):
        function.cache_clear()


def test_a_cpu_tensor_is_refused_by_type() -> None:
    with pytest.raises(pk.UnsupportedError, match=r"not on cpu; use 'cpu' there"):
        pk.select_backend("cuda", SHAPE, "cpu")
    metadata = pk.AttentionMetadata.from_host([1], [1], [[0]], block_size=16, num_blocks=1)
    cache = torch.zeros(1, 2, 16, 64, dtype=torch.float16)
    q = torch.zeros(1, 8, 64, dtype=torch.float16)
    with pytest.raises(pk.UnsupportedError, match="use cpu or reference"):
        pk.paged_attention(q, cache, cache, metadata, scale=1.0, backend="cuda")


@pytest.mark.usefixtures("card_of_75")
def test_the_arithmetic_that_an_architecture_lacks() -> None:
    backend = CudaBackend()
    assert backend.unsupported_reason(SHAPE, GPU) is None
    bfloat16 = shape_of(query_dtype=torch.bfloat16, kv_dtype="bfloat16")
    assert "use float16 or float32" in str(backend.unsupported_reason(bfloat16, GPU))
    widened = shape_of(query_dtype=torch.float32, kv_dtype="bfloat16")  # on CUDA cores
    assert backend.unsupported_reason(widened, GPU) is None


@pytest.mark.usefixtures("card_of_75")
@pytest.mark.parametrize("head_dim", [8, 24, 100, 257, 512])
def test_an_unsupported_head_dim_names_the_alternative(head_dim: int) -> None:
    reason = CudaBackend().unsupported_reason(shape_of(head_dim=head_dim), GPU)
    assert f"head_dim={head_dim}" in str(reason)
    assert "'reference'" in str(reason)


@pytest.mark.usefixtures("card_of_75")
@pytest.mark.parametrize("block_size", [1, 4, 24, 128])
def test_an_unsupported_block_size_names_the_alternative(block_size: int) -> None:
    reason = CudaBackend().unsupported_reason(shape_of(block_size=block_size), GPU)
    assert f"block_size={block_size}" in str(reason)
    assert "'reference'" in str(reason)


def test_an_absent_library_says_how_to_get_one(
    forgotten: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    forgotten.setattr(library, "_PATH", tmp_path / "absent.so")
    forgotten.setattr(torch.cuda, "is_available", lambda: True)
    reason = str(CudaBackend().unsupported_reason(SHAPE, GPU))
    for word in ("no compiled CUDA library", "g++", "nvcc", "PAGETIDE_BUILD_CUDA=1", "'triton'"):
        assert word in reason


def test_a_library_that_does_not_load_says_why(
    forgotten: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("tvm_ffi", reason="apache-tvm-ffi is for Linux")
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    forgotten.setattr(library, "_PATH", broken)
    assert "cannot be loaded" in str(library.missing_reason())
    assert "'triton'" in str(library.missing_reason())


def test_without_tvm_ffi_everything_else_works(tmp_path: Path) -> None:
    code = f"""
import pathlib, sys
sys.modules["tvm_ffi"] = None
import torch, pagetide_kernels as pk
from pagetide_kernels.cuda import library
library._PATH = pathlib.Path({str(tmp_path)!r}) / "library.so"
library._PATH.touch()
print(library.missing_reason())
metadata = pk.AttentionMetadata.from_host([1], [1], [[0]], block_size=16, num_blocks=1)
cache, q = torch.zeros(1, 1, 16, 64), torch.zeros(1, 1, 64)
print(pk.paged_attention(q, cache, cache, metadata, scale=1.0).sum().item())
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    reason, total = done.stdout.splitlines()
    assert "apache-tvm-ffi cannot be imported" in reason
    assert "install it" in reason
    assert total == "0.0"


def test_an_installed_library_loads_without_a_gpu() -> None:
    if not library._PATH.exists():
        pytest.skip("this installation is pure: it has no compiled library")
    assert library.missing_reason() is None
    if not torch.cuda.is_available():
        assert isinstance(library.compiled_architecture(0), str)  # why none of its code runs here


def test_the_module_says_whether_the_library_is_there() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagetide_kernels"], capture_output=True, text=True, check=True
    )
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("compiled CUDA")]
    assert line == f"compiled CUDA library: {library.missing_reason() or 'loads'}"


def leaf_keys(tuning: Tuning, seq_len: int) -> int:
    """What ``leaf_keys_of`` in ``work_list_cut.cuh`` computes."""
    keys = tuning.min_leaf_keys
    while (
        keys < tuning.long_leaf_keys and keys * tuning.few_leaves < seq_len
    ) or keys * tuning.max_leaves < seq_len:
        keys *= 2
    return keys


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4, 8])
def test_the_buffers_hold_the_leaves_of_every_length(num_kv_heads: int) -> None:
    tuning = tuning_for(shape_of(num_heads=num_kv_heads, num_kv_heads=num_kv_heads))
    most = 0
    for seq_len in [*range(2100), 4096, 4097, 32768, 32769, 131072, 10**6]:
        most = max(most, -(-seq_len // leaf_keys(tuning, seq_len)))
        assert most <= tuning.most_leaves(seq_len) <= tuning.max_leaves
