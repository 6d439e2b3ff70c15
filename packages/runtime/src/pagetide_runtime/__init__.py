"""The Pagetide inference engine: `LLM`, `Engine` and the `pagetide` command.

Names are imported on first use, so that the command line can look at a model file, and refuse a bad
one, before torch is loaded.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from pagetide_runtime.__about__ import __version__

if TYPE_CHECKING:
    from pagetide_runtime.completion import Completion, TextChunk
    from pagetide_runtime.config import EngineConfig
    from pagetide_runtime.engine import Engine
    from pagetide_runtime.errors import EngineDeadError, MemoryPlanError
    from pagetide_runtime.llm import LLM
    from pagetide_runtime.model_runner import ModelRunner
    from pagetide_scheduler import FinishReason, RequestOutput, SamplingParams

__all__ = [
    "LLM",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "FinishReason",
    "MemoryPlanError",
    "ModelRunner",
    "RequestOutput",
    "SamplingParams",
    "TextChunk",
    "__version__",
]

_HOMES = {
    "LLM": "pagetide_runtime.llm",
    "Completion": "pagetide_runtime.completion",
    "Engine": "pagetide_runtime.engine",
    "EngineConfig": "pagetide_runtime.config",
    "EngineDeadError": "pagetide_runtime.errors",
    "FinishReason": "pagetide_scheduler",
    "MemoryPlanError": "pagetide_runtime.errors",
    "ModelRunner": "pagetide_runtime.model_runner",
    "RequestOutput": "pagetide_scheduler",
    "SamplingParams": "pagetide_scheduler",
    "TextChunk": "pagetide_runtime.completion",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'pagetide_runtime' has no attribute {name!r}")
    return getattr(importlib.import_module(home), name)


def __dir__() -> list[str]:
    return sorted(__all__)
