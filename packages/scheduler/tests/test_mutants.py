"""The list of mutants fits the sources; `mutants.py` itself runs in a session of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

if not (Path(__file__).resolve().parents[3] / "tools" / "mutation.py").exists():
    pytest.skip("what runs mutants is in the repository, not here", allow_module_level=True)

from mutants import MUTANTS, SUITE, Mutant


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_just_one_place(mutant: Mutant, tmp_path: Path) -> None:
    path = SUITE.path(SUITE.copy(tmp_path, mutant), mutant)
    compile(path.read_text(encoding="utf-8"), mutant.module, "exec")


def test_there_are_enough_of_them() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 20
