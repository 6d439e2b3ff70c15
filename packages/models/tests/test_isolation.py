"""What this package may import: its left neighbours, and in an isolated environment nothing else.

The isolation session installs the wheels of this package and of its left neighbours alone, sets
PAGETIDE_ISOLATED=1 and runs these tests there.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import sysconfig
from pathlib import Path

import pytest

isolated = pytest.mark.skipif(
    os.environ.get("PAGETIDE_ISOLATED") != "1",
    reason="runs where only this package and its left neighbours are installed (nox)",
)


@isolated
@pytest.mark.parametrize("name", ["pagetide_scheduler", "pagetide_runtime"])
def test_right_hand_packages_are_not_there(name: str) -> None:
    assert importlib.util.find_spec(name) is None


@isolated
def test_everything_imported_lies_in_site_packages() -> None:
    import pagetide_models

    if importlib.util.find_spec("torch") is not None:
        import pagetide_kernels
        import pagetide_kvcache

        assert pagetide_kernels.__file__
        assert pagetide_kvcache.__file__
        for name in pagetide_models.__all__:
            getattr(pagetide_models, name)
    places = {Path(sysconfig.get_path(kind)).resolve() for kind in ("purelib", "platlib")}
    files = {
        name: Path(module.__file__).resolve()
        for name, module in list(sys.modules.items())
        if name.partition(".")[0].startswith("pagetide_") and module.__file__
    }
    assert files
    for name, file in files.items():
        assert any(place in file.parents for place in places), f"{name} comes from {file}"


def test_every_public_name_exists() -> None:
    import pagetide_models

    if importlib.util.find_spec("torch") is None:
        names = [n for n in pagetide_models.__all__ if n not in ("CausalLM", "load_model")]
    else:
        names = pagetide_models.__all__
    for name in names:
        assert getattr(pagetide_models, name) is not None
    assert set(dir(pagetide_models)) == set(pagetide_models.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        _ = pagetide_models.nothing
