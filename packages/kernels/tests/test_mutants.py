"""The lists of mutants fit the sources, and what tries them takes nothing for a catch that is none.

`mutants_triton.py` itself runs in a nox session, `mutants_cuda.py` on a machine with a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[3] / "tools"
if not (TOOLS / "mutation.py").exists():
    pytest.skip("what runs mutants is in the repository, not here", allow_module_level=True)

import mutants_cuda  # noqa: E402 - they need the tools
from mutants_build import CSRC, pieces  # noqa: E402
from mutants_triton import MUTANTS, SUITE, Mutant  # noqa: E402

# A package of one function, its tests, and a list of mutants.
ANSWERS = "def answer():\n    return 42  # as everybody knows\n"
TESTS = """
import answers.numbers
def test_answer(): assert answers.numbers.answer() == 42
def test_other(): assert True
"""
LIST = """
import sys, tempfile
from pathlib import Path
sys.path.insert(0, TOOLS)
import mutation
from mutation import Mutant
HERE = Path(__file__).parent
MUTANTS = (
    Mutant("seen, as it fails", "numbers", "42", "41", "test_answer"),
    Mutant("seen, as it crashes", "numbers", "42", "__import__('os').abort()", "test_answer"),
    Mutant("seen, as it hangs", "numbers", "return 42", "while True: pass", "test_answer"),
    Mutant("not seen, a remark", "numbers", "everybody", "nobody", "test_answer"),
    Mutant("is judged by another test", "numbers", "42", "41", "test_other"),
    Mutant("cannot be imported", "numbers", "def", "fed", "test_answer"),
    Mutant("is killed from outside", "numbers", "42", "__import__('os').kill(0, 9)", "test_answer"),
    Mutant("is judged by no test", "numbers", "42", "41", "test_nothing"),
    Mutant("occurs twice", "numbers", "n", "m", "test_answer"),
)
SUITE = mutation.Suite(
    HERE / "src" / "answers", "{}.py", (HERE / "test_answers.py",), MUTANTS, seconds=3.0
)
with tempfile.TemporaryDirectory() as folder:
    options = mutation.parser("").parse_args()
    sys.exit(mutation.judge_copies(SUITE, Path(folder), options))
"""


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_just_one_place(mutant: Mutant, tmp_path: Path) -> None:
    path = SUITE.path(SUITE.copy(tmp_path, mutant), mutant)
    compile(path.read_text(encoding="utf-8"), mutant.module, "exec")


def test_there_are_enough_of_them() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20


def test_what_cuda_mutants_are_compiled_into_exists() -> None:
    assert {mutant.tests for mutant in mutants_cuda.SUITE.mutants} <= set(mutants_cuda.UNITS)
    assert set(mutants_cuda.UNITS) == set(mutants_cuda.SELECTIONS)
    parts = pieces(CSRC)
    assert len({part.name for part in parts}) == len(parts)
    for units in mutants_cuda.UNITS.values():
        for unit in units:
            assert any(part.is_of(unit) for part in parts), unit


def judge(folder: Path, only: str, tests: str = TESTS) -> subprocess.CompletedProcess[str]:
    """Runs the list above on those of its mutants whose names hold the word."""
    package = folder / "src" / "answers"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "numbers.py").write_text(ANSWERS)
    (folder / "test_answers.py").write_text(tests)
    (folder / "mutants.py").write_text(LIST.replace("TOOLS", repr(str(TOOLS))))
    command = [sys.executable, str(folder / "mutants.py"), "--only", only, "--jobs", "3"]
    return subprocess.run(
        [*command, "--json", str(folder / "record.json")], capture_output=True, text=True,
        check=False, env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
    )  # fmt: skip


@pytest.mark.parametrize(
    ("only", "status", "said"),
    [
        ("fails", 0, ["caught", "[test_answer]", "1 of 1 mutants caught"]),
        ("crashes", 0, ["caught", "[SIGABRT]"]),
        ("hangs", 0, ["caught", "[hangs]"]),
        ("remark", 1, ["survived", "0 of 1 mutants caught"]),
        ("another test", 1, ["survived"]),
        ("imported", 2, ["error", "pytest could not run: 2", "SyntaxError"]),
        ("outside", 2, ["error", "[SIGKILL]"]),
        ("no test", 2, ["do not pass on the sources as they are: pytest could not run: 5"]),
        ("twice", 1, ["occurs twice: its text occurs", "not once"]),
        ("unheard of", 1, ["no mutant is called anything with 'unheard of'"]),
    ],
)
def test_what_counts_as_a_catch(tmp_path: Path, only: str, status: int, said: list[str]) -> None:
    done = judge(tmp_path, only)
    assert done.returncode == status, done.stdout + done.stderr
    for each in said:
        assert each in done.stdout + done.stderr


@pytest.mark.parametrize(
    ("tests", "said"),
    [
        (TESTS.replace("== 42", "== 43"), "the tests do not pass on the sources as they are"),
        (TESTS.replace("numbers", "letters"), "pytest could not run: 2"),
        ("def test_answer(): pass\n", "the run went astray"),
    ],
    ids=["wrong", "cannot be imported", "tests something else"],
)
def test_a_broken_harness_catches_nothing(tmp_path: Path, tests: str, said: str) -> None:
    done = judge(tmp_path, "fails", tests)
    assert done.returncode == 2, done.stdout + done.stderr
    assert said in done.stdout
    assert "caught" not in done.stdout


def test_a_record_tells_what_was_run_and_what_came_of_it(tmp_path: Path) -> None:
    assert judge(tmp_path, "seen").returncode == 1
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["command"].startswith("python mutants.py --only seen --jobs 3 --json ")
    assert (record["total"], record["caught"], record["errors"]) == (4, 3, [])
    assert record["survivors"] == ["not seen, a remark"]
    assert record["versions"]["pytest"] == pytest.__version__
    assert record["card"] is None
    assert {name: each["by"] for name, each in record["mutants"].items()} == {
        "seen, as it fails": "test_answer",
        "seen, as it crashes": "SIGABRT",
        "seen, as it hangs": "hangs",
        "not seen, a remark": "nothing",
    }
