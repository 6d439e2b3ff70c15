"""The command's entry: its own subcommands and those of the packages below, loaded when used."""

from __future__ import annotations

import importlib

import click

from pagetide_runtime.__about__ import __version__

__all__ = ["main"]

# name: (module, attribute, what `pagetide --help` says)
_COMMANDS = {
    "generate": ("pagetide_runtime.cli.generate", "generate", "Answer prompts in one batch."),
    "chat": ("pagetide_runtime.cli.chat", "chat", "Talk with a model, turn by turn."),
    "simulate": ("pagetide_runtime.cli.tools", "simulate", "The scheduler on a trace of arrivals."),
    "parity": ("pagetide_runtime.cli.tools", "parity", "A model beside Hugging Face, by layer."),
    "backends": ("pagetide_runtime.cli.backends", "backends", "What attention can run on here."),
}


class _LazyGroup(click.Group):
    """Imports a subcommand's module only when that subcommand is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return None
        module, attribute, _ = _COMMANDS[cmd_name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="pagetide")
def main() -> None:
    """Pagetide: language models over a paged KV cache."""
