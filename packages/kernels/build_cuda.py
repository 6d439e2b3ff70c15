"""Compiles ``csrc`` into one shared library: used by the wheel's build hook, the tests and by hand.

    python build_cuda.py --output src/pagetide_kernels/_lib --archs 90a

Standard library only. Objects are kept under the checkout's ignored ``build`` folder by the digest
of everything that made them, so that building again costs a second.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).resolve().parent
CSRC = PACKAGE / "csrc"
LIBRARY_NAME = "libpagetide_kernels.so"
# An architecture's machine code runs on the later ones of its generation: 80's on 8.6, 8.7 and 8.9,
# 100's on 10.3, 120's on 12.1. The last one's PTX serves what comes later. The a of 90a allows
# instructions that only Hopper has; there is no later device of its generation.
ARCHITECTURES = ("75", "80", "90a", "100", "120", "120-ptx")
FFI_REQUIREMENT = "apache-tvm-ffi>=0.1.11,<0.2"
COMPILER_WHEELS = (
    "nvidia-cuda-nvcc==13.0.88",
    "nvidia-nvvm==13.0.88",
    "nvidia-cuda-crt==13.0.88",
    "nvidia-cuda-runtime==13.0.96",
    "nvidia-cuda-cccl==13.0.85",
)
_FLAGS = (
    "-std=c++17", "-O3", "-cudart", "static", "-Xfatbin", "-compress-all", "--compress-mode=size",
    "-Xcompiler", "-fPIC,-fvisibility=hidden",
)  # fmt: skip


class BuildError(Exception):
    """The library cannot be built here; the message says why and what to do."""


@dataclass(frozen=True)
class Toolchain:
    """What compiles: nvcc, the host compiler it drives, and tvm-ffi's headers."""

    nvcc: Path
    host_compiler: Path
    ffi_include: Path
    library_dirs: tuple[Path, ...]

    @property
    def environment(self) -> dict[str, str]:
        """nvcc from wheels finds its own parts by its path; it only needs to be executable."""
        return {**os.environ, "PATH": f"{self.nvcc.parent}{os.pathsep}{os.environ.get('PATH', '')}"}


def find_nvcc() -> Path | None:
    """nvcc of CUDA_HOME, of PATH, or of the PyPI compiler wheels."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [Path(home) / "bin" / "nvcc"] if home else []
    if on_path := shutil.which("nvcc"):
        candidates.append(Path(on_path))
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations or () if spec else ():
        candidates.append(Path(folder) / "cu13" / "bin" / "nvcc")
    return next((each for each in candidates if each.exists()), None)


def missing_reason(*, need_nvcc: bool = True) -> str | None:
    """Why this machine cannot build the library; None if it can."""
    if sys.platform != "linux":
        return f"the compiled CUDA back end is built on Linux only, not on {sys.platform}"
    if shutil.which(os.environ.get("CXX", "g++")) is None:
        return "there is no C++ compiler: install g++, or name one in CXX"
    if need_nvcc and find_nvcc() is None:
        return "there is no nvcc: install the CUDA toolkit 13 and put nvcc on PATH or set CUDA_HOME"
    return None


def find_toolchain() -> Toolchain:
    """The toolchain of this machine.

    Raises:
        BuildError: a part of it is missing.
    """
    if reason := missing_reason():
        raise BuildError(reason)
    spec = importlib.util.find_spec("tvm_ffi")
    if spec is None or spec.origin is None:
        raise BuildError("apache-tvm-ffi is not installed: its headers are needed to build")
    nvcc = find_nvcc()
    compiler = shutil.which(os.environ.get("CXX", "g++"))
    if nvcc is None or compiler is None:
        raise BuildError("the compilers vanished while looking for them")
    if not os.access(nvcc, os.X_OK):  # some installers drop the bit from wheels' programs
        for program in nvcc.parent.iterdir():
            program.chmod(program.stat().st_mode | 0o111)
    root = nvcc.parent.parent
    lib_dirs = tuple(each for each in (root / "lib", root / "lib64") if each.is_dir())
    return Toolchain(nvcc, Path(compiler), Path(spec.origin).parent / "include", lib_dirs)


def sources() -> list[Path]:
    """Every translation unit, the slowest first."""
    found = [*CSRC.glob("*.cu"), *CSRC.glob("*.cc"), *CSRC.glob("instances/*.cu")]
    return sorted(
        found, key=lambda path: ("_256" not in path.name, "decode" not in path.name, path.name)
    )


def wanted_architectures() -> Sequence[str]:
    """Those of ``PAGETIDE_CUDA_ARCHS``, else all."""
    chosen = os.environ.get("PAGETIDE_CUDA_ARCHS", "").replace(",", " ").split()
    for each in chosen:
        if not re.fullmatch(r"\d{2,3}a?(-ptx)?", each):
            raise BuildError(
                f"PAGETIDE_CUDA_ARCHS names {each!r}: "
                "write architectures like '75 90a' or '120-ptx'"
            )
    return chosen or ARCHITECTURES


def architecture_flags(architectures: Sequence[str]) -> list[str]:
    """nvcc's flags: ``80`` is machine code, ``75-ptx`` code that the driver compiles."""
    flags = []
    for each in architectures:
        number, _, kind = each.partition("-")
        code = f"compute_{number}" if kind == "ptx" else f"sm_{number}"
        flags.append(f"-gencode=arch=compute_{number},code={code}")
    return flags


