"""Comparing a model with transformers, layer by layer: ``python -m pagetide_models parity MODEL``.

Importing this imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pagetide_models.parity.compare import Comparison, compare_traces
    from pagetide_models.parity.report import Report
    from pagetide_models.parity.run import ParityOptions, run_parity
    from pagetide_models.parity.trace import Trace, trace_model
    from pagetide_models.parity.transformers_side import trace_transformers

_MODULES = {
    "Comparison": "compare",
    "ParityOptions": "run",
    "Report": "report",
    "Trace": "trace",
    "compare_traces": "compare",
    "run_parity": "run",
    "trace_model": "trace",
    "trace_transformers": "transformers_side",
}

__all__ = [
    "Comparison",
    "ParityOptions",
    "Report",
    "Trace",
    "compare_traces",
    "run_parity",
    "trace_model",
    "trace_transformers",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
