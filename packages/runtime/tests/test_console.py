"""Answers on a terminal: nothing is shown twice, however small the terminal is."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.live import Live

from pagetide_runtime import Completion, FinishReason, RequestOutput, TextChunk
from pagetide_runtime.cli import console as console_module

PROMPTS = ["first question", "second question", "third question"]
WORDS = [f"word{number}" for number in range(60)]


def chunks() -> Iterator[TextChunk]:
    for word in WORDS:
        for index in range(3):
            yield TextChunk(index, 0, f"{word} ")
    for index in range(3):
        output = RequestOutput(str(index), (1,), (2,), FinishReason.LENGTH, 0, 0, 0.0, 0.0, 0.0)
        yield TextChunk(index, 0, "", Completion(index, 0, None, " ".join(WORDS), output))


def what_a_terminal_shows(data: str, height: int) -> list[str]:
    """Every line that scrolled off and every line on the screen, after these control codes."""
    scrolled: list[str] = []
    screen, row, column = [""] * height, 0, 0
    for match in re.finditer(r"\x1b\[([0-9;?]*)([A-Za-z])|\r|\n|[^\x1b\r\n]+", data):
        text = match[0]
        if text == "\n":
            column = 0
            if row == height - 1:
                scrolled.append(screen.pop(0))
                screen.append("")
            else:
                row += 1
        elif text == "\r":
            column = 0
        elif match[2] == "A":
            row = max(0, row - int(match[1] or 1))
        elif match[2] == "K":
            screen[row] = "" if match[1] == "2" else screen[row][:column]
        elif match[2] is None:
            line = screen[row]
            screen[row] = line[:column] + text + line[column + len(text) :]
            column += len(text)
    return scrolled + screen


@pytest.mark.parametrize("height", [6, 12, 24, 60])
def test_a_terminal_ends_with_each_whole_answer_once(
    height: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lives: list[Live] = []

    def make_live(**options: Any) -> Live:
        lives.append(Live(**options))
        return lives[-1]

    monkeypatch.setattr(console_module, "Live", make_live)
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60, height=height, highlight=False)

    def slowly() -> Iterator[TextChunk]:
        for chunk in chunks():
            yield chunk
            lives[0].refresh()  # every chunk is drawn, whatever the clock says

    completions = console_module.show_answers(console, PROMPTS, slowly())
    assert [completion.index for completion in completions] == [0, 1, 2]
    lines = what_a_terminal_shows(file.getvalue(), height)
    shown = " ".join(" ".join(lines).split())
    assert shown == " ".join(f"> {prompt} {' '.join(WORDS)}" for prompt in PROMPTS)
