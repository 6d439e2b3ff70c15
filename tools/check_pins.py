"""Check that sibling pins, versions and changelogs agree with the tree.

A package pins its left neighbours as `pagetide-NAME>=X.Y.Z,<X.(Y+1)`, where X.Y.Z must be the
neighbour's own version: an older floor would let a stale wheel in, a newer one cannot be installed.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import tomli
from packaging.requirements import Requirement
from packaging.version import Version

ORDER = ["kvcache", "kernels", "models", "scheduler", "runtime"]
PACKAGES = Path(__file__).parent.parent / "packages"


def version_of(name: str) -> Version:
    """The version that the package's `__about__.py` states."""
    text = (PACKAGES / name / "src" / f"pagetide_{name}" / "__about__.py").read_text()
    found = re.search(r'__version__ = "([^"]+)"', text)
    if found is None:
        raise SystemExit(f"{name}: __about__.py states no __version__")
    return Version(found.group(1))


def problems() -> list[str]:
    """One line a disagreement."""
    found = []
    versions = {name: version_of(name) for name in ORDER}
    for position, name in enumerate(ORDER):
        project = tomli.loads((PACKAGES / name / "pyproject.toml").read_text())["project"]
        siblings = [
            requirement
            for requirement in map(Requirement, project.get("dependencies", []))
            if requirement.name.startswith("pagetide-")
        ]
        for requirement in siblings:
            sibling = requirement.name.removeprefix("pagetide-")
            if sibling not in ORDER[:position]:
                found.append(f"{name} depends on {sibling}, which is not to its left")
                continue
            version = versions[sibling]
            expected = f"<{version.major}.{version.minor + 1},>={version}"
            if ",".join(sorted(str(requirement.specifier).split(","))) != expected:
                found.append(f"{name} pins {requirement}; the tree says {expected}")
        if position and not any(r.name == f"pagetide-{ORDER[position - 1]}" for r in siblings):
            found.append(f"{name} does not depend on its left neighbour {ORDER[position - 1]}")
        if not (PACKAGES / name / "CHANGELOG.md").read_text().startswith("# Changelog"):
            found.append(f"{name}: CHANGELOG.md does not begin with '# Changelog'")
    return found


if __name__ == "__main__":
    lines = problems()
    print("\n".join(lines) or "pins: five packages agree with the tree")
    sys.exit(bool(lines))
