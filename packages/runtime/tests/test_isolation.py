"""The package is what its wheel installs, and asks for nothing heavy before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.mark.skipif(
    os.environ.get("PAGETIDE_ISOLATED") != "1", reason="only where wheels alone are installed"
)
def test_every_pagetide_module_comes_from_this_environment() -> None:
    files = run_python(
        "import sys, pagetide_runtime.llm, pagetide_runtime.cli.generate\n"
        "print('\\n'.join(m.__file__ for n, m in sys.modules.items() if n.startswith('pagetide')))"
    ).splitlines()
    home = Path(sysconfig.get_paths()["purelib"]).resolve()
    assert len(files) > 40
    assert [file for file in files if home not in Path(file).resolve().parents] == []


def test_the_package_and_its_command_import_no_torch() -> None:
    loaded = run_python(
        "import sys, pagetide_runtime, pagetide_runtime.cli\n"
        "from pagetide_runtime import SamplingParams, FinishReason\n"
        "print('torch' in sys.modules, 'transformers' in sys.modules)"
    )
    assert loaded == "False False"


def test_every_public_name_resolves() -> None:
    import pagetide_runtime

    for name in pagetide_runtime.__all__:
        assert getattr(pagetide_runtime, name) is not None
    assert set(pagetide_runtime.__all__) <= set(dir(pagetide_runtime))
    with pytest.raises(AttributeError, match="nonsense"):
        _ = pagetide_runtime.nonsense  # type: ignore[attr-defined]
