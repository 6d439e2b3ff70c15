"""The `pagetide` command.

Nothing here imports torch before the model's header, the prompt and the options have been checked:
a wrong file is refused at once.
"""

from __future__ import annotations

from pagetide_runtime.cli.main import main

__all__ = ["main"]
