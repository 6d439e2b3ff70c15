"""The table of back ends: what works here, what does not and why, and the choice of one."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

import pagetide_kernels as pk
from pagetide_kernels import backends
from pagetide_kernels.cuda.backend import CudaBackend

SHAPE = pk.AttentionShape(9, 3, 64, 16, torch.float32, "float32")


def test_reference_and_cpu_work_everywhere_and_auto_takes_cpu() -> None:
    statuses = pk.available_backends("cpu")
    assert statuses["reference"].is_available
    assert statuses["cpu"].is_available
    assert pk.select_backend("auto", SHAPE, "cpu").name == "cpu"
    assert all(status.is_available == (not status.reason) for status in statuses.values())


@pytest.mark.parametrize("name", ["reference", "cpu"])
def test_selection_is_by_name_and_made_once(name: str) -> None:
    first = pk.select_backend(name, SHAPE, "cpu")
    assert first.name == name
    assert pk.select_backend(name, SHAPE, torch.device("cpu")) is first


def test_a_back_end_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """It becomes unavailable, with the reason; the rest, and auto, go on working."""
    broken = backends._Entry("pagetide_kernels.nowhere", "Backend", frozenset({"cpu"}))
    monkeypatch.setattr(backends, "_TABLE", {"broken": broken, **backends._TABLE})
    shape = pk.AttentionShape(9, 3, 64, 17, torch.float32, "float32")
    status = pk.available_backends("cpu")["broken"]
    assert not status.is_available
    assert "nowhere" in status.reason
    assert pk.select_backend("auto", shape, "cpu").name == "cpu"
    with pytest.raises(pk.UnsupportedError, match=r"cannot be imported: .*nowhere.*use cpu or"):
        pk.select_backend("broken", shape, "cpu")


def test_a_back_end_that_refuses_a_shape_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = pk.select_backend("cpu", SHAPE, "cpu")
    monkeypatch.setattr(type(cpu), "unsupported_reason", lambda *_: "not today")
    shape = pk.AttentionShape(9, 3, 64, 18, torch.float32, "float32")
    assert pk.select_backend("auto", shape, "cpu").name == "reference"
    with pytest.raises(pk.UnsupportedError, match=r"not today.*use .*reference"):
        pk.select_backend("cpu", shape, "cpu")


def test_auto_takes_what_claims_to_be_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the shapes it claims; one that cannot serve a shape is not asked."""
    reference = pk.select_backend("reference", SHAPE, "cpu")
    claims = lambda self, shape, device: shape.block_size == 19  # noqa: E731
    monkeypatch.setattr(type(reference), "is_fastest", claims)
    claimed = pk.AttentionShape(9, 3, 64, 19, torch.float32, "float32")
    assert pk.select_backend("auto", claimed, "cpu").name == "reference"
    assert pk.select_backend("cpu", claimed, "cpu").name == "cpu"
    assert pk.select_backend("auto", replace(claimed, block_size=20), "cpu").name == "cpu"


def test_the_compiled_back_end_claims_what_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half-precision queries on Hopper, whatever the cache; Triton prefills wider heads faster."""
    half = pk.AttentionShape(9, 3, 64, 16, torch.float16, "float16")
    device = torch.device("cuda", 0)
    for architecture in (75, 80, 90, 100):
        monkeypatch.setattr(
            "pagetide_kernels.cuda.library.compiled_architecture", lambda _, a=architecture: a
        )
        backend = CudaBackend()
        assert backend.is_fastest(half, device) == (architecture == 90)
        assert backend.is_fastest(replace(half, kv_dtype="int8"), device) == (architecture == 90)
        assert not backend.is_fastest(replace(half, head_dim=256), device)
        assert not backend.is_fastest(replace(half, query_dtype=torch.float32), device)


def test_importing_the_package_does_not_import_triton() -> None:
    """Nor does choosing a back end on the CPU."""
    code = """
import sys, torch
already = "triton" in sys.modules
import pagetide_kernels as pk
pk.select_backend("auto", pk.AttentionShape(9, 3, 64, 16, torch.float32, "float32"), "cpu")
sys.exit(not already and "triton" in sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_module_prints_what_works_and_why_not() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pagetide_kernels"], capture_output=True, text=True, check=True
    )
    assert f"pagetide-kernels {pk.__version__}" in done.stdout
    lines = [line.split(maxsplit=1) for line in done.stdout.splitlines()]
    assert ["cpu", "works"] in lines
    assert ["reference", "works"] in lines
    for name, status in pk.available_backends("cpu").items():
        if not status.is_available:
            assert f"no: {status.reason}" in done.stdout, name
