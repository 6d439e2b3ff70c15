"""The CPU's norm: `RMSNorm` in fewer operations, and as exact."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="needs torch")

from pagetide_models import load_model  # noqa: E402
from pagetide_models.cpu_norm import LengthNorm, replace_rms_norms  # noqa: E402
from pagetide_models.layers import RMSNorm  # noqa: E402


def _norm(size: int, eps: float = 1e-5) -> RMSNorm:
    norm = RMSNorm.__new__(RMSNorm)
    torch.nn.Module.__init__(norm)
    norm.eps = eps
    norm.weight = torch.nn.Parameter(torch.randn(size), requires_grad=False)
    return norm


def _exact(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + norm.eps).sqrt() * norm.weight.double()


@pytest.mark.parametrize("shape", [(0, 8), (1, 1), (1, 576), (300, 576), (3, 5, 64)])
@pytest.mark.parametrize("size", [1e-12, 1e-3, 1.0, 1e15])
def test_it_is_the_norm(shape: tuple[int, ...], size: float) -> None:
    torch.manual_seed(0)
    norm = _norm(shape[-1])
    x, update = torch.randn(shape) * size, torch.randn(shape) * size
    fast = LengthNorm(norm)
    tolerance = {"rtol": 5e-7, "atol": 0.0}
    torch.testing.assert_close(fast.normalise(x).double(), _exact(norm, x), **tolerance)
    normed, residual = fast(update, x)
    assert torch.equal(residual, update + x)
    torch.testing.assert_close(normed.double(), _exact(norm, update + x), **tolerance)
    assert fast(x, None)[1] is x


def test_rows_do_not_meet() -> None:
    fast = LengthNorm(_norm(8))
    x = torch.randn(3, 8)
    expected = fast.normalise(x)[[0, 2]]
    x[1] = torch.nan
    assert torch.equal(fast.normalise(x)[[0, 2]], expected)
    assert fast.normalise(torch.zeros(1, 8)).tolist() == [[0.0] * 8]


def test_every_float32_norm_is_replaced(tiny_folder: Callable[..., Path]) -> None:
    model = load_model(tiny_folder())
    assert not any(isinstance(module, RMSNorm) for module in model.modules())
    assert sum(isinstance(module, LengthNorm) for module in model.modules()) == 3


def test_other_dtypes_are_left_alone(tiny_folder: Callable[..., Path]) -> None:
    model = load_model(tiny_folder(), dtype="bfloat16")
    replace_rms_norms(model)
    assert not any(isinstance(module, LengthNorm) for module in model.modules())
