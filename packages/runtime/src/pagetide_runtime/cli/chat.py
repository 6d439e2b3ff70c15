"""`pagetide chat`: a conversation in the terminal."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import TYPE_CHECKING, Any

import click

from pagetide_runtime.cli.options import (
    BadInput,
    engine_options,
    one_line_errors,
    open_source,
    sampling_options,
    sampling_params,
)
from pagetide_runtime.config import EngineConfig

if TYPE_CHECKING:
    from pagetide_runtime.llm import LLM
    from pagetide_scheduler import SamplingParams

__all__ = ["chat"]


class _Interrupt:
    """Whether Ctrl-C was pressed; asked between tokens, so that no step is ever cut in two."""

    def __init__(self) -> None:
        self.is_set = False

    @contextlib.contextmanager
    def catching(self) -> Iterator[None]:
        """Notes the first Ctrl-C inside the block; a second one does not wait for the token."""

        def note(_signal: int, _frame: FrameType | None) -> None:
            if self.is_set:
                raise KeyboardInterrupt
            self.is_set = True

        self.is_set = False
        previous = signal.signal(signal.SIGINT, note)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, previous)


@click.command()
@click.argument("model")
@click.option("--system", default=None, help="The system message.")
@sampling_options
@engine_options
@one_line_errors
def chat(
    model: str,
    system: str | None,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    revision: str | None,
    **options: Any,
) -> None:
    """Talk with MODEL, turn by turn, through its own chat template.

    Ctrl-C ends an answer, Ctrl-D or /exit the conversation, /clear forgets it.
    """
    params = sampling_params(max_tokens, temperature, top_k, top_p, seed, stop)
    EngineConfig(**options)  # refuses what is out of range before anything is read
    source, tokenizer = open_source(model, revision)
    if not tokenizer.has_chat_template:
        raise BadInput(f"{model} has no chat template: use `pagetide generate`")

    from pagetide_runtime.llm import LLM

    llm = LLM(source, **options)
    opening = [{"role": "system", "content": system}] if system else []
    messages = list(opening)
    if sys.stdin.isatty():
        click.secho(
            "Ctrl-C ends an answer, Ctrl-D or /exit the conversation, /clear forgets it.", dim=True
        )
    while (line := _read_line()) is not None:
        if line == "/clear":
            messages = list(opening)
        elif line:
            messages.append({"role": "user", "content": line})
            answer = _answer(llm, messages, params)
            if answer is None:
                messages.pop()
            else:
                messages.append({"role": "assistant", "content": answer})


def _read_line() -> str | None:
    """The user's next line, stripped; None at the end of the conversation."""
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            click.echo()
            continue
        return None if line == "/exit" else line


def _answer(llm: LLM, messages: list[dict[str, str]], params: SamplingParams) -> str | None:
    """Streams one answer and returns what was said; None if the turn was refused."""
    interrupt = _Interrupt()
    pieces: list[str] = []
    try:
        stream = llm.stream([llm.chat_prompt(messages)], params)
    except ValueError as error:  # the conversation outgrew the context: say so and go on
        click.echo(f"Error: {' '.join(str(error).split())} (/clear begins anew)", err=True)
        return None
    with contextlib.suppress(KeyboardInterrupt), interrupt.catching(), contextlib.closing(stream):
        for chunk in stream:
            click.echo(chunk.text, nl=False)
            pieces.append(chunk.text)
            if chunk.completion is not None and chunk.completion.error:
                click.echo(f"\nError: {chunk.completion.error}", err=True)
                return None
            if interrupt.is_set:
                break
    if interrupt.is_set:
        click.secho(" [interrupted]", dim=True, nl=False)
    click.echo()
    return "".join(pieces)
