"""The wheel's build hook: compiles ``csrc`` into the wheel, or says why it does not.

Environment:
    PAGETIDE_BUILD_CUDA: ``0`` a pure wheel; ``1`` a library, or an error that says what is missing;
        unset: a library where one can be built, else a pure wheel, with a warning.
    PAGETIDE_CUDA_ARCHS: the architectures, like ``75 90a``; by default all of them.
    CUDA_HOME, PATH, CXX: where the compilers are. Without nvcc, PyPI's compiler wheels are used.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).resolve().parent))
import build_cuda

REMEDY = (
    "The wheel is pure: backend='cuda' will be unavailable and say so, the others work. "
    "PAGETIDE_BUILD_CUDA=0 asks for this, =1 makes it an error."
)


def _wish() -> str:
    wish = os.environ.get("PAGETIDE_BUILD_CUDA", "")
    if wish not in ("", "0", "1"):
        raise ValueError(f"PAGETIDE_BUILD_CUDA={wish!r} must be 0, 1 or unset")
    return wish


class CudaBuildHook(BuildHookInterface):  # type: ignore[type-arg]
    """Puts ``_lib/libpagetide_kernels.so`` into the wheel."""

    def dependencies(self) -> list[str]:
        """tvm-ffi for its headers; the compiler wheels where there is no nvcc."""
        if _wish() == "0" or build_cuda.missing_reason(need_nvcc=False):
            return []
        compilers = [] if build_cuda.find_nvcc() else list(build_cuda.COMPILER_WHEELS)
        return [build_cuda.FFI_REQUIREMENT, *compilers]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile, or leave the wheel pure."""
        wish = _wish()
        if wish == "0":
            self.app.display_warning("PAGETIDE_BUILD_CUDA=0: the CUDA library is not built.")
            return
        folder = Path(self.root) / "src" / "pagetide_kernels" / "_lib"
        try:
            library = build_cuda.build(folder, build_cuda.wanted_architectures())
        except build_cuda.BuildError as error:
            if wish == "1":
                raise RuntimeError(f"PAGETIDE_BUILD_CUDA=1, but {error}") from error
            self.app.display_warning(f"The CUDA library is not built: {error}. {REMEDY}")
            return
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"  # no CPython in it: one for every version
        build_data["artifacts"].append(f"src/pagetide_kernels/_lib/{library.name}")
