"""Breaks a package's sources on purpose, one place at a time, and sees whether its tests notice.

A list of mutants stands beside the tests that it tries (`packages/*/tests/mutants*.py`) and hands
them to `judge`: first the tests must pass on the sources as they are, then each mutant's tests must
fail. A crash and a hang are noticed, too; a pytest that could not run, or that imported something
other than the mutant's copy, is an error and proves nothing.

Every run is a fork of this process (`forks.py`), which has imported what is slow to import.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import platform
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from forks import Trial, run


@dataclass(frozen=True)
class Mutant:
    """One place made wrong: what it would mean, where, how, and the tests that should see it.

    Attributes:
        name: what the sources would be taken for.
        module: the file, as its list writes it.
        old: text that occurs just once in the file.
        new: what takes its place.
        tests: words of the list's ``selections`` or of pytest's ``-k``, joined by "or"; by default
            the list's default.
    """

    name: str
    module: str
    old: str
    new: str = ""
    tests: str = ""

    @property
    def slug(self) -> str:
        """The name as a file's."""
        return re.sub(r"[^a-z0-9]+", "-", self.name.lower())

    def apply(self, path: Path) -> None:
        """Rewrites the file.

        Raises:
            ValueError: the text does not occur just once; the message names the mutant.
        """
        text = path.read_text(encoding="utf-8")
        if (count := text.count(self.old)) != 1:
            raise ValueError(f"{self.name}: its text occurs {count} times in {path.name}, not once")
        path.write_text(text.replace(self.old, self.new), encoding="utf-8")


@dataclass(frozen=True)
class Suite:
    """A list of mutants, and how tests are run on a copy of their package.

    Attributes:
        package: the folder of the sources, whose name is the package's.
        place: where in it a mutant's ``module`` lies.
        files: the test files, the sharpest first.
        mutants: the list.
        selections: ``-k`` expressions by the words that stand for them.
        default: the tests of a mutant that names none; "" is all of them.
        options: pytest's further options.
        environment: variables of every run; None removes one.
        preload: modules imported before the forks.
        seconds: a run hangs that takes longer, and three times longer than its tests take on the
            sources as they are.
    """

    package: Path
    place: str
    files: tuple[Path, ...]
    mutants: tuple[Mutant, ...]
    selections: Mapping[str, str] = field(default_factory=dict)
    default: str = ""
    options: tuple[str, ...] = ()
    environment: Mapping[str, str | None] = field(default_factory=dict)
    preload: tuple[str, ...] = ("pytest",)
    seconds: float = 60.0

    def expression(self, mutant: Mutant) -> str:
        """The mutant's tests as a ``-k`` expression; empty for all."""
        words = (mutant.tests or self.default).split(" or ")
        return " or ".join(f"({self.selections.get(word, word)})" for word in words if word)

    def path(self, package: Path, mutant: Mutant) -> Path:
        """The mutant's file in a copy of the package."""
        return package / self.place.format(mutant.module)

    def copy(self, folder: Path, mutant: Mutant | None = None) -> Path:
        """Copies the package into ``folder``, with the mutant's place made wrong."""
        package = folder / self.package.name
        shutil.copytree(self.package, package, ignore=shutil.ignore_patterns("__pycache__"))
        if mutant is not None:
            mutant.apply(self.path(package, mutant))
        return package

    def trial(self, name: str, place: str, package: Path, expression: str, limit: float) -> Trial:
        """A run of the tests that the ``-k`` expression selects."""
        selection = ("-k", expression) if expression else ()
        arguments = ("-x", "-q", "-p", "no:cacheprovider", "-W", "ignore", *self.options)
        files = map(str, self.files)
        return Trial(name, place, package, (*arguments, *selection, *files), limit)


def parser(description: str) -> argparse.ArgumentParser:
    """The options that all lists share."""
    made = argparse.ArgumentParser(description=description)
    cores = len(os.sched_getaffinity(0))
    made.add_argument("--jobs", type=int, default=cores, help="runs at a time (%(default)s)")
    made.add_argument("--only", default="", help="mutants whose name holds this word")
    made.add_argument("--seconds", type=float, help="let no run that takes less be a hang")
    made.add_argument("--json", type=Path, help="a file for the record of the run")
    return made


