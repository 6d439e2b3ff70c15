"""The README's program runs and prints what the README says."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"


@pytest.mark.skipif(not README.exists(), reason="the README is not beside the tests")
def test_the_program_prints_what_the_readme_says() -> None:
    text = README.read_text(encoding="utf-8")
    programs = re.findall(r"```python\n(from .*?)```", text, re.DOTALL)
    printed = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    assert len(programs) == len(printed) == 1
    run = subprocess.run([sys.executable, "-c", programs[0]], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout == printed[0]