def compile_command(
    toolchain: Toolchain, source: Path, target: Path, architectures: Sequence[str]
) -> list[str]:
    """One translation unit's command."""
    command = [
        str(toolchain.nvcc),
        "-ccbin",
        str(toolchain.host_compiler),
        *_FLAGS,
        "-I",
        str(CSRC),
    ]
    if source.suffix == ".cu":
        command += architecture_flags(architectures)
    else:
        command += ["-I", str(toolchain.ffi_include)]
    return [*command, "-c", str(source), "-o", str(target)]


def _run(command: Sequence[str], toolchain: Toolchain) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=toolchain.environment
    )
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def _object_cache() -> Path:
    root = PACKAGE.parent.parent
    return (root if (root / "noxfile.py").exists() else PACKAGE) / "build" / "cuda-objects"


def _inputs(source: Path) -> set[Path]:
    """A source and the headers of ours that it includes, at whatever depth."""
    found, waiting = set[Path](), [source]
    while waiting:
        path = waiting.pop()
        if path not in found:
            found.add(path)
            names = re.findall(r'^#include "([^"]+)"', path.read_text(), re.MULTILINE)
            waiting += [(path.parent / name).resolve() for name in names]
    return found


def _digest(toolchain: Toolchain, source: Path, architectures: Sequence[str], version: str) -> str:
    """Of all that makes an object: the source and its headers, the compiler, the command."""
    digest = hashlib.sha256(version.encode())
    if source.suffix == ".cc":
        digest.update(toolchain.ffi_include.parent.joinpath("_version.py").read_bytes())
    for each in sorted(_inputs(source)):
        digest.update(each.name.encode() + each.read_bytes())
    digest.update(repr((_FLAGS, architecture_flags(architectures))).encode())
    return digest.hexdigest()[:24]


def build(
    output: Path, architectures: Sequence[str] = ARCHITECTURES, *, jobs: int | None = None
) -> Path:
    """Compile what has changed, and link.

    Args:
        output: the folder that the library goes to.
        architectures: see ``architecture_flags``.
        jobs: compilations at a time; by default the processors this process may use.

    Returns:
        The library.

    Raises:
        BuildError: a compiler is missing or failed; the message holds what it said.
    """
    toolchain = find_toolchain()
    version = _run([str(toolchain.nvcc), "--version"], toolchain)
    cache = _object_cache()
    cache.mkdir(parents=True, exist_ok=True)

    def compile_one(source: Path) -> Path:
        target = cache / f"{source.stem}-{_digest(toolchain, source, architectures, version)}.o"
        if not target.exists():
            for stale in cache.glob(f"{source.stem}-*.o"):
                if len(stale.stem) == len(target.stem):
                    stale.unlink(missing_ok=True)
            unfinished = target.with_suffix(f".{os.getpid()}.part.o")
            _run(compile_command(toolchain, source, unfinished, architectures), toolchain)
            unfinished.replace(target)
        return target

    with ThreadPoolExecutor(jobs or len(os.sched_getaffinity(0))) as pool:
        objects = list(pool.map(compile_one, sources()))
    output.mkdir(parents=True, exist_ok=True)
    library = output / LIBRARY_NAME
    link = [
        str(toolchain.nvcc),
        "-ccbin",
        str(toolchain.host_compiler),
        "-shared",
        "-cudart",
        "static",
    ]
    link += [f"-L{folder}" for folder in toolchain.library_dirs]
    _run([*link, "-o", str(library), *map(str, objects)], toolchain)
    return library


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--output", type=Path, default=PACKAGE / "src" / "pagetide_kernels" / "_lib"
    )
    parser.add_argument("--archs", help="like '75 90a'; by default PAGETIDE_CUDA_ARCHS, else all")
    parser.add_argument("--jobs", type=int, default=None)
    arguments = parser.parse_args()
    if arguments.archs is not None:
        os.environ["PAGETIDE_CUDA_ARCHS"] = arguments.archs
    try:
        chosen = wanted_architectures()
        sys.stdout.write(f"{build(arguments.output, chosen, jobs=arguments.jobs)}\n")
    except BuildError as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
