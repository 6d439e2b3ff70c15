"""Packed linears: equal to `F.linear`, their plain weight gone, and plain where packing fails."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from pagetide_models import cpu_linear, load_model  # noqa: E402
from pagetide_models.cpu_linear import PackedLinear, can_pack, pack_linears  # noqa: E402
from pagetide_models.layers import Linear  # noqa: E402


def _linear(rows: int, columns: int, bias: bool) -> Linear:
    linear = Linear.__new__(Linear)
    torch.nn.Module.__init__(linear)
    torch.manual_seed(0)
    linear.weight = torch.nn.Parameter(torch.randn(rows, columns), requires_grad=False)
    linear.bias = torch.nn.Parameter(torch.randn(rows), requires_grad=False) if bias else None
    return linear


@pytest.mark.skipif(not can_pack(), reason="this PyTorch or CPU lacks the packed product")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (7, 3), (64, 576), (130, 40), (960, 576)])
def test_the_product_is_that_of_linear(rows: int, columns: int, bias: bool) -> None:
    linear = _linear(rows, columns, bias)
    packed = PackedLinear(linear)
    for tokens in (0, 1, 2, 5, 33):
        x = torch.randn(tokens, columns)
        torch.testing.assert_close(packed(x), linear(x), atol=2e-4, rtol=1e-4)


@pytest.mark.skipif(not can_pack(), reason="this PyTorch or CPU lacks the packed product")
def test_few_rows_are_repeated_without_a_trace() -> None:
    packed = PackedLinear(_linear(96, 40, bias=True))
    x = torch.randn(7, 40)
    full = packed(x)
    for tokens in range(1, 7):
        few = packed(x[:tokens])
        assert few.shape == (tokens, 96)
        assert few.is_contiguous()
        torch.testing.assert_close(few, full[:tokens], atol=1e-5, rtol=1e-5)


def test_plain_layers_stay_where_packing_is_missing(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_linear, "can_pack", lambda: False)
    model = load_model(tiny_folder())
    assert isinstance(model.head, Linear)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.parametrize("fault", ["missing", "fails", "wrong"])
def test_a_faulty_operator_is_noticed(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    def broken(*_: Any) -> Any:
        if fault == "missing":
            raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute")
        if fault == "fails":
            raise RuntimeError("could not create a primitive")
        return torch.zeros(_[0].shape[0], 96)

    monkeypatch.setattr(cpu_linear, "_linear", broken)
    can_pack.cache_clear()
    try:
        assert not can_pack()
    finally:
        can_pack.cache_clear()


def test_other_dtypes_are_left_alone(tiny_folder: Callable[..., Path]) -> None:
    model = load_model(tiny_folder(), dtype="bfloat16")
    pack_linears(model)
    assert not any(isinstance(module, PackedLinear) for module in model.modules())


@pytest.mark.skipif(not can_pack(), reason="this PyTorch or CPU lacks the packed product")
def test_every_linear_of_a_model_is_packed(tiny_folder: Callable[..., Path]) -> None:
    model = load_model(tiny_folder())
    assert not any(isinstance(module, Linear) for module in model.modules())
    assert sum(isinstance(module, PackedLinear) for module in model.modules()) == 5


@pytest.mark.skipif(not can_pack(), reason="this PyTorch or CPU lacks the packed product")
def test_plain_weights_are_freed_one_after_another(
    tiny_folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    pack = cpu_linear._pack
    seen: list[weakref.ref[Any]] = []
    alive: list[int] = []

    def watched(weight: Any) -> Any:
        alive.append(sum(reference() is not None for reference in seen))
        seen.append(weakref.ref(weight))
        return pack(weight)

    monkeypatch.setattr(cpu_linear, "_pack", watched)
    load_model(tiny_folder({"tie_word_embeddings": False}, {"lm_head.weight": (70, 64)}))
    assert len(seen) == 5
    assert max(alive) <= 1  # the one before may still be bound in the loop
    assert seen[-1]() is None
