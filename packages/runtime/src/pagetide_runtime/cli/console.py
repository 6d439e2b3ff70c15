"""Several growing answers on one terminal, or one after another in a pipe."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from pagetide_runtime.completion import Completion, TextChunk

__all__ = ["show_answers", "statistics_table"]


def show_answers(
    console: Console, prompts: Sequence[str], chunks: Iterator[TextChunk]
) -> list[Completion]:
    """Shows the answers as they grow and returns them in the prompts' order.

    A terminal sees the ends of all of them grow together, and the whole answers when they are done;
    a pipe gets each whole answer when it ends, under its prompt; a single prompt streams plainly in
    both.
    """
    if len(prompts) == 1:
        return _stream_one(console, chunks)
    if console.is_terminal:
        return _stream_together(console, prompts, chunks)
    return _print_when_done(console, prompts, chunks)


def _stream_one(console: Console, chunks: Iterator[TextChunk]) -> list[Completion]:
    completions = []
    for chunk in chunks:
        console.file.write(chunk.text)
        console.file.flush()
        if chunk.completion is not None:
            completions.append(chunk.completion)
    console.file.write("\n")
    return completions


def _answer(prompt: str, text: str, is_done: bool) -> Text:
    body = Text(f"> {prompt}\n", style="bold cyan")
    body.append(text, style="default" if is_done else "white")
    body.append("\n" if is_done else "▌\n", style="dim")
    return body


def _ends(console: Console, answers: Sequence[Text]) -> Group:
    """As many last lines of each answer as fit beside the others: a terminal cannot take back
    what has scrolled off its top, and would show it again at every refresh.
    """
    room = max(1, (console.height - 1) // len(answers))
    lines = [answer.wrap(console, console.width) for answer in answers]
    return Group(*[line for wrapped in lines for line in wrapped[-room:]])


def _stream_together(
    console: Console, prompts: Sequence[str], chunks: Iterator[TextChunk]
) -> list[Completion]:
    texts = [""] * len(prompts)
    done: dict[int, Completion] = {}

    def answers() -> list[Text]:
        return [_answer(prompt, texts[i], i in done) for i, prompt in enumerate(prompts)]

    def growing() -> Group:  # called when the screen is drawn, not for every chunk
        return _ends(console, answers())

    with Live(get_renderable=growing, console=console, refresh_per_second=12, transient=True):
        for chunk in chunks:
            texts[chunk.index] += chunk.text
            if chunk.completion is not None:
                done[chunk.index] = chunk.completion
    for answer in answers():
        console.print(answer)
    return [done[index] for index in sorted(done)]


def _print_when_done(
    console: Console, prompts: Sequence[str], chunks: Iterator[TextChunk]
) -> list[Completion]:
    done: dict[int, Completion] = {}
    for chunk in chunks:
        if chunk.completion is not None:
            done[chunk.index] = chunk.completion
            print(
                f"> {prompts[chunk.index]}\n{chunk.completion.text.strip()}\n",
                file=console.file,
                flush=True,
            )
    return [done[index] for index in sorted(done)]


def statistics_table(rows: Sequence[tuple[str, str]]) -> Table:
    """Two columns, a fact a row."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="dim")
    table.add_column()
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    return table
