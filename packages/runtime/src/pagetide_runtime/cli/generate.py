"""`pagetide generate`: answers prompts, all in one continuous batch."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from pagetide_runtime.cli.options import (
    check_prompt_lengths,
    check_prompts,
    engine_options,
    one_line_errors,
    open_source,
    sampling_options,
    sampling_params,
)
from pagetide_runtime.config import EngineConfig

__all__ = ["generate"]


@click.command()
@click.argument("model")
@click.argument("prompts", nargs=-1, required=True)
@click.option("--chat", is_flag=True, help="Put each prompt through the model's chat template.")
@click.option("--stats", is_flag=True, help="End with a table of tokens, speed and blocks.")
@sampling_options
@engine_options
@one_line_errors
def generate(
    model: str,
    prompts: tuple[str, ...],
    chat: bool,
    stats: bool,
    max_tokens: int,
    temperature: float,
    top_k: int,
    top_p: float,
    seed: int | None,
    stop: tuple[str, ...],
    revision: str | None,
    **options: Any,
) -> None:
    """Answer PROMPTS with MODEL, all of them in one continuous batch.

    MODEL is a GGUF file, a folder with config.json, safetensors and tokenizer.json, or a Hugging
    Face hub id.
    """
    started = time.perf_counter()
    params = sampling_params(max_tokens, temperature, top_k, top_p, seed, stop)
    EngineConfig(**options)  # refuses what is out of range before anything is read
    check_prompts(prompts)
    source, tokenizer = open_source(model, revision)
    if chat:
        token_ids = [tokenizer.encode_chat([{"role": "user", "content": p}]) for p in prompts]
    else:
        token_ids = [tokenizer.encode(prompt) for prompt in prompts]
    check_prompt_lengths(prompts, [len(ids) for ids in token_ids], source, options["max_model_len"])

    from rich.console import Console

    from pagetide_runtime.cli.console import show_answers, statistics_table
    from pagetide_runtime.cli.statistics import Statistics
    from pagetide_runtime.llm import LLM

    imported = time.perf_counter()
    llm = LLM(source, **options)
    loaded = time.perf_counter()
    statistics = Statistics(llm)
    console = Console(highlight=False)
    completions = show_answers(console, prompts, statistics.watch(llm.stream(token_ids, params)))
    if stats:
        console.print(
            statistics_table(
                statistics.rows(
                    completions, import_seconds=imported - started, load_seconds=loaded - imported
                )
            )
        )
    failed = [completion for completion in completions if completion.error]
    for completion in failed:
        click.echo(f"Error: prompt {completion.index + 1}: {completion.error}", err=True)
    sys.exit(1 if failed else 0)
