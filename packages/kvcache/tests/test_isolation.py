"""The package stands alone: no torch outside the storage module, no neighbour to its right."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from importlib.util import find_spec
from pathlib import Path

import pytest

import pagetide_kvcache

USE_EVERYTHING_WITHOUT_TORCH = """
import sys
from pagetide_kvcache import *
import pagetide_kvcache

manager = BlockManager(8, 4)
manager.admit("a", list(range(6)), 6)
manager.commit("a", list(range(6)), 6)
manager.fork("a", "b", 6)
assert len(manager.grow("b", 6, 7)) == 1
manager.truncate("a", 4)
manager.start_plan()
manager.verify()
assert KVCacheSpec(2, 2, 64).num_blocks_for(1 << 20) > 0
assert "KVCache" in dir(pagetide_kvcache)
outside = {"torch", "numpy"} & {name.partition(".")[0] for name in sys.modules}
assert not outside, outside
"""

ASK_FOR_STORAGE_WITHOUT_TORCH = """
import sys

class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError("No module named 'torch'", name="torch")

sys.meta_path.insert(0, NoTorch())
import pagetide_kvcache
for name in ("KVCache", "LayerKVCache"):
    try:
        getattr(pagetide_kvcache, name)
    except ModuleNotFoundError as error:
        assert 'pip install "pagetide-kvcache[torch]"' in str(error), error
    else:
        raise SystemExit(f"{name} was imported without torch")
"""


def run(program: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr


def test_the_manager_imports_no_torch() -> None:
    run(USE_EVERYTHING_WITHOUT_TORCH)


def test_storage_without_torch_names_the_extra() -> None:
    run(ASK_FOR_STORAGE_WITHOUT_TORCH)


def test_only_the_storage_module_imports_torch() -> None:
    source = Path(pagetide_kvcache.__file__).parent
    statement = re.compile(r"^\s*(import|from) torch\b", re.MULTILINE)
    importing = {p.name for p in source.glob("*.py") if statement.search(p.read_text("utf-8"))}
    assert importing == {"storage.py"}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'KVCash'"):
        pagetide_kvcache.KVCash  # noqa: B018


@pytest.mark.skipif(
    os.environ.get("PAGETIDE_ISOLATED") != "1",
    reason="only where nox installed this package alone (PAGETIDE_ISOLATED=1)",
)
def test_the_installed_package_is_the_one_under_test_and_alone() -> None:
    installed = Path(sysconfig.get_path("purelib")).resolve()
    assert installed in Path(pagetide_kvcache.__file__).resolve().parents
    for name in ("kernels", "models", "scheduler", "runtime"):
        assert find_spec(f"pagetide_{name}") is None
