"""Every Triton kernel compiles for every architecture it is meant for, without a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (Linux only)"
)
ARCHITECTURES = (80, 86, 89, 90, 100, 120)
KERNELS = {"decode", "prefill", "work_list", "store", "store_block_scaled", "copy"}
LIMITS = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}  # KB a block, by NVIDIA's tables


@pytest.fixture(scope="module")
def compiled() -> list[dict[str, object]]:
    """What `triton_aot.py` reports; a process of its own, for interpreting is decided at import."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("triton_aot.py"))],
        capture_output=True, text=True, env=environment, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_compiles_within_the_cards_limits(
    compiled: list[dict[str, object]], architecture: int
) -> None:
    """Machine code, tensor cores for half-precision dot products, and shared memory that fits."""
    here = [result for result in compiled if result["architecture"] == architecture]
    assert {result["kernel"] for result in here} == KERNELS
    for result in here:
        assert result["has_machine_code"], result
        assert result["limit"] == LIMITS[architecture] * 1024, result
        assert result["shared_memory"] <= LIMITS[architecture] * 1024, result  # type: ignore[operator]
        if result["kernel"] in ("decode", "prefill"):
            assert result["has_tensor_cores"] == (result["dtype"] != "fp32"), result
