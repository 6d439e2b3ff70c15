"""The list of mutants fits the sources; `mutants_triton.py` itself runs in a nox session."""

from __future__ import annotations

import shutil
from pathlib import Path

import mutants_triton as mutants
import pytest


@pytest.mark.skipif(not mutants.SOURCES.exists(), reason="the sources are not beside the tests")
@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.name)
def test_each_mutant_changes_just_one_place(mutant: mutants.Mutant, tmp_path: Path) -> None:
    shutil.copytree(mutants.SOURCES, tmp_path / "package")
    mutant.apply(tmp_path / "package")
    path = tmp_path / "package" / "triton" / f"{mutant.module}.py"
    compile(path.read_text(encoding="utf-8"), mutant.module, "exec")


def test_there_are_enough_of_them() -> None:
    assert len({mutant.name for mutant in mutants.MUTANTS}) == len(mutants.MUTANTS) >= 20
