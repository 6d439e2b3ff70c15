"""The README's examples run as printed, and print what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_examples_run_as_printed() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile("\n".join(blocks), str(README), "exec"), {"__name__": "readme"})
    shown = re.search(r"It prints:\n\n```text\n(.*?)```", README.read_text(), flags=re.DOTALL)
    assert shown is not None
    assert printed.getvalue() == shown[1]
