"""The README's programs run, and print what it says they print."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(
    r"```python\n(?P<program>.*?)```.*?```text\n(?P<output>.*?)```",
    README.read_text("utf-8"),
    re.DOTALL,
)


def test_no_program_is_left_out() -> None:
    assert len(EXAMPLES) == README.read_text("utf-8").count("```python") == 2


@pytest.mark.parametrize(("program", "output"), EXAMPLES, ids=range(len(EXAMPLES)))
def test_the_program_prints_what_the_readme_shows(program: str, output: str) -> None:
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, str(README), "exec"), {})
    assert printed.getvalue() == output
