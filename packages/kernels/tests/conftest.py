"""Lets the test files import their helpers by name, whatever directory pytest starts in."""

import os
import sys
from collections.abc import Generator
from pathlib import Path

import pytest
import torch

import pagetide_kernels as pk

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


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Generator[None, object, object]:
    """Where a back end declares bfloat16 unsupported (sm_75), a refusal is all there is to test."""
    try:
        return (yield)
    except pk.UnsupportedError as error:
        parameters = pyfuncitem.callspec.params if hasattr(pyfuncitem, "callspec") else {}
        name, device = parameters.get("backend"), parameters.get("device", "cuda")
        if name is None:
            raise
        half = pk.AttentionShape(1, 1, 64, 16, torch.float16, "float16")
        brain = pk.AttentionShape(1, 1, 64, 16, torch.bfloat16, "bfloat16")
        declared = pk.select_backend(name, half, device).unsupported_reason(
            brain, torch.device(device)
        )
        if declared is None or declared not in str(error):
            raise
        pytest.skip(f"refused as declared: {declared}")


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
