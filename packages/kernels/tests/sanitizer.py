"""Runs the compiled kernels under NVIDIA's compute-sanitizer, on a part of their tests.

    python packages/kernels/tests/sanitizer.py [--tools memcheck,racecheck,initcheck] [--json FILE]

Needs a GPU and the library; racecheck also needs nvcc. Every pair of dtypes takes a few random
steps, eagerly and by graph; then come long and mixed batches, writers and swaps, each tensor an
allocation of its own, so that no read beyond one lands in another. Exits with 0 if the kernels are
clean, 1 if not, and 2, saying why, where the tool does not run. Errors of other libraries' kernels
are counted apart.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

from mutants_cuda import PACKAGE, TESTS, architecture_here

TOOLS = ("memcheck", "racecheck", "initcheck")
OURS = "pagetide"
_LIMIT = 240.0  # seconds of a process
# Initcheck must see everybody's writes, and racecheck is slow: it watches our kernels alone.
_OPTIONS = {
    "memcheck": ("--leak-check", "no"),
    "racecheck": ("--kernel-name", f"kns={OURS}", "--racecheck-report", "all"),
    "initcheck": (),
}
_FOUND = re.compile(
    r"^========= (?:Error: |Warning: )?"
    r"(Invalid|Misaligned|Address|Uninitialized|Race reported|.*hazard detected|.*not mapped).*",
    re.MULTILINE,
)


@dataclass(frozen=True)
class Part:
    """Tests that run in one process."""

    name: str
    arguments: tuple[str, ...]
    environment: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Finding:
    """What one tool said of one part.

    Attributes:
        tool: of ``TOOLS``.
        part: its name.
        passed: tests that ran to their end and passed.
        ours: errors in our kernels.
        others: errors in other libraries' kernels.
        said: the first errors in ours, or why the run proves nothing.
        seconds: how long it took.
    """

    tool: str
    part: str
    passed: int
    ours: int
    others: int
    said: str
    seconds: float


def parts(shards: int) -> list[Part]:
    """The reduced set. Products of cuBLAS end racecheck: dense attention runs on the CPU."""
    steps = ("test_contract_gpu.py", "-k", "test_many_steps")
    alone = (
        "test_paged_attention_cuda.py", "test_copy_blocks.py", "test_quantized_cache.py",
        "test_contract.py", "test_contract_scores.py", "-k",
        "test_compiled_kernel or test_copies or test_blocks_of_one or test_nan_stays or"
        " test_scales_are or test_what_lies or test_any_order or test_queries_that",
    )  # fmt: skip
    found = []
    for name, arguments, settings in (
        ("steps", steps, {"PAGETIDE_GPU_STEPS": "2", "PAGETIDE_DENSE_DEVICE": "cpu"}),
        ("alone", alone, {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PAGETIDE_DENSE_DEVICE": "cpu"}),
    ):
        for i in range(shards):
            environment = {**settings, "PAGETIDE_SHARD": f"{i}/{shards}"}
            found.append(Part(f"{name} {i + 1}/{shards}", arguments, tuple(environment.items())))
    return found


def build_for_racecheck(folder: Path) -> Path:
    """A copy of the package whose warps arrive at barriers lane by lane, see `barriers.cuh`.

    Args:
        folder: where to.

    Returns:
        What to import it from.

    Raises:
        CalledProcessError: it cannot be compiled.
    """
    for name in ("build_cuda.py", "csrc", "src"):
        copy = shutil.copytree if (PACKAGE / name).is_dir() else shutil.copy
        copy(PACKAGE / name, folder / name)
    source = folder / "csrc" / "barriers.cuh"
    text = source.read_text(encoding="utf-8")
    changed = text.replace(
        "constexpr int WARP_ARRIVALS = 1;", "constexpr int WARP_ARRIVALS = WARP;"
    )
    if changed == text:
        raise RuntimeError("barriers.cuh: WARP_ARRIVALS is not where this tool changes it")
    source.write_text(changed, encoding="utf-8")
    library = folder / "src" / "pagetide_kernels" / "_lib"
    shutil.rmtree(library, ignore_errors=True)
    subprocess.run(
        [sys.executable, str(folder / "build_cuda.py"), "--output", str(library), "--archs",
         architecture_here()],
        check=True,
    )  # fmt: skip
    return folder / "src"


def examine(program: str, tool: str, part: Part, package: Path | None) -> Finding:
    """Runs one part under one tool, on the package in a folder or on the one that is installed."""
    command = [
        program, "--tool", tool, "--print-limit", "500", *_OPTIONS[tool], sys.executable, "-m",
        "pytest", "-q", "-p", "no:cacheprovider", *part.arguments,
    ]  # fmt: skip
    environment = {**os.environ, "PAGETIDE_BACKENDS": "cuda", **dict(part.environment)}
    if package is not None:
        paths = [str(package), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    began = time.monotonic()
    try:
        done = subprocess.run(
            command, cwd=TESTS, env=environment, capture_output=True, text=True, check=False,
            timeout=_LIMIT,
        )  # fmt: skip
        log, ended = done.stdout + done.stderr, ""
    except subprocess.TimeoutExpired as error:
        log = (error.stdout or b"").decode(errors="replace")
        ended = f"not done after {_LIMIT:.0f} s"
    passed = re.search(r"(\d+) passed", log)
    # An error is a line that says what, and lines behind it that say where.
    errors = ["\n".join(log[found.start() :].splitlines()[:6]) for found in _FOUND.finditer(log)]
    ours = [each for each in errors if OURS in each]
    if not ended and "Internal Sanitizer Error" in log:
        ended = "the tool itself failed: Internal Sanitizer Error"
    # The tool counts by itself: none that is unknown here goes unseen.
    summary = re.search(r"SUMMARY: (\d+) ", log)
    if not ended and (summary is None or (int(summary[1]) > 0 and not errors)):
        ended = f"the tool's own count: {summary[0] if summary else 'none'}\n{log[-2000:]}"
    if not ended and (passed is None or re.search(r"^\d+ failed|\d+ errors? in ", log, re.M)):
        ended = "tests failed:\n" + log[-2000:]
    return Finding(
        tool, part.name, int(passed[1]) if passed else 0, len(ours), len(errors) - len(ours),
        "\n".join(ours[:3]) or ended, round(time.monotonic() - began, 1),
    )  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tools", default=",".join(TOOLS), help="by name")
    parser.add_argument("--jobs", type=int, default=8, help="processes at a time")
    parser.add_argument("--shards", type=int, default=4, help="processes for a set of tests")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found")
    options = parser.parse_args()
    tools = options.tools.split(",")
    if unknown := set(tools) - set(TOOLS):
        parser.error(f"--tools names {sorted(unknown)}: choose from {', '.join(TOOLS)}")
    program = shutil.which("compute-sanitizer")
    if program is None:
        print("compute-sanitizer is not on PATH: it comes with the CUDA toolkit")
        return 2
    found = []
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(options.jobs) as pool:
        packages = {"racecheck": build_for_racecheck(Path(scratch))} if "racecheck" in tools else {}
        jobs = [(tool, part) for tool in tools for part in parts(options.shards)]
        for each in pool.map(lambda job: examine(program, *job, packages.get(job[0])), jobs):
            found.append(each)
            print(
                f"{each.tool:10} {each.part:12} {each.passed:4} passed, {each.ours} errors in "
                f"ours, {each.others} in others' ({each.seconds} s) {each.said}",
                flush=True,
            )
    if options.json:
        text = json.dumps([asdict(each) for each in found], indent=1)
        options.json.write_text(text + "\n", encoding="utf-8")
    if any(each.ours for each in found):
        return 1
    return 2 if any(each.said for each in found) else 0


if __name__ == "__main__":
    sys.exit(main())
