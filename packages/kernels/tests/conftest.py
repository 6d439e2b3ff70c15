"""Lets the test files import their helpers by name, whatever directory pytest starts in."""

import os
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

# Products this small take longer to share between threads than to compute, most of all on a busy
# machine; test_cpu.py runs with more than one.
torch.set_num_threads(1)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """``PAGETIDE_SHARD=1/4``: every fourth test, from the second on."""
    index, _, count = os.environ.get("PAGETIDE_SHARD", "0/1").partition("/")
    dropped = [item for i, item in enumerate(items) if i % int(count) != int(index)]
    items[:] = items[int(index) :: int(count)]
    config.hook.pytest_deselected(items=dropped)


if os.environ.get("TRITON_INTERPRET") == "1":
    from triton.runtime import interpreter

    patched: set[str] = set()

    def call(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        module = self.fn.__module__
        if module.startswith("triton.") and module not in patched:
            patched.add(module)
            interpreter._patch_lang(self.fn)
        return self.rewrite()(*args, **kwargs)

    # Triton's interpreter patches its language again at every call of a device function: a third of
    # its time. A launch has patched what our functions see, and what its library's see stays so.
    interpreter.InterpretedFunction.__call__ = call
