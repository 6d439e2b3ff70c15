"""Compiles the ladder into a library of its own, which no wheel holds.

    python build.py --output build/ladder            # one library for sm_75 and sm_90
    python build.py --output build/ladder --archs 75-ptx   # the sm_75 path, for any later card

Prints the library's path.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

LADDER = Path(__file__).resolve().parent
sys.path.insert(0, str(LADDER.parents[1]))
import build_cuda  # noqa: E402


def build(output: Path, architectures: list[str]) -> Path:
    """Compile every rung and link them; see ``build_cuda.architecture_flags``."""
    nvcc = build_cuda.find_nvcc()
    if nvcc is None:
        raise SystemExit(f"error: {build_cuda.missing_reason()}")
    output.mkdir(parents=True, exist_ok=True)
    library = output / f"libladder-{'-'.join(architectures)}.so"
    libraries = [f"-L{nvcc.parent.parent / name}" for name in ("lib", "lib64")]
    command = [
        str(nvcc), "-std=c++17", "-O3", "-shared", "-cudart", "static", *libraries,
        "-Xcompiler", "-fPIC,-fvisibility=hidden", "-I", str(LADDER.parents[1] / "csrc"),
        *build_cuda.architecture_flags(architectures), "-o", str(library),
        *map(str, sorted(LADDER.glob("rung_*.cu"))),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"error: {' '.join(command)}\n{done.stdout}{done.stderr}")
    return library


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--archs", nargs="+", default=["75", "90"])
    arguments = parser.parse_args()
    print(build(arguments.output, arguments.archs))


if __name__ == "__main__":
    main()
