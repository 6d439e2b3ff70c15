"""`pagetide backends`: what attention can run on, on this machine."""

from __future__ import annotations

import click

__all__ = ["backends"]


@click.command()
def backends() -> None:
    """List the attention back ends and why one does not work here."""
    from pagetide_kernels.__main__ import main

    main()
