"""`python -m pagetide_scheduler simulate TRACE` and `... replay RECORDING`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from pagetide_scheduler.config import SchedulerConfig
from pagetide_scheduler.journal import ReplayMismatchError, replay
from pagetide_scheduler.report import picture, table
from pagetide_scheduler.simulation import StepTime, simulate
from pagetide_scheduler.trace import read_trace, shipped_traces


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit status."""
    options = _parser().parse_args(arguments)
    try:
        text = _replay(options) if options.command == "replay" else _simulate(options)
    except (ValueError, OSError, ReplayMismatchError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(text)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="pagetide_scheduler", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("simulate", help="the scheduler on a trace, with made-up step times")
    names = ", ".join(shipped_traces())
    run.add_argument("trace", help=f"a file of JSON lines, or one of those shipped: {names}")
    run.add_argument(
        "--policy", default="fcfs,lookahead,reserve", help="policies to compare, with commas"
    )
    run.add_argument("--blocks", type=int, default=256, help="blocks of the pool")
    run.add_argument("--block-size", type=int, default=16)
    run.add_argument("--host-blocks", type=int, default=0, help="blocks of the pool to swap to")
    run.add_argument("--preemption", choices=("auto", "recompute", "swap"), default="auto")
    run.add_argument("--max-num-seqs", type=int, default=64)
    run.add_argument("--budget", type=int, default=512, help="tokens a step")
    run.add_argument("--chunk", type=int, default=None, help="tokens of one prompt a step")
    run.add_argument("--overlap", type=int, default=1, help="plans in flight while one is made")
    run.add_argument("--lookahead", type=int, default=8, help="requests that may be looked past")
    run.add_argument("--max-skips", type=int, default=8, help="times one may be passed")
    run.add_argument("--max-model-len", type=int, default=1 << 20)
    for name, value in (("fixed", 5e-3), ("token", 2e-5), ("key", 2e-8), ("copy", 2e-4)):
        run.add_argument(f"--{name}-seconds", type=float, default=value, help="of a step's time")
    run.add_argument("--plot", type=Path, default=None, help="an SVG file to write")
    again = commands.add_parser("replay", help="a recording, compared plan by plan")
    again.add_argument("recording", type=Path)
    return parser


def _simulate(options: argparse.Namespace) -> str:
    trace = read_trace(options.trace)
    clock = StepTime(
        options.fixed_seconds, options.token_seconds, options.key_seconds, options.copy_seconds
    )
    runs = []
    for policy in options.policy.split(","):
        config = SchedulerConfig(
            admission=policy.strip(),
            max_model_len=options.max_model_len,
            max_num_seqs=options.max_num_seqs,
            max_num_batched_tokens=options.budget,
            max_chunk_tokens=options.chunk,
            preemption=options.preemption,
            max_overlap=options.overlap,
            lookahead=options.lookahead,
            max_skips=options.max_skips,
        )
        runs.append(
            simulate(
                trace,
                config,
                total_blocks=options.blocks,
                block_size=options.block_size,
                host_blocks=options.host_blocks,
                step_time=clock,
                overlap=options.overlap,
            )
        )
    if options.plot is not None:
        title = f"{Path(options.trace).stem}: {len(trace)} requests, {options.blocks} blocks"
        options.plot.write_text(picture(runs, title), encoding="utf-8")
    return table(runs)


def _replay(options: argparse.Namespace) -> str:
    with options.recording.open(encoding="utf-8") as lines:
        scheduler = replay(lines)
    last = scheduler.records[-1].step_id if scheduler.records else 0
    return f"every plan is the same; the last step is {last}"


if __name__ == "__main__":
    sys.exit(main())
