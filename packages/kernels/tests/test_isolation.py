"""The package stands on kvcache alone, wherever it is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

LEFT = ("pagetide_kvcache", "pagetide_kernels")
RIGHT = ("pagetide_models", "pagetide_scheduler", "pagetide_runtime")


@pytest.mark.skipif(
    os.environ.get("PAGETIDE_ISOLATED") != "1", reason="runs where nox installed the wheels alone"
)
def test_only_wheels_of_the_left_are_here() -> None:
    site_packages = Path(sysconfig.get_path("purelib")).resolve()
    for name in LEFT:
        importlib.import_module(name)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0].startswith("pagetide_"):
            assert site_packages in Path(str(module.__file__)).resolve().parents, name
    for name in RIGHT:
        assert importlib.util.find_spec(name) is None, f"{name} is importable"


def test_no_module_of_the_right_is_imported() -> None:
    code = f"""
import pkgutil, importlib, sys
import pagetide_kernels
for name in ("ops", "reference", "cpu", "sampling", "small_ops", "backends", "metadata"):
    importlib.import_module("pagetide_kernels." + name)
sys.exit(any(name.split(".")[0] in {RIGHT!r} for name in sys.modules))
"""
    subprocess.run([sys.executable, "-c", code], check=True)
