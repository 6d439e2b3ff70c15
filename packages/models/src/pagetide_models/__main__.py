"""``python -m pagetide_models``: the tools of this package."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from pagetide_models.parity import cli


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the tool that the first argument names; returns the exit status."""
    parser = argparse.ArgumentParser(prog="python -m pagetide_models", description=__doc__)
    tools = parser.add_subparsers(dest="tool", required=True)
    parity = tools.add_parser(
        "parity",
        help="compare a model with transformers, layer by layer",
        description="Compare a model with transformers, layer by layer.",
        epilog=cli.EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    cli.add_arguments(parity)
    return cli.run(parser.parse_args(arguments))


if __name__ == "__main__":
    sys.exit(main())