def chosen(suite: Suite, options: argparse.Namespace) -> list[Mutant]:
    """The mutants that the options ask for; never none."""
    found = [mutant for mutant in suite.mutants if options.only in mutant.name]
    if not found:
        raise SystemExit(f"no mutant is called anything with {options.only!r}")
    return found


def judge_copies(suite: Suite, folder: Path, options: argparse.Namespace) -> int:
    """Makes the copies in the folder and judges them, see ``judge``."""
    mutants = chosen(suite, options)
    whole = suite.copy(folder / "whole")
    copies = [suite.copy(folder / str(i), mutant) for i, mutant in enumerate(mutants)]
    return judge(suite, mutants, whole, copies, options)


def judge(
    suite: Suite,
    mutants: Sequence[Mutant],
    whole: Path,
    copies: Sequence[Path],
    options: argparse.Namespace,
) -> int:
    """Tries the tests on the sources as they are, then the mutants.

    Args:
        suite: the list.
        mutants: those to try.
        whole: a copy of the package as it is.
        copies: one of each mutant.
        options: of ``parser``.

    Returns:
        The program's exit status: 0 if all were caught, 1 with survivors, 2 if something proves
        nothing.
    """
    started = time.monotonic()
    for name, value in suite.environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    for name in suite.preload:
        importlib.import_module(name)
    gc.freeze()

    seconds = options.seconds or suite.seconds
    expressions = dict.fromkeys(map(suite.expression, mutants))
    checks = [
        suite.trial(f"check {i}", each, whole, each, 10 * seconds)
        for i, each in enumerate(expressions)
    ]
    limits = {}
    for outcome in run(checks, options.jobs):
        if outcome.verdict != "survived":
            print(outcome.log)
            print(f"the tests do not pass on the sources as they are: {outcome.by}")
            return 2
        limits[outcome.trial.place] = max(seconds, 3 * outcome.seconds)
    print(f"the tests pass on the sources as they are ({time.monotonic() - started:.0f} s)")
    sys.stdout.flush()

    trials = [
        suite.trial(mutant.name, mutant.module, copy, expression, limits[expression])
        for mutant, copy in zip(mutants, copies, strict=True)
        for expression in [suite.expression(mutant)]
    ]
    outcomes = []
    for outcome in run(trials, options.jobs):
        trial = outcome.trial
        took = f"{outcome.seconds:5.1f} s"
        print(f"{outcome.verdict:8s} {took}  {trial.place}: {trial.name}  [{outcome.by}]")
        if outcome.verdict == "error":
            print(outcome.log)
        sys.stdout.flush()
        outcomes.append(outcome)
    by_verdict = {
        verdict: [each.trial.name for each in outcomes if each.verdict == verdict]
        for verdict in ("caught", "survived", "error")
    }
    print(f"{len(by_verdict['caught'])} of {len(outcomes)} mutants caught"
          f" in {time.monotonic() - started:.0f} s, {options.jobs} at a time")  # fmt: skip
    if options.json is not None:
        record = {
            "command": " ".join(["python", _short(sys.argv[0]), *sys.argv[1:]]),
            "card": _card(),
            "versions": _versions(suite),
            "total": len(outcomes),
            "caught": len(by_verdict["caught"]),
            "survivors": by_verdict["survived"],
            "errors": by_verdict["error"],
            "seconds": round(time.monotonic() - started, 1),
            "mutants": {
                each.trial.name: {"by": each.by, "seconds": round(each.seconds, 1)}
                for each in outcomes
            },
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if by_verdict["error"]:
        return 2
    return 1 if by_verdict["survived"] else 0


def _short(script: str) -> str:
    """A script's path from the checkout's root."""
    root = Path(__file__).resolve().parent.parent
    path = Path(script).resolve()
    return str(path.relative_to(root)) if root in path.parents else path.name


def _card() -> str | None:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    return str(torch.cuda.get_device_name())


def _versions(suite: Suite) -> dict[str, str]:
    modules = {name: sys.modules[name] for name in suite.preload}
    found = {name: getattr(module, "__version__", None) for name, module in modules.items()}
    return {"python": platform.python_version(), **{k: str(v) for k, v in found.items() if v}}
