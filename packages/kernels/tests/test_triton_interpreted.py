"""The contract over `triton`, its kernels interpreted: what of the back end a CPU can prove.

Interpreting is decided when Triton is imported, and it would slow every other test here: so the
contract's files run once more in processes of their own, two of them, half of the cases each.
"""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = (
    "test_contract.py", "test_contract_scores.py", "test_contract_company.py",
    "test_copy_blocks.py", "test_quantized_cache.py",
)  # fmt: skip
NUM_SHARDS = 2

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (Linux only)"
)


def interpreted(*options: str, **environment: str) -> subprocess.Popen[str]:
    """The contract's tests of `triton` on the CPU, started."""
    return subprocess.Popen(
        [sys.executable, "-m", "pytest", "-q", "-rs", "-p", "no:cacheprovider", "--tb=short",
         "-W", "ignore", "-W", "error::pytest.PytestUnraisableExceptionWarning",
         # Programs of a full card follow each other in `test_exactness_level_1`, too; no maxima lag
         # here, and all begin at the same constant.
         "-m", "not gpu",
         "-k", "not test_a_full_card and not test_steep and not test_scores_may", *options,
         *(str(TESTS / name) for name in FILES)],
        env={
            **os.environ, "TRITON_INTERPRET": "1", "PAGETIDE_BACKENDS": "triton",
            "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **environment,
        },
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip


@pytest.fixture(scope="module")
def shards() -> Iterator[list[subprocess.Popen[str]]]:
    """All at once: they are what takes long in this folder."""
    started = [interpreted(PAGETIDE_SHARD=f"{i}/{NUM_SHARDS}") for i in range(NUM_SHARDS)]
    yield started
    for shard in started:
        shard.kill()


@pytest.mark.parametrize("index", range(NUM_SHARDS))
def test_the_contract_holds_interpreted(shards: list[subprocess.Popen[str]], index: int) -> None:
    """Every case passes and none is skipped; a back end that vanished would have no cases."""
    output, _ = shards[index].communicate()
    assert shards[index].returncode == 0, output
    counts = {word: int(number) for number, word in re.findall(r"(\d+) (\w+)", output)}
    assert 120 <= counts["passed"] <= 150, output  # at most 300 cases in all
    assert "skipped" not in counts, output
