"""The package alone: no torch by import, and in an isolated session nothing from elsewhere."""

from __future__ import annotations

import importlib
import importlib.util
import os
import pkgutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

import pagetide_scheduler

ISOLATED = os.environ.get("PAGETIDE_ISOLATED") == "1"
RIGHT_HAND = ("pagetide_runtime",)
needs_isolation = pytest.mark.skipif(
    not ISOLATED, reason="PAGETIDE_ISOLATED is not 1: packages share this environment"
)


def test_importing_every_module_never_imports_torch() -> None:
    code = (
        "import importlib, pkgutil, sys, pagetide_scheduler as p\n"
        "for m in pkgutil.iter_modules(p.__path__):\n"
        "    if m.name != '__main__': importlib.import_module(f'{p.__name__}.{m.name}')\n"
        "bad = {'torch', 'pagetide_kernels', 'pagetide_runtime', 'matplotlib'} & set(sys.modules)\n"
        "sys.exit(f'imported {bad}' if bad else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.skipif(
    not ISOLATED, reason="PAGETIDE_ISOLATED is not 1: packages share this environment"
)
def test_every_module_comes_from_this_environment() -> None:
    site_packages = Path(sysconfig.get_paths()["purelib"]).resolve()
    for module in pkgutil.iter_modules(pagetide_scheduler.__path__):
        if module.name != "__main__":
            importlib.import_module(f"pagetide_scheduler.{module.name}")
    for name, module in list(sys.modules.items()):
        if name.startswith("pagetide_") and getattr(module, "__file__", None):
            path = Path(module.__file__).resolve()
            assert site_packages in path.parents, f"{name} comes from {path}"


@pytest.mark.skipif(
    not ISOLATED, reason="PAGETIDE_ISOLATED is not 1: packages share this environment"
)
@pytest.mark.parametrize("name", RIGHT_HAND)
def test_packages_to_the_right_are_not_importable(name: str) -> None:
    assert importlib.util.find_spec(name) is None
