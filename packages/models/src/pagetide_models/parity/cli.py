"""``python -m pagetide_models parity``: the command line; torch is imported only to compare."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

__all__ = ["EPILOG", "add_arguments", "run"]

EPILOG = """\
exit status: 0 equal, or as close as rounding allows; 1 different; 2 no comparison could be made

Each error is of a row: |ours - theirs| / |theirs| of one token, or of one head of it. Ours is run
with the whole prompt in one step, and again in chunks and single tokens through the cache.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command, for any parser that mounts it."""
    parser.add_argument("model", help="a GGUF file, a folder with config.json, or a hub id")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    text = parser.add_mutually_exclusive_group()
    text.add_argument("--prompt", help="the text to compare on (a sentence of our own)")
    text.add_argument("--num-tokens", type=int, metavar="N", help="use N random tokens instead")
    parser.add_argument("--dtype", default="auto", help="float32, float16, bfloat16 or auto")
    parser.add_argument("--kv-dtype", default="auto", help="of the KV cache; auto: as --dtype")
    parser.add_argument("--backend", default="auto", help="attention back end")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--tolerance", type=float, help="largest relative error that is equal")
    parser.add_argument("--json", action="store_true", help="print every error as JSON")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="draw the errors by layer")
    files = parser.add_mutually_exclusive_group()
    files.add_argument(
        "--save-reference", type=Path, metavar="FILE.safetensors",
        help="keep what transformers computed",
    )  # fmt: skip
    files.add_argument(
        "--reference", type=Path, metavar="FILE",
        help="compare with what --save-reference kept: needs no transformers",
    )  # fmt: skip


def run(parsed: argparse.Namespace) -> int:
    """Compare as the parsed options of `add_arguments` say."""
    from pagetide_models.errors import ModelError
    from pagetide_models.parity.plot import as_svg
    from pagetide_models.parity.run import ParityOptions, run_parity

    try:
        options = ParityOptions(
            prompt=parsed.prompt, num_tokens=parsed.num_tokens, dtype=parsed.dtype,
            kv_dtype=parsed.kv_dtype, backend=parsed.backend, device=parsed.device,
            block_size=parsed.block_size, tolerance=parsed.tolerance,
            save_reference=parsed.save_reference, reference=parsed.reference,
        )  # fmt: skip
        report = run_parity(parsed.model, options, revision=parsed.revision)
        if parsed.plot is not None:
            parsed.plot.write_text(as_svg(report), encoding="utf-8")
    except (ModelError, ValueError, OSError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    text = json.dumps(report.as_json(), indent=1) if parsed.json else report.as_text()
    sys.stdout.write(text + "\n")
    return 1 if report.verdict == "different" else 0
