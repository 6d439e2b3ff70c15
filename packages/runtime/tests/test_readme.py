"""The README's example runs as printed and prints what it says."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
ROOT = Path(__file__).parents[3]


@pytest.mark.model
def test_the_example_prints_what_the_readme_says(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = README.read_text()
    (code,) = re.findall(r"```python\n(from pagetide_runtime.*?)```", text, re.DOTALL)
    (expected,) = re.findall(r"```text\n(.*?)```", text, re.DOTALL)
    monkeypatch.chdir(demo_model.parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, str(README), "exec"), {})
    assert printed.getvalue() == expected


@pytest.mark.model
@pytest.mark.parametrize("page", ["README.md", "docs/quick-start.md"])
def test_the_project_pages_examples_run(
    demo_model: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (ROOT / page).read_text()
    (code,) = re.findall(r"```python\n(from pagetide_runtime.*?)```", text, re.DOTALL)
    monkeypatch.chdir(demo_model.parent)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, page, "exec"), {})
    assert printed.getvalue().startswith(" Paris")
