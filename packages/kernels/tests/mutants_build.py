"""Compiles CUDA mutants: of each only the kernels in question, many at a time.

A source under ``csrc/instances`` takes a minute, each kernel that it instantiates takes seconds.
So the sources are cut into pieces of one kernel; a mutant is the library of all pieces as they are,
but for those of its units, which are compiled from its own copy of ``csrc``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import build_cuda
from mutation import Mutant, Suite

__all__ = ["CSRC", "Builder", "Unit", "apply_to_sources", "pieces"]

CSRC = build_cuda.CSRC


@dataclass(frozen=True)
class Unit:
    """Pieces of a source: those in whose line the words stand; all of it without words."""

    source: str
    words: str = ""


@dataclass(frozen=True)
class Piece:
    """What is compiled at a time: a text in the place of a source, and its line of that source."""

    source: Path
    name: str
    text: str
    line: str = ""

    def is_of(self, unit: Unit) -> bool:
        return self.source.stem == unit.source and unit.words in self.line


def apply_to_sources(mutant: Mutant | None, folder: Path) -> Path:
    """Copies ``csrc`` into ``folder``, with the mutant's place made wrong."""
    csrc = folder / "csrc"
    shutil.copytree(CSRC, csrc)
    if mutant is not None:
        mutant.apply(csrc / mutant.module)
    return csrc


def pieces(csrc: Path) -> list[Piece]:
    """All pieces of the sources, the slowest first."""
    found = []
    for source in [*csrc.glob("*.cu"), *csrc.glob("*.cc"), *csrc.glob("instances/*.cu")]:
        text = source.read_text(encoding="utf-8")
        lines = re.findall(r"^template .*;\n", text, re.MULTILINE)
        if source.parent == csrc or not lines:
            found.append(Piece(source, source.stem, text))
            continue
        for i, line in enumerate(lines):
            others = (each for each in lines if each != line)
            alone = text
            for each in others:
                alone = alone.replace(each, "")
            found.append(Piece(source, f"{source.stem}-{i}", alone, line))
    return sorted(found, key=lambda piece: (" 256" not in piece.line, piece.name))


class Builder:
    """Builds the library as it is and those of mutants, each in a folder of its own."""

    def __init__(self, folder: Path, architecture: str) -> None:
        self.folder, self.architecture = folder, architecture
        self.toolchain = build_cuda.find_toolchain()

    def build(
        self, suite: Suite, mutants: Sequence[Mutant], units: Mapping[Mutant, Sequence[Unit]]
    ) -> int:
        """``whole`` and a folder for each mutant's slug, with a copy of the package in each.

        Args:
            suite: the list.
            mutants: those to build.
            units: what of each mutant is compiled.

        Returns:
            0, or 2 if a mutant cannot be compiled, which is printed.

        Raises:
            BuildError: the sources as they are cannot be compiled.
        """
        started = time.monotonic()
        csrc = apply_to_sources(None, self.folder / "whole")
        parts = pieces(csrc)
        status = 0
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            whole = {part.name: pool.submit(self.compile, csrc, part) for part in parts}
            made = {each: self.submit(pool, each, units[each], whole) for each in mutants}
            links = [
                (None, pool.submit(self.link, suite.copy(csrc.parent), whole)),
                *(
                    (each, pool.submit(self.link, suite.copy(self.folder / each.slug), made[each]))
                    for each in mutants
                ),
            ]
            for mutant, link in links:
                try:
                    link.result()
                except build_cuda.BuildError as error:
                    if mutant is None:
                        raise
                    print(f"does not compile: {mutant.name}\n{error}", flush=True)
                    status = 2
        print(f"{len(mutants)} mutants built ({time.monotonic() - started:.0f} s)", flush=True)
        return status

    def submit(
        self,
        pool: ThreadPoolExecutor,
        mutant: Mutant,
        units: Sequence[Unit],
        whole: Mapping[str, Future[Path]],
    ) -> dict[str, Future[Path]]:
        """The mutant's objects by their names, of which only its units are its own."""
        csrc = apply_to_sources(mutant, self.folder / mutant.slug)
        own = [part for part in pieces(csrc) if any(map(part.is_of, units))]
        for unit in units:
            if not any(part.is_of(unit) for part in own):
                raise build_cuda.BuildError(f"{mutant.name}: there is no {unit}")
        return {**whole, **{part.name: pool.submit(self.compile, csrc, part) for part in own}}

    def compile(self, csrc: Path, piece: Piece) -> Path:
        """The piece's object, under ``objects`` beside ``csrc``."""
        source = piece.source.with_name(f"{piece.name}.piece{piece.source.suffix}")
        source.write_text(piece.text, encoding="utf-8")
        target = csrc.parent / "objects" / f"{piece.name}.o"
        target.parent.mkdir(exist_ok=True)
        command = build_cuda.compile_command(self.toolchain, source, target, [self.architecture])
        self.run([str(csrc) if word == str(CSRC) else word for word in command])
        return target

    def link(self, package: Path, objects: Mapping[str, Future[Path]]) -> None:
        """The library of a copy of the package."""
        library = package / "_lib" / build_cuda.LIBRARY_NAME
        library.parent.mkdir(exist_ok=True)
        library.unlink(missing_ok=True)
        paths = [str(each.result()) for each in objects.values()]
        self.run([
            str(self.toolchain.nvcc), "-ccbin", str(self.toolchain.host_compiler), "-shared",
            "-cudart", "static", *[f"-L{folder}" for folder in self.toolchain.library_dirs],
            "-o", str(library), *paths,
        ])  # fmt: skip

    def run(self, command: Sequence[str]) -> None:
        """A compiler's or linker's command.

        Raises:
            BuildError: it failed; the message holds what it said.
        """
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, env=self.toolchain.environment
        )
        if done.returncode:
            raise build_cuda.BuildError(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
