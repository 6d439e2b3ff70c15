"""The tools of the packages below, mounted as subcommands; each parses its own arguments."""

from __future__ import annotations

import sys

import click

__all__ = ["parity", "simulate"]

_PASS_ON = {"ignore_unknown_options": True, "help_option_names": []}


@click.command(context_settings=_PASS_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def simulate(arguments: tuple[str, ...]) -> None:
    """Run the scheduler over a trace: `python -m pagetide_scheduler simulate`."""
    from pagetide_scheduler.__main__ import main

    sys.exit(main(["simulate", *arguments]))


@click.command(context_settings=_PASS_ON, add_help_option=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def parity(arguments: tuple[str, ...]) -> None:
    """Compare a model with Hugging Face: `python -m pagetide_models parity`."""
    from pagetide_models.__main__ import main

    sys.exit(main(["parity", *arguments]))
