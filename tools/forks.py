"""Runs pytest many times over, each time in a fork of this process.

The process has imported what is slow to import, but nothing of the package under test, which each
run takes from a folder of its own. Linux only.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Outcome", "Trial", "run"]

_CRASHES = (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL)
_ASTRAY = 70  # the exit status of a run that tested something else


@dataclass(frozen=True)
class Trial:
    """One run of pytest on one copy of a package.

    Attributes:
        name: what it is about.
        place: the file that it is about.
        package: the folder of the copy, which is imported by its name.
        arguments: pytest's.
        limit: seconds after which it hangs.
    """

    name: str
    place: str
    package: Path
    arguments: tuple[str, ...]
    limit: float


@dataclass(frozen=True)
class Outcome:
    """How a trial ended.

    Attributes:
        verdict: ``caught``, if a test failed, crashed or hung; ``survived``, if all passed;
            ``error``, if the run proves nothing.
        by: the test, the signal or what else it was.
        seconds: how long it took.
        log: what it printed.
    """

    trial: Trial
    verdict: str
    by: str
    seconds: float
    log: str


def run(trials: Sequence[Trial], jobs: int) -> Iterator[Outcome]:
    """Runs the trials, ``jobs`` at a time, in their order; yields each as it ends."""
    waiting, running = list(trials), dict[int, tuple[Trial, float]]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                trial = waiting.pop(0)
                running[_start(trial)] = trial, time.monotonic()
            for pid, (trial, started) in list(running.items()):
                ended, status = os.waitpid(pid, os.WNOHANG)
                is_hanging = not ended and time.monotonic() - started > trial.limit
                if is_hanging:
                    os.killpg(pid, signal.SIGKILL)
                    os.waitpid(pid, 0)
                if ended or is_hanging:
                    del running[pid]
                    log = _log(trial).read_text(encoding="utf-8", errors="replace")
                    verdict, by = ("caught", "hangs") if is_hanging else _verdict(status, log)
                    yield Outcome(trial, verdict, by, time.monotonic() - started, log)
            time.sleep(0.01)
    finally:
        for pid in running:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def _start(trial: Trial) -> int:
    """Forks; the child is a process group, so that a hang is ended with whatever it started."""
    sys.stdout.flush()
    trial.package.parent.mkdir(parents=True, exist_ok=True)  # also of a package that was not built
    with _log(trial).open("wb") as log:
        if pid := os.fork():
            os.setpgid(pid, pid)
            return pid
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    status = _ASTRAY
    try:
        os.setpgid(0, 0)
        folder = str(trial.package.parent)
        sys.path.insert(0, folder)
        inherited = os.environ.get("PYTHONPATH")
        os.environ["PYTHONPATH"] = f"{folder}{os.pathsep}{inherited}" if inherited else folder
        import pytest

        status = int(pytest.main(list(trial.arguments)))
        module = sys.modules.get(trial.package.name)
        origin = Path(getattr(module, "__file__", None) or "nowhere")
        if status in (0, 1) and trial.package.resolve() != origin.resolve().parent:
            print(f"the tests imported {origin}")
            status = _ASTRAY
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _verdict(status: int, log: str) -> tuple[str, str]:
    """What a run's wait status says, and by what it was caught."""
    if os.WIFSIGNALED(status):
        name = signal.Signals(os.WTERMSIG(status)).name
        return ("caught" if os.WTERMSIG(status) in _CRASHES else "error"), name
    code = os.WEXITSTATUS(status)
    if code == 1:
        failed = re.findall(r"^(?:FAILED|ERROR) \S*?::(.+?)(?: - .*)?$", log, re.MULTILINE)
        return "caught", failed[0] if failed else "a failed test"
    if code == _ASTRAY:
        return "error", "the run went astray"
    return ("survived", "nothing") if code == 0 else ("error", f"pytest could not run: {code}")


def _log(trial: Trial) -> Path:
    """Beside the package; several trials may share one."""
    return trial.package.parent / f"{re.sub(r'[^a-z0-9]+', '-', trial.name.lower())}.log"
