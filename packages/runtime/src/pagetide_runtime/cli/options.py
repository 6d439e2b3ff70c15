"""Options, checks and error reporting that the subcommands share."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from pagetide_models import ModelSource, Tokenizer
    from pagetide_scheduler import SamplingParams

__all__ = [
    "BadInput",
    "check_prompt_lengths",
    "check_prompts",
    "engine_options",
    "one_line_errors",
    "open_source",
    "sampling_options",
    "sampling_params",
]

Function = TypeVar("Function", bound=Callable[..., Any])


class BadInput(click.ClickException):
    """One line on standard error and exit status 2."""

    exit_code = 2


def one_line_errors(function: Function) -> Function:
    """Reports the errors that a user's input can cause as one line; others keep their traceback."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        from pagetide_models import ModelError

        try:
            return function(*args, **kwargs)
        except (ModelError, ValueError) as error:
            raise BadInput(" ".join(str(error).split())) from error

    return wrapped  # type: ignore[return-value]


def _stack(*decorators: Callable[[Function], Function]) -> Callable[[Function], Function]:
    def apply(function: Function) -> Function:
        for decorator in reversed(decorators):
            function = decorator(function)
        return function

    return apply


sampling_options = _stack(
    click.option("--max-tokens", type=int, default=128, show_default=True, help="At most so many."),
    click.option("--temperature", type=float, default=0.0, show_default=True, help="0 is greedy."),
    click.option("--top-k", type=int, default=0, help="Draw from the k likeliest (0: all)."),
    click.option("--top-p", type=float, default=1.0, help="Draw from the likeliest p of the mass."),
    click.option("--seed", type=int, default=None, help="Fixes the random numbers."),
    click.option("--stop", multiple=True, help="End the answer before this text (repeatable)."),
)

engine_options = _stack(
    click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda."),
    click.option("--dtype", default="auto", show_default=True, help="Of weights and activations."),
    click.option("--kv-dtype", default="auto", show_default=True, help="Of keys and values."),
    click.option("--attention-backend", default="auto", show_default=True, help="See `backends`."),
    click.option("--block-size", type=int, default=16, show_default=True, help="Tokens a block."),
    click.option("--num-blocks", type=int, default=None, help="Of the pool.  [default: fit]"),
    click.option("--max-num-seqs", type=int, default=64, show_default=True, help="Run at once."),
    click.option("--token-budget", "max_num_batched_tokens", type=int, default=512,
                 show_default=True, help="Tokens a step computes at most."),
    click.option("--max-model-len", type=int, default=None, help="[default: the model's]"),
    click.option("--prefix-cache/--no-prefix-cache", "enable_prefix_cache", default=True,
                 help="Reuse the blocks of equal beginnings.  [default: on]"),
    click.option("--revision", default=None, help="Of a hub id: branch, tag or commit."),
)  # fmt: skip


def sampling_params(
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: Sequence[str],
) -> SamplingParams:
    """The options as `SamplingParams`, which validates them."""
    from pagetide_scheduler import SamplingParams

    return SamplingParams(
        max_tokens=max_tokens,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=seed,
        stop=tuple(stop),
    )


def open_source(model: str, revision: str | None) -> tuple[ModelSource, Tokenizer]:
    """Finds a model and reads its header and tokenizer, without torch."""
    from pagetide_models import open_model

    source = open_model(model, revision=revision)
    return source, source.load_tokenizer()


def _place(number: int, prompts: Sequence[str]) -> str:
    return f"prompt {number} of {len(prompts)}" if len(prompts) > 1 else "the prompt"


def check_prompts(prompts: Sequence[str]) -> None:
    """Refuses what is no text, before any file is opened."""
    for number, prompt in enumerate(prompts, 1):
        if not prompt.strip():
            raise BadInput(f"{_place(number, prompts)} is empty: give it some text")
        if any("\ud800" <= character <= "\udfff" for character in prompt):
            raise BadInput(f"{_place(number, prompts)} has bytes that are not UTF-8 text")


def check_prompt_lengths(
    prompts: Sequence[str], lengths: Sequence[int], source: ModelSource, max_model_len: int | None
) -> None:
    """Refuses a prompt that is empty or leaves no room for an answer, before weights are read."""
    limit = min(
        source.config.max_position_embeddings,
        max_model_len or source.config.max_position_embeddings,
    )
    for number, length in enumerate(lengths, 1):
        if length == 0:
            raise BadInput(f"{_place(number, prompts)} has no tokens: give it some text")
        if length + 1 > limit:
            raise BadInput(
                f"{_place(number, prompts)} has {length} tokens and the context holds {limit}, "
                "answer included: shorten it"
            )
