"""What dtype="auto" means: by the checkpoint and the card, and by the weights if that decides."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from pagetide_models import ModelFormatError, load_model, loader  # noqa: E402
from pagetide_models.options import dtype_candidates  # noqa: E402

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("checkpoint", ["float32", "float16", "bfloat16"])
def test_the_cpu_computes_in_float32(checkpoint: Any) -> None:
    assert dtype_candidates("auto", checkpoint, CPU) == (torch.float32,)


@pytest.mark.parametrize(
    ("capability", "checkpoint", "expected"),
    [
        ((7, 5), "bfloat16", (torch.float16, torch.float32)),
        ((7, 5), "float16", (torch.float16,)),
        ((7, 5), "float32", (torch.float32,)),
        ((8, 0), "bfloat16", (torch.bfloat16,)),
        ((9, 0), "bfloat16", (torch.bfloat16,)),
        ((9, 0), "float16", (torch.float16,)),
    ],
)
def test_a_gpu_follows_the_checkpoint(
    monkeypatch: pytest.MonkeyPatch, capability: Any, checkpoint: Any, expected: Any
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    # E8: an emulated bfloat16 must not count, whatever this says.
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda *_: True)
    assert dtype_candidates("auto", checkpoint, CUDA) == expected
    assert dtype_candidates("bfloat16", checkpoint, CUDA) == (torch.bfloat16,)


@pytest.fixture
def as_on_sm75(monkeypatch: pytest.MonkeyPatch) -> None:
    both = (torch.float16, torch.float32)
    monkeypatch.setattr(loader, "dtype_candidates", lambda *_: both)


@pytest.mark.usefixtures("as_on_sm75")
def test_float16_where_every_weight_fits(
    tiny_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        model = load_model(tiny_folder({"dtype": "bfloat16"}))
    assert model.dtype == torch.float16
    assert model.kv_cache_spec.kv_dtype == "float16"
    assert "every weight fits float16" in caplog.text


@pytest.mark.usefixtures("as_on_sm75")
def test_float32_where_one_does_not(
    tiny_folder: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    folder = tiny_folder({"dtype": "bfloat16"})
    path = folder / "model.safetensors"
    raw = path.read_bytes()
    path.write_bytes(raw[:-4] + torch.tensor([70_000.0]).numpy().tobytes())
    with caplog.at_level(logging.WARNING):
        model = load_model(folder)
    assert model.dtype == torch.float32
    assert model.kv_cache_spec.kv_dtype == "float32"
    assert "model.norm.weight" in caplog.text
    assert "70000" in caplog.text
    assert "float32 instead" in caplog.text


def test_float16_that_was_asked_for_is_not_replaced(tiny_folder: Callable[..., Path]) -> None:
    folder = tiny_folder()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4] + torch.tensor([-7e4]).numpy().tobytes())
    with pytest.raises(ModelFormatError, match=r"model\.norm\.weight.*70000"):
        load_model(folder, dtype="float16")
